"""The file of a sweep: what it stands for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.errors import InputError
from megatron_fspo.lab.sweep.file import Sweep, config_of, planned, read_sweep

BEGIN = f"""
config = ["{REPO}/examples/make_sum/run.toml"]
folder = "FOLDER"
"""


def sweep_of(tmp_path: Path, text: str) -> Sweep:
    file = tmp_path / "sweep.toml"
    file.write_text((BEGIN + text).replace("FOLDER", str(tmp_path / "runs")), encoding="utf-8")
    return read_sweep(file)


ARMS = """
seeds = [3, 1]
match = "rloo"
[keys.loss]
c_low = 0.02
[keys.run]
steps = 4
[arms.fspo.loss]
c_high = 0.04
[arms.rloo.loss]
name = "rloo"
eps_high = 0.1
"""


def test_every_seed_has_every_arm_and_the_one_to_match_comes_first(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ARMS)
    runs = list(planned(sweep))
    assert [run.name for run in runs] == ["rloo-3", "fspo-3", "rloo-1", "fspo-1"]
    fspo, _ = config_of(sweep, runs[1])
    assert (fspo.run.name, fspo.run.seed, fspo.run.steps) == ("fspo-3", 3, 4)
    assert fspo.run_folder == tmp_path / "runs/fspo-3"
    assert (fspo.loss.name, fspo.loss.c_low, fspo.loss.c_high) == ("fspo", 0.02, 0.04)
    # A loss of another name begins from its own defaults.
    rloo, files = config_of(sweep, runs[0])
    assert (rloo.loss.name, rloo.loss.eps_low, rloo.loss.eps_high) == ("rloo", 0.2, 0.1)
    assert [file.name for file in files] == ["run.toml", "rloo-3.toml"]
    with_words = sweep.model_copy(update={"words": ("--run.steps", "9")})
    assert config_of(with_words, runs[0])[0].run.steps == 9
    wrong = sweep_of(tmp_path, "[arms.a.loss]\nc_hihg = 1")
    with pytest.raises(InputError, match=r"a-1\.toml: unknown key loss\.c_hihg"):
        config_of(wrong, next(iter(planned(wrong))))
    with pytest.raises(InputError, match=r"nowhere\.toml: No such file"):
        read_sweep(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"sweep\.toml: arms is missing"),
        ("[arms]", "arms is missing"),
        ("seeds = [1, 1]\n[arms.a]", "seeds: each once"),
        ("seed = 1\n[arms.a]", "unknown key seed; did you mean seeds"),
        ('match = "b"\n[arms.a]\n[arms.c]', "match = b: arms has a, c"),
        ('[arms."../a"]', r"arms\.\.\./a"),
        ("jobs = 0\n[arms.a]", "jobs = 0: .*greater than 0"),
        ("[arms.a.run]\nseed = 2", r"a: run\.seed is the sweep's to set"),
        ("[keys.run]\nname = 'x'\n[arms.a]", r"keys: run\.name is the sweep's to set"),
        ("[arms.a", r"sweep\.toml: "),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        sweep_of(tmp_path, text)
    assert "\n" not in str(error.value)
