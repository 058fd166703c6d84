"""families_worker.py CHECKPOINTS OUT WORLD: starts the checks on every rank.

Megatron's checkpoint writer starts processes that import this file: it is small for their sake.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from families_checks import run

    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
