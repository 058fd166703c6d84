"""Going on: what is refused leaves the folder as it was, and ``--resume auto`` finds what is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch import why
from runs import rows, run

ONE = "--parallel.tensor 1 --parallel.sequence false --evaluation.every 0 --checkpoint.every 1".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run``: two steps, a checkpoint each."""
    folder = tmp_path_factory.mktemp("resume")
    result = run(folder, "run", *ONE, "--run.steps", "2", "--resume", "auto", nproc=1)
    assert result.returncode == 0, why(result.stderr)
    assert not (folder / "run/job.lock").exists()
    return folder


def copy(made: Path, name: str) -> Path:
    return Path(shutil.copytree(made / "run", made / name))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(folder: Path) -> None:
    (part, *_) = sorted((folder / "checkpoints/step_000002/torch_dist").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-100])


def test_a_damaged_checkpoint_names_the_one_before_and_auto_takes_it(made: Path) -> None:
    damage(copy(made, "damaged"))
    before = contents(made / "damaged")
    extra = [*ONE, "--run.steps", "3", "--resume"]
    refused = run(made, "damaged", *extra, nproc=1)
    (line,) = refused.stderr.splitlines()
    assert "checkpoints/step_000002" in line
    assert (
        "The checkpoint before it is" in line and "step_000001: go on from there with --resume auto" in line
    )
    assert contents(made / "damaged") == before, "a refused run wrote into the folder"

    went_on = run(made, "damaged", *extra, "auto", nproc=1)
    assert went_on.returncode == 0, why(went_on.stderr)
    assert "It is now step_000002.damaged, and the run goes on from the one before" in went_on.stdout
    assert [row["step"] for row in rows(made, "damaged")] == [1, 2, 3]
    names = sorted(path.name for path in (made / "damaged/checkpoints").iterdir())
    assert names == ["step_000002", "step_000002.damaged", "step_000003"]


def test_a_corrupt_row_is_refused_and_nothing_is_written(made: Path) -> None:
    folder = copy(made, "corrupt")
    metrics = folder / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([first, '{"step": 2, "loss"\n', *rest]))
    before = contents(folder)
    refused = run(made, "corrupt", *ONE, "--run.steps", "3", "--resume", nproc=1)
    (line,) = refused.stderr.splitlines()
    assert f"{metrics}:2: not a row of this trainer" in line
    assert contents(folder) == before, "a refused run wrote into the folder"
