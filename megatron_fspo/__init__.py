"""FSPO (Fair Sequence Policy Optimization) on Megatron-Core.

``megatron_fspo.objective`` depends on torch only: ``from megatron_fspo.objective import FSPOBand``.
"""

__version__ = "0.2.0"
