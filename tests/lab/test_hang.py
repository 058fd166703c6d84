"""``status --hang`` reads the dumps of a job that hangs, and names the rank that the others wait for."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from launch import REPO, forked
from megatron_fspo.cli import main
from megatron_fspo.lab.hang import examine


def hang(folder: Path, fault: str) -> str:
    forked([str(REPO / "tests/lab/hanging_rank.py"), str(folder), fault], nproc=3, TORCH_FR_BUFFER_SIZE="100")
    assert len(list(folder.iterdir())) == 3
    return "\n".join(examine(folder))


def test_the_rank_that_left_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = hang(tmp_path, "gone")
    first, last, *others = text.splitlines()
    assert first == "rank 2 is awaited"
    assert last.startswith("  rank 2 last: broadcast Float [3, 3]  megatron_fspo/parallel/groups.py:")
    assert [line[:36] for line in others] == [
        f"  rank {r} waits in default_pg (0,1,2): "[:36] for r in (0, 1)
    ]
    assert all("all_reduce Long [1, 1]" in line and line.endswith(" any_rank") for line in others)
    assert main(["status", "--hang", str(tmp_path / "comm_lib")]) == 1
    assert capsys.readouterr().out.strip() == text
    assert main(["status", "--hang", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [text]


def test_the_rank_in_another_collective_and_a_dump_as_json(tmp_path: Path) -> None:
    text = hang(tmp_path, "other")
    assert text.startswith("default_pg (0,1,2): call 3\n  rank 2: broadcast Float")
    assert "  ranks 0-1: all_reduce Long" in text


class Spy:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"entries": [{}]}', pickle.dumps(Spy()), pickle.dumps([1]), b"{"]
)
def test_a_file_that_is_no_dump_is_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "comm_lib_trace_rank_0").write_bytes(content)
    assert main(["status", "--hang", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "is no dump of torch's flight recorder" in said.err and "run" not in said.out


def test_what_is_read_has_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fspo.lab.hang._MOST_BYTES", 10)
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_0").write_bytes(b" " * 11)
    assert main(["status", "--hang", str(tmp_path)]) == 2
    assert "rank_0 has 11 bytes, and a dump at most 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hang", "nowhere"], "no file's name ends with a rank"),
        ([], "name the folder"),
        (["a", "--hang", "b"], "name the folder"),
    ],
)
def test_what_is_asked_is_checked(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *words]) == 2
    assert told in capsys.readouterr().err
