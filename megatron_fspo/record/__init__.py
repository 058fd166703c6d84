"""The records of a run in its folder and with trackers: rows, sequences, samples."""
