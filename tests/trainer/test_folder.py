"""The folder of a run: which checkpoint to resume from, what to keep, what to refuse."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from configs import make_config
from megatron_fspo.config import Config
from megatron_fspo.config.loading import ON_RESUME, config_changes, load_config, save_config
from megatron_fspo.errors import InputError
from megatron_fspo.job.lock import FolderLock
from megatron_fspo.job.resume import (
    Resume,
    check_writable,
    checkpoint_folder,
    checkpoints,
    checkpoints_to_resume,
    newest_checkpoint,
    put_aside,
    remove_old_checkpoints,
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


@pytest.mark.parametrize(
    ("keep", "milestones", "good_step", "left"),
    [
        (1, 0, 99, [30]),
        (2, 0, 99, [20, 30]),
        (5, 0, 99, [1, 10, 20, 30]),
        (1, 10, 99, [10, 20, 30]),
        (1, 20, 99, [20, 30]),
        (1, 0, 19, [10, 30]),
        (1, 0, 0, [30]),
    ],
)
def test_the_newest_the_milestones_and_the_last_good_one_are_kept(
    tmp_path: Path, keep: int, milestones: int, good_step: int, left: list[int]
) -> None:
    config = make_config(tmp_path, checkpoint={"keep": keep, "milestones": milestones})
    steps = [f"step_{step:06d}" for step in (1, 10, 20, 30)]
    folder = make_checkpoints(config, *steps, "step_000040.partial")
    if not good_step:
        assert newest_checkpoint(config, step=good_step) is None
    remove_old_checkpoints(config, good_step=good_step)
    assert checkpoints(config) == [checkpoint_folder(config, step) for step in left]
    assert not (folder / "step_000040.partial").exists()


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
    root = os.geteuid() == 0  # whom no mode stops
    os.seteuid(65534 if root else os.geteuid())
    try:
        stays = [remove_old_checkpoints(config, good_step=40).keys() for _ in range(2)]
    finally:
        os.seteuid(0 if root else os.geteuid())
    assert stays == [{*links, folder / "step_000010.partial"}] * 2
    assert checkpoints(config) == [folder / "step_000005", checkpoint_folder(config, 40)]
    assert (folder / "elsewhere/metadata.json").exists()
    if os.geteuid():
        (folder / "step_000010.partial").chmod(0o777)


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


def test_a_new_run_wants_an_empty_folder_and_auto_takes_any(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(InputError, match="--resume: there is no run in"):
        checkpoints_to_resume(config, "newest")
    assert checkpoints_to_resume(config, "auto") == [] and not config.run_folder.exists()
    assert checkpoints_to_resume(config, "no") == []
    config.run_folder.mkdir()
    assert checkpoints_to_resume(config, "no") == []
    config.run_folder.mkdir(parents=True, exist_ok=True)
    save_config(config, config.run_folder / "config.toml")
    with pytest.raises(InputError, match=r"/one holds a run already: .*--resume.*run\.name"):
        checkpoints_to_resume(config, "no")
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
    with pytest.raises(InputError, match=r"run\.folder: .*/file/one cannot be created: .*/file is a file"):
        check_writable(tmp_path / "file/one")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(InputError, match=r"run\.folder: .*/runs/one cannot be written: .* is read-only"):
        check_writable(tmp_path / "runs/one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_configuration_is_kept_and_changes_are_told(tmp_path: Path) -> None:
    first = make_config(tmp_path)
    assert config_changes(first) == {}
    first.run_folder.mkdir(parents=True, exist_ok=True)
    save_config(first, first.run_folder / "config.toml")
    assert load_config(tmp_path / "one/config.toml") == first
    assert config_changes(first) == {}
    rloo = {"name": "rloo", "eps_low": 0.1}
    changes = set(config_changes(make_config(tmp_path, loss=rloo, data={"train": "t", "validation": "v"})))
    assert changes >= {"data.validation: None -> v", "loss.name: fspo -> rloo", "loss.eps_low: None -> 0.1"}
    assert "loss.c_high: 0.03 -> None" in changes
    assert {line.partition(".")[0] for line in changes} == {"data", "loss"}
    assert [*config_changes(make_config(tmp_path, log={"tokens": 3})).values()] == [""]
    falling = make_config(tmp_path, optimizer={"lr_decay": "linear"}, batch={"mini_batches": 2})
    _, effect = config_changes(falling).popitem()
    updates = falling.optimizer_steps, first.optimizer_steps
    assert effect.endswith("lr ends at optimizer step {}, not {}".format(*updates)), effect
    assert ON_RESUME.keys() == Config.model_fields.keys()
