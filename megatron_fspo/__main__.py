"""``python -m megatron_fspo`` is ``megatron-fspo``."""

import sys

from megatron_fspo.cli import main

if __name__ == "__main__":
    sys.exit(main())
