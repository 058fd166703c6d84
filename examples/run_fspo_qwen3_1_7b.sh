#!/usr/bin/env bash
""":"
# FSPO on Qwen3-1.7B: what run_fspo_qwen3_8b.sh does, with examples/qwen3_1_7b/run.toml over the configuration
# of the 8B model. Words, environment and both ways to start it are those of that file.
here=$(cd "$(dirname "$0")" && pwd)
exec bash "$here/run_fspo_qwen3_8b.sh" --config "$here/qwen3_1_7b/run.toml" "$@"
":"""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.argv[1:1] = ["--config", str(HERE / "qwen3_1_7b/run.toml")]
    runpy.run_path(str(HERE / "run_fspo_qwen3_8b.sh"), run_name="__main__")
