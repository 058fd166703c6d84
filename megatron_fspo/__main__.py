"""Entry point of ``python -m megatron_fspo``."""

import sys

from megatron_fspo.cli import main

if __name__ == "__main__":
    sys.exit(main())
