"""Programs that look at runs and dumps, before and after training: plan, calibrate, report, explain, sweep, status.

Training imports nothing of it; its packages are the extra ``lab``.
"""
