"""Full disks and killed conversions: the output is not there, or is the old one, whole; no litter remains."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from weights_helpers import assert_bits, contents, refused, tensors_of, to_hf, to_megatron

Convert = Callable[[Path, Path], object]
REPO = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("killed_worker.py")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond is an ``OSError``: Python ignores the signal."""
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


DIRECTIONS = {"to Megatron": ("hf", to_megatron), "to Hugging Face": ("megatron", to_hf)}


@pytest.mark.parametrize("present", [False, True], ids=["new", "replacing"])
# Within the first tensor; after it; in the middle; and in the index or manifest.
@pytest.mark.parametrize("size", [1_000, 50_000, 105_000, 200_000])
@pytest.mark.parametrize(("name", "convert"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_file_too_large_leaves_no_trace(
    sound: Path, tmp_path: Path, name: str, convert: Convert, size: int, present: bool
) -> None:
    if present:
        convert(sound / name, tmp_path / "out")

    def limited() -> None:
        with files_of_at_most(size):
            convert(sound / name, tmp_path / "out")

    refused(limited, tmp_path, "/out", "File too large; nothing written")


@pytest.mark.parametrize(("name", "convert"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_disk_without_room_is_seen_before_the_first_byte(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, convert: Convert
) -> None:
    size = sum(tensor.nbytes for tensor in tensors_of(sound / "hf").values())
    free = SimpleNamespace(free=size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    refused(lambda: convert(sound / name, tmp_path / "out"), tmp_path, f"{size - 1:,}", f"{size:,}")
    free.free = size
    convert(sound / name, tmp_path / "out")


def test_folders_made_for_the_output_go_with_it(sound: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "newer" / "out"
    to_megatron(sound / "hf", out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "new" / "newer")  # new is the user's, though empty
    with files_of_at_most(1000):
        refused(lambda: to_megatron(sound / "hf", out), tmp_path, "File too large")


def test_a_killed_conversion_leaves_no_half_checkpoint(sound: Path, tmp_path: Path) -> None:
    """Four are killed at once: each direction, where nothing was and where a checkpoint was."""
    jobs, outs = [], {}
    for direction, (name, convert) in DIRECTIONS.items():
        for present in (False, True):
            out = tmp_path / f"{name}-{present}"
            outs[out] = (sound / name, convert)
            jobs += [direction, str(sound / name), str(out)]
            if present:
                convert(sound / name, out)
    before = {out: contents(out) for out in outs}
    process = subprocess.Popen(
        [sys.executable, WORKER, *jobs], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    with process, process.stdin, process.stdout:
        assert process.stdout.readline() == b"all are in the middle\n"
        process.kill()
    for out in outs:
        assert out.with_name(f".{out.name}.partial").is_dir()
        assert contents(out) == before[out]

    for out, (source, convert) in outs.items():
        convert(source, out)
    assert {path.name for path in tmp_path.iterdir()} == {out.name for out in outs}
    for out, (_, convert) in outs.items():
        if convert is to_megatron:
            to_hf(out, tmp_path / "back" / out.name)
        found = tensors_of(tmp_path / "back" / out.name if convert is to_megatron else out)
        assert_bits(found, tensors_of(sound / "hf"))


@pytest.mark.parametrize("fails", [False, True], ids=["next succeeds", "next fails"])
def test_a_kill_between_the_two_renames_loses_nothing(sound: Path, tmp_path: Path, fails: bool) -> None:
    """The old one is aside, the new one not yet in its place."""
    to_megatron(sound / "hf", tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.old")
    shutil.copytree(sound / "megatron", tmp_path / ".out.partial")
    if fails:
        with files_of_at_most(1000), pytest.raises(ValueError, match="File too large"):
            to_megatron(sound / "hf", tmp_path / "out")
    else:
        to_megatron(sound / "hf", tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
