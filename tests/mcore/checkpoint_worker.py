"""checkpoint_worker.py FOLDER CHECKPOINT EXPERTS: saves and resumes in several layouts; checks on every rank.

checkpoint_worker.py FOLDER CHECKPOINT EXPERTS killed: saves, then dies while it saves again.

Megatron's checkpoint writer starts processes that import this file: it is small for their sake.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    import checkpoint_checks

    check = checkpoint_checks.be_killed if sys.argv[4:] == ["killed"] else checkpoint_checks.run
    check(*map(Path, sys.argv[1:4]))
