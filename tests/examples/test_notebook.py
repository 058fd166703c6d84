"""The notebook runs from its first cell to its last, in an empty folder, and shows what it says it shows."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import REPO, environment

NOTEBOOK = REPO / "examples/notebook/fspo.ipynb"
PICTURES = 4
"""Two of the notebook's own, two of the report."""


def cells(path: Path) -> list[dict[str, Any]]:
    return [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]


def outputs(path: Path) -> list[dict[str, Any]]:
    return [output for cell in cells(path) for output in cell["outputs"]]


def pictures(path: Path) -> int:
    data = [output.get("data", {}) for output in outputs(path)]
    return sum("image/png" in one or "image/svg+xml" in one for one in data)


def printed(path: Path) -> str:
    return "".join("".join(output["text"]) for output in outputs(path) if output["output_type"] == "stream")


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    copy = Path(shutil.copy(NOTEBOOK, tmp_path))
    bin_folder = Path(sys.executable).parent
    where = {
        **environment(),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    words = [bin_folder / "jupyter-execute", "--inplace", "--timeout=600", copy]
    done = subprocess.run(words, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert pictures(copy) == PICTURES
    rewards = [float(value) for value in re.findall(r"step +\d+/12 +reward ([\d.]+)", printed(copy))]
    assert len(rewards) == 12 and rewards[-1] > rewards[0]
    rows = re.findall(r"^(FSPO|RLOO|GSPO) +(.+)$", printed(copy), re.MULTILINE)
    first_and_last = {name: (float(row.split("%")[0]), float(row.split("%")[-2])) for name, row in rows}
    short, long = first_and_last["RLOO"]
    assert short == 0 and long > 30
    short, long = first_and_last["GSPO"]
    assert short > 80 and long < 15
    assert max(first_and_last["FSPO"]) < 25


def test_what_is_kept_of_it_is_a_whole_run() -> None:
    assert pictures(NOTEBOOK) == PICTURES and "step   12/12" in printed(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells(NOTEBOOK)] == list(range(1, len(cells(NOTEBOOK)) + 1))
    assert str(REPO) not in NOTEBOOK.read_text(encoding="utf-8") and NOTEBOOK.stat().st_size < 400_000
