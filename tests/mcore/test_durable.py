"""A checkpoint has its name when all of it is on the disk; what cannot be read is not called damaged."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launch import found_by
from megatron_fspo.weights import folder

WORKER = Path(__file__).with_name("durable_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, random_checkpoints: dict[str, Path]) -> Any:
    return found_by(WORKER, tmp_path_factory.mktemp("durable"), str(random_checkpoints["tied"]), nproc=1)


def test_files_and_folders_are_on_the_disk_before_the_name_and_the_name_at_the_end(found: Any) -> None:
    events = [tuple(event) for event in found["events"]]
    named = events.index(("rename", "one"))
    before = {path for kind, path in events[:named] if kind == "sync"}
    assert len(found["files"]) >= 7
    assert before == {"one.partial", *(f"one.partial/{name}" for name in found["files"])}
    assert events[named + 1 :] == [("sync", "."), ("sync", "..")]


def test_what_cannot_be_read_is_not_damaged(found: Any) -> None:
    kind, text = found["unreadable"]
    assert kind == "TrainingError" and "trainer.json" in text and "Input/output error" in text
    assert found["lost"][0] == "InputError" and "trainer.json" in found["lost"][1]
    assert found["whole"] == []


def test_what_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_PAUSES", (0.0, 0.0))
    read = Mock(side_effect=[OSError(errno.ESTALE, ""), OSError(errno.ESTALE, ""), "read"])
    assert folder.patiently(read) == "read"
    denied = Mock(side_effect=OSError(errno.EACCES, ""))
    with pytest.raises(OSError):
        folder.patiently(denied)
    assert denied.call_count == 1
