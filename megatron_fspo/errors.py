"""Errors a user can act on."""


class InputError(ValueError):
    """Something the user gave is wrong: a config key, a file, a checkpoint.

    The command line prints the message as one line and ends with exit status 2. So the message names
    the key or file, the value found, and what would be right.
    """


class TrainingError(RuntimeError):
    """Training cannot go on (too many non-finite sequences, a non-finite gradient). Exit status 1."""


class RewardError(TrainingError):
    """The rewards of a rollout are no use. Every rank raises it, so a checkpoint may still be written."""


class StopRequested(TrainingError):
    """The job was asked to stop (SIGTERM), and a wait that may end early did."""
