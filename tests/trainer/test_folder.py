"""The folder of a run: which checkpoint to resume from, what to keep, what to refuse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_fspo.config import Config
from megatron_fspo.config.loading import config_changes, load_config
from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import (
    Resume,
    check_writable,
    checkpoint_folder,
    checkpoints,
    checkpoints_to_resume,
    newest_checkpoint,
    put_aside,
    remove_old_checkpoints,
    write_config,
)
from megatron_fspo.job.lock import FolderLock


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"steps": 3, "folder": folder, "name": "one"},
            "model": {"checkpoint": "c"},
            "data": {"train": "t"},
            "reward": {"name": "exact_match"},
            "rollout": {"prompts": 4, "max_response_tokens": 8},
            **sections,
        }
    )


def make_checkpoints(config: Config, *names: str) -> Path:
    folder = config.run_folder / "checkpoints"
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "metadata.json").write_text("{}")
    return folder


def test_the_newest_whole_checkpoint_is_resumed(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = make_checkpoints(
        config, "step_000002", "step_999999", "step_1000000", "step_1000001.partial", "other"
    )
    assert checkpoints_to_resume(config, "newest") == checkpoints(config)
    assert [path.name for path in checkpoints(config)] == ["step_000002", "step_999999", "step_1000000"]
    assert checkpoint_folder(config, 2) == folder / "step_000002"
    shutil.rmtree(folder)
    make_checkpoints(config, "step_000002.partial")
    assert checkpoints_to_resume(config, "newest") == [], "it starts over"


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [20, 30]), (5, [1, 10, 20, 30])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    config = make_config(tmp_path, checkpoint={"keep": keep})
    folder = make_checkpoints(
        config, *(f"step_{step:06d}" for step in (1, 10, 20, 30)), "step_000040.partial"
    )
    remove_old_checkpoints(config, good_step=2_000_000)
    assert checkpoints(config) == [checkpoint_folder(config, step) for step in left]
    assert not (folder / "step_000040.partial").exists()


def test_milestones_stay(tmp_path: Path) -> None:
    config = make_config(tmp_path, checkpoint={"keep": 1, "milestones": 20})
    make_checkpoints(
        config,
        *(f"step_{name}" for name in ("000010", "000020", "000040", "000050", "000061")),
    )
    remove_old_checkpoints(config, good_step=2_000_000)
    assert [path.name for path in checkpoints(config)] == ["step_000020", "step_000040", "step_000061"]


def test_the_last_from_before_the_trouble_stays(tmp_path: Path) -> None:
    config = make_config(tmp_path, checkpoint={"keep": 2})
    make_checkpoints(config, *(f"step_{step:06d}" for step in (5, 10, 20, 23)))
    remove_old_checkpoints(config, good_step=10)
    assert checkpoints(config) == [checkpoint_folder(config, step) for step in (10, 20, 23)]
    assert newest_checkpoint(config, step=19) == checkpoint_folder(config, 10)
    assert newest_checkpoint(config, step=9) is None


def test_what_cannot_be_removed_is_returned_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(Path(), checkpoint={"keep": 1})
    folder = make_checkpoints(config, *(f"step_{step:06d}" for step in (10, 20, 30, 40)), "elsewhere")
    (folder / "step_000005").symlink_to("elsewhere")
    (folder / "stray.partial").symlink_to("elsewhere")
    (folder / "step_000010").chmod(0o555)
    for path in (Path(), config.run_folder, folder, folder / "step_000020", folder / "step_000030"):
        path.chmod(0o777)
    links = {folder / "step_000005", folder / "stray.partial"}
    with nobody():
        for _ in range(2):
            stays = remove_old_checkpoints(config, good_step=40)
            assert stays.keys() == {*links, folder / "step_000010.partial"}
    assert checkpoints(config) == [folder / "step_000005", checkpoint_folder(config, 40)]
    assert (folder / "elsewhere/metadata.json").exists()
    if os.geteuid():
        (folder / "step_000010.partial").chmod(0o777)


@contextmanager
def nobody() -> Iterator[None]:
    """As a user who is stopped by modes; the superuser is not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_half_removed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, checkpoint={"keep": 1})
    make_checkpoints(config, "step_000010", "step_000020")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        remove_old_checkpoints(config, good_step=2_000_000)
    assert checkpoints(config) == [checkpoint_folder(config, 20)]
    remove_old_checkpoints(config, good_step=2_000_000)
    assert list((config.run_folder / "checkpoints").iterdir()) == [checkpoint_folder(config, 20)]


def test_a_new_run_wants_an_empty_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert checkpoints_to_resume(config, "no") == []
    config.run_folder.mkdir()
    assert checkpoints_to_resume(config, "no") == []
    (config.run_folder / "notes.txt").touch()
    with pytest.raises(InputError, match=r"/one holds a run already: .*--resume.*run\.name"):
        checkpoints_to_resume(config, "no")


def test_auto_goes_on_where_there_is_a_run_and_starts_where_there_is_none(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(InputError, match="--resume: there is no run in"):
        checkpoints_to_resume(config, "newest")
    assert checkpoints_to_resume(config, "auto") == [] and not config.run_folder.exists()
    write_config(config)
    assert checkpoints_to_resume(config, "auto") == []
    make_checkpoints(config, "step_000001", "step_000002")
    assert checkpoints_to_resume(config, "auto") == checkpoints(config) != []


@pytest.mark.parametrize("resume", ["no", "newest", "auto"])
def test_a_run_that_is_under_way_is_left_alone(tmp_path: Path, resume: Resume) -> None:
    config = make_config(tmp_path)
    held = FolderLock(config.run_folder)
    with pytest.raises(InputError, match="is in use by process"):
        checkpoints_to_resume(config, resume)
    assert checkpoints_to_resume(config, resume, mine=held.owner) == []
    held.release()


def test_a_damaged_checkpoint_gives_its_name_to_the_next(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    folder = make_checkpoints(config, "step_000001", "step_000002", "step_000002.damaged")
    assert put_aside(folder / "step_000002") == folder / "step_000002.damaged"
    assert put_aside(folder / "step_000001") == folder / "step_000001.damaged"
    assert checkpoints(config) == []
    remove_old_checkpoints(config, good_step=2_000_000)
    assert len(list(folder.iterdir())) == 2


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "runs/one", probe=True)
    with pytest.raises(InputError, match=r"run\.folder: /proc/none/one cannot be written"):
        check_writable(Path("/proc/none/one"), probe=True)  # root may write there, says os.access
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.folder: .*/file/one cannot be made: .*/file is a file"):
        check_writable(tmp_path / "file/one")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(InputError, match=r"run\.folder: .*/runs/one cannot be written: .* is read-only"):
        check_writable(tmp_path / "runs/one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_configuration_is_kept_and_changes_are_told(tmp_path: Path) -> None:
    first = make_config(tmp_path)
    assert config_changes(first) == []
    write_config(first)
    assert load_config(tmp_path / "one/config.toml") == first
    assert config_changes(first) == []

    second = make_config(
        tmp_path, loss={"name": "rloo", "eps_low": 0.1}, data={"train": "t", "validation": "v"}
    )
    changes = config_changes(second)
    write_config(second)
    assert load_config(tmp_path / "one/config.toml") == second
    assert {"data.validation: None -> v", "loss.name: fspo -> rloo", "loss.eps_low: None -> 0.1"} <= set(
        changes
    )
    assert "loss.c_high: 0.03 -> None" in changes
    assert {line.partition(".")[0] for line in changes} == {"data", "loss"}
