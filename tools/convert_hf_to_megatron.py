"""``megatron-fspo convert hf-to-megatron``, from a checkout."""

import sys

from megatron_fspo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
