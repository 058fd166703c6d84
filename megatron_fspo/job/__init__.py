"""Coordination of a job's ranks: start, heartbeat, waiting, and lock and status files of the run folder."""
