"""Commands on runs, dumps and data: plan, calibrate, report, explain, sweep, status, data check.

Only ``megatron_fspo.cli`` imports them. Their dependencies are the extra ``lab``.
"""
