"""The ranks of a job among each other and with the outside: heartbeat, waiting, start, lock, run folder."""
