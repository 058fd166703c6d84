"""A rank of ``train`` that starts in a folder of its own, as on a node of its own.

node_worker.py FOLDER ARGUMENTS...: in FOLDER/node<rank>.
"""

from __future__ import annotations

import os
import sys

from megatron_fspo.cli import main
from megatron_fspo.job import consistency

if __name__ == "__main__":
    os.chdir(f"{sys.argv[1]}/node{os.environ['RANK']}")
    consistency.VISIBLE_SECONDS = 1.0  # this is no network file system
    sys.exit(main(sys.argv[2:]))
