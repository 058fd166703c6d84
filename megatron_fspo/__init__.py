"""FSPO (Fair Sequence Policy Optimization) on Megatron-Core.

The objective alone needs torch and nothing else: ``from megatron_fspo.objective import FSPOBand``.
"""

__version__ = "0.2.0"
