"""Going on: what is refused leaves the folder as it was, and ``--resume auto`` finds what is whole."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_fspo.weights.folder import SUMS, read_sums
from runs import rows, run, trained

ONE = "--parallel.tensor 1 --parallel.sequence false --evaluation.every 0 --checkpoint.every 1".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``run``: two steps, a checkpoint each."""
    folder = tmp_path_factory.mktemp("resume")
    trained(folder, "run", *ONE, "--run.steps", "2", "--resume", "auto", nproc=1)
    assert not (folder / "run/job.lock").exists()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(folder: Path, name: str) -> None:
    """Flip a bit of a file of the newest checkpoint, anywhere in it."""
    path = folder / "checkpoints/step_000002" / name
    whole = bytearray(path.read_bytes())
    whole[random.randrange(len(whole))] ^= 1 << random.randrange(8)
    path.write_bytes(whole)


def test_a_damaged_checkpoint_names_the_one_before_and_auto_takes_it(made: Path) -> None:
    damage(shutil.copytree(made / "run", made / "damaged"), "torch_dist/__0_0.distcp")
    before = contents(made / "damaged")
    extra = [*ONE, "--run.steps", "3", "--resume"]
    refused = run(made, "damaged", *extra, nproc=1)
    (line,) = refused.stderr.splitlines()
    assert "checkpoints/step_000002/torch_dist/__0_0.distcp is damaged" in line
    assert "The checkpoint before it is" in line and "step_000001: use --resume auto" in line
    assert contents(made / "damaged") == before, "a refused run wrote into the folder"

    went_on = trained(made, "damaged", *extra, "auto", nproc=1)
    assert "Renamed it to step_000002.damaged;" in went_on
    assert [row["step"] for row in rows(made, "damaged")] == [1, 2, 3]
    names = sorted(path.name for path in (made / "damaged/checkpoints").iterdir())
    assert names == ["step_000002", "step_000002.damaged", "step_000003"]


def test_every_file_of_a_checkpoint_is_in_its_list(made: Path) -> None:
    folder = made / "run/checkpoints/step_000002"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {*read_sums(folder), SUMS}
    if (program := shutil.which("sha256sum")) is not None:
        subprocess.run([program, "-c", "--strict", SUMS], cwd=folder, check=True, capture_output=True)
