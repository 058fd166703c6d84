"""The command line with a fault in it: ``faulty_command.py FAULT ARGUMENTS...``"""

from __future__ import annotations

import sys

from faults import FAULTS

from megatron_fspo.cli import main

if __name__ == "__main__":
    with FAULTS[sys.argv[1]].patch():
        sys.exit(main(sys.argv[2:]))
