"""What a change of structure must leave byte for byte as it is: figures, files, words of the command line.

python tests/goldens.py build/before        # on the commit before
python tests/goldens.py build/after         # on the one after
diff -r build/before build/after
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).parents[1]
CHECKPOINT = "examples/make_sum/checkpoint"
COMMANDS = "train verify calibrate evaluate explain plan serve status sweep data report doctor".split()
OURS = ("-m", "megatron_fspo")


def run(*words: str, folder: Path = REPO) -> str:
    """Standard output of a Python program that runs in the folder; ends where it fails."""
    paths = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main(out: Path) -> None:
    """Write one file for each."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "help").write_text(
        "".join(run(*OURS, *words, "--help") for words in ([], *([c] for c in COMMANDS)))
    )
    (out / "config.md").write_text((REPO / "docs/config.md").read_text(encoding="utf-8"), encoding="utf-8")
    run(*OURS, "verify", "--nproc", "2", "--json", str(out / "verify"))
    with tempfile.TemporaryDirectory() as folder:
        short = "--parallel.tensor 1 --parallel.sequence false --run.steps 4 --evaluation.every 2 "
        short += "--evaluation.samples 2"
        config = "examples/make_sum/run.toml"
        run(*OURS, "train", "--config", config, "--run.folder", folder, "--run.name", "run", *short.split())
        for name in ("metrics", "sequences", "samples"):
            rows = map(json.loads, Path(folder, f"run/{name}.jsonl").read_text().splitlines())
            kept = [
                {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows
            ]
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
        there = Path(folder)  # manifests name their source: "megatron", not the temporary folder
        run(str(REPO / "tools/convert_hf_to_megatron.py"), CHECKPOINT, f"{folder}/megatron")
        run(str(REPO / "tools/convert_megatron_to_hf.py"), "megatron", "hf", folder=there)
        files = sorted(
            path for kind in ("megatron", "hf") for path in Path(folder, kind).rglob("*") if path.is_file()
        )
        sums = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files
        ]
        (out / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder for the files; replaced")
    main(parser.parse_args().out.resolve())
