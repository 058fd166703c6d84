"""``megatron-fspo convert megatron-to-hf``, from a checkout."""

import sys

from megatron_fspo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
