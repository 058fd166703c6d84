"""``megatron-fspo convert verify``, from a checkout."""

import sys

from megatron_fspo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
