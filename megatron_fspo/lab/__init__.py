"""What looks at runs, dumps and data: plan, calibrate, report, explain, sweep, status, data check.

Training imports nothing of it; its packages are the extra ``lab``.
"""
