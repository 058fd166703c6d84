"""What is installed from a wheel is whole: a folder made by ``init`` trains in it, far from any checkout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launch import REPO, environment, why
from megatron_fspo import __version__
from megatron_fspo.cli import main
from megatron_fspo.cli.init import NEXT, OWN
from megatron_fspo.config.loading import load_config

pytestmark = pytest.mark.slow


TAG = f"v{__version__}"


def git(folder: Path, *words: str) -> str:
    """Output of git in a folder."""
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the files of this working tree, tagged with their version."""
    folder = tmp_path_factory.mktemp("checkout")
    git(REPO, "clone", "--quiet", "--shared", str(REPO), str(folder))
    git(folder, "checkout", "--quiet", git(REPO, "stash", "create") or "HEAD")
    git(folder, "tag", TAG)
    return folder


def release(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, checkout / "tools/release.py", *words]
    return subprocess.run(program, env=environment(), capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the release's wheel is installed; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    done = release(checkout, TAG, "--out", str(folder))
    assert done.returncode == 0, why(done.stderr)
    named = re.findall(r"^  (\S+)  [\d,]+ bytes  sha256 [0-9a-f]{64}$", done.stdout, re.MULTILINE)
    assert named == sorted(path.name for path in folder.iterdir()) and len(named) == 2
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def test_a_release_has_one_version_and_overwrites_nothing(checkout: Path, tmp_path: Path) -> None:
    assert release(checkout, "v9.9.9").returncode == 2
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## {__version__}", "## 9.9.8"))
    git(checkout, "commit", "--quiet", "--all", "--message", "another version")
    git(checkout, "tag", "v9.9.8")
    refused = release(checkout, "v9.9.8", "--out", str(tmp_path / "out"))
    assert refused.returncode == 2 and "__init__.py" in refused.stderr and __version__ in refused.stderr
    assert not (tmp_path / "out").exists()
    (tmp_path / "kept").touch()
    refused = release(checkout, TAG, "--out", str(tmp_path))
    assert refused.returncode == 2 and [*tmp_path.iterdir()] == [tmp_path / "kept"]


def command(installed: Path, folder: Path, *words: str) -> str:
    """``megatron-fspo`` of the wheel, run in a folder; its output."""
    where = {**environment(), "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    where.pop("VLLM_BIN", None)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fspo", *words], cwd=folder, env=where, capture_output=True, text=True
    )
    assert done.returncode == 0, why(done.stderr)
    return done.stdout


def test_it_has_the_package_and_nothing_else(installed: Path) -> None:
    (wheel,) = installed.parent.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"megatron_fspo"}
    sources = {str(path.relative_to(REPO)) for path in (REPO / "megatron_fspo").rglob("*.py")}
    mine = {name for name in names if name.endswith(".py") and "/examples/" not in name}
    assert mine == sources
    assert {"megatron_fspo/py.typed", "megatron_fspo/examples/make_sum/checkpoint/model.safetensors"} <= set(
        names
    )
    assert wheel.stat().st_size < 3e6


def test_a_task_of_ones_own(installed: Path, tmp_path: Path) -> None:
    said = command(installed, tmp_path, "init", "task")
    assert "megatron-fspo train --config run.toml" in said
    task = tmp_path / "task"
    command(installed, task, "train", "--config", "run.toml", "--run.steps", "2", "--loss.calibrate", "0")
    lines = (task / "runs/first/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["critic/rewards/mean"] for line in lines]
    assert len(rewards) == 2 and all(0.1 < reward < 0.6 for reward in rewards)
    assert (task / "runs/first/report/index.html").is_file()
    command(installed, task, "report", "runs/first")
    command(installed, task, "explain", "runs/first")
    command(installed, task, "convert", "hf-to-megatron", "runs/first/hf", "converted")
    command(installed, task, "convert", "verify", "runs/first/hf", "converted")


@pytest.mark.parametrize("name", sorted(NEXT.keys() - {OWN}))
def test_other_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole configurations, whose files are there or made by what is."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "task", "--from", name]) == 0
    monkeypatch.chdir(tmp_path / "task")
    config = load_config([Path("run.toml")], [])
    if name == "make_sum":
        assert all(path.exists() for path in (config.model.checkpoint, config.data.train_sets[0].file))
    else:
        assert Path("prepare.py").is_file()
