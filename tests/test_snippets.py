"""Every fenced block and every command of the pages is run, or it is said here which test does, or why none.

Python and TOML are run and read as they stand. A command's program, options, files and keys are checked
(tests/command_check.py); then it is in ``HERE``, or in ``NOT_RUN``, or a test names its subcommand or file.
Blocks of ``text`` are what is printed or drawn, those of ``math`` formulas.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import command_check
from launch import REPO
from megatron_fspo.cli import main
from megatron_fspo.config import Reward
from megatron_fspo.config.loading import load_config
from megatron_fspo.environments import worker as environment_worker
from megatron_fspo.environments.tools import Observation
from megatron_fspo.lab.sweep.file import make_run_config, planned, read_sweep
from megatron_fspo.rewards import Grade, Grader
from megatron_fspo.types import Completion, Prompt
from snippets import PAGES, Block, Command, assign_blocks, commands_of

HERE = (
    r"megatron-fspo plan .*--model qwen3-8b --nproc 8( --servers 8)?$",
    r"megatron-fspo data check tests/data/samples/faulty.jsonl",
    r"megatron-fspo train --help$",
    r"python benchmarks/noise_check.py",
)
"""Run by this file, in less than a second each."""

IGNORED = {"test_snippets.py", "snippets.py", "command_check.py"}

NOT_RUN = {
    r"git |cd |\. |export |pip |make help|touch |sha256sum |kubectl |docker |hf ": "not ours to test",
    r"torchrun --(max-restarts|shutdown-timeout)|--[a-z-]+ \S+$|actor_rollout_ref": "named in passing",
    r"make (real|demo-(tools|vllm)|bench|evidence|verify|vllm|\.venv-trl/.ready)\b": "minutes: by hand",
    r"make runs/smollm2": "as `make real`",
    r"make test-(fast|gpu|py312|adapters-py312)": "this suite; a GPU, or another Python: by hand",
    r"examples/smollm2/run.sh|python examples/smollm2/check_greedy.py": "half an hour, as `make real`",
    r".*python (benchmarks/survive|tests/goldens).py": "minutes to hours: by hand",
}
"""Why no test runs it."""


@cache
def commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page)]


def blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in assign_blocks(page) if block.language in languages]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def test_every_block_has_a_class() -> None:
    known = set(blocks("", "sh", "console", "python", "toml", "json", "text", "math"))
    assert [block.where for page in PAGES for block in assign_blocks(page) if block not in known] == []
    assert len(commands()) > 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_programs_options_files_and_keys_are_there(page: Path) -> None:
    for command in commands_of(page):
        command_check.check(command)


def table_of(command: Command) -> list[str]:
    """The first pattern that holds for it, if there is one."""
    return [pattern for pattern in (*HERE, *NOT_RUN) if re.match(pattern, command.text)][:1]


@cache
def words_of_tests() -> str:
    """The text of all tests but this one, and of what CI runs."""
    paths = [path for path in (REPO / "tests").rglob("*.py") if path.name not in IGNORED]
    return "\n".join(path.read_text(encoding="utf-8") for path in [*paths, REPO / ".ci/run"])


def is_run_by_a_test(command: Command) -> bool:
    """True if a test names the subcommand or the file that is started; all benchmarks share a test."""
    words = list(command.given)
    if "megatron_fspo" in words:
        words = ["megatron-fspo", *words[words.index("megatron_fspo") + 1 :]]
    if words[0] == "pytest" or (words[0] == "megatron-fspo" and words[1:2] == []):
        return True
    if words[0] == "make":
        return re.search(rf"make {words[1]}(?![\w-])", words_of_tests()) is not None
    if words[0] == "megatron-fspo":
        return f'"{words[1]}"' in words_of_tests()
    file = next((word for word in words if word.endswith((".py", ".sh", ".sbatch"))), "")
    return file.startswith("benchmarks/") or (bool(file) and Path(file).stem in words_of_tests())


def test_every_command_is_run_or_it_is_said_why_not() -> None:
    tables = {command: table_of(command) for command in commands()}
    missing = [command for command, table in tables.items() if not table and not is_run_by_a_test(command)]
    assert [f"{command.where}: {command.text}" for command in missing] == []
    assert {*HERE, *NOT_RUN} == {pattern for table in tables.values() for pattern in table}


def test_text_hides_no_command() -> None:
    for block in blocks("text"):
        for line in block.text.splitlines():
            assert not re.match(r"(\$ |make |python |torchrun |megatron-fspo [a-z]+ )", line), block.where


@pytest.mark.parametrize("pattern", HERE)
def test_cheap_commands_run(
    pattern: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in {command.words: command for command in commands()}.values():
        if table_of(command) != [pattern]:
            continue
        if command.words[0] == "python":
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", list(command.words[1:]))
                runpy.run_path(command.words[1], run_name="__main__")
            assert len(capsys.readouterr().out) > 100
        elif "--help" in command.words:
            with pytest.raises(SystemExit, match="0"):
                main(command.words[1:])
        else:
            assert main(command.words[1:]) == ("faulty" in command.text), command.text
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("block", blocks("toml"), ids=lambda block: block.where)
def test_a_piece_of_a_configuration_is_legal(block: Block, tmp_path: Path) -> None:
    """Over one that has the keys a run must have, and long responses."""
    layer = tmp_path / "layer.toml"
    layer.write_text(block.text.replace("runs/sweep", str(tmp_path)), encoding="utf-8")
    if "[arms." in block.text:
        sweep = read_sweep(layer)
        assert [make_run_config(sweep, run)[0].run.steps for run in planned(sweep)] == [20] * 6
        return
    words = ["--rollout.max-response-tokens", "8192", "--batch.max-tokens", "16384"]
    load_config([REPO / "examples/make_sum/run.toml", layer], words)


def library(block: Block, _: Path) -> None:
    """The gradient of the surrogate is that of its mean, by autograd, and 0 where it clips."""
    names: dict[str, Any] = {}
    torch.manual_seed(1)
    exec(block.text, names)
    new, surrogate, mask = names["new"], names["surrogate"], names["mask"]
    assert torch.equal(new.grad, torch.where(mask, -surrogate.weight[:, None] / 8, 0.0))
    assert 0 < surrogate.clipped.sum() < 8 and not surrogate.weight[surrogate.clipped].any()


def calibrated(block: Block, _: Path) -> None:
    names: dict[str, Any] = {}
    torch.manual_seed(1)
    exec(block.text, names)
    assert 0.035 < names["band"].c_low < 0.045


def own_rewards(block: Block, folder: Path) -> None:
    (folder / "my_rewards.py").write_text(block.text, encoding="utf-8")
    prompt = Prompt(index=0, token_ids=(1,), text="2 + 3?", answer="5", fields={"budget": 4})
    completion = Completion(token_ids=[1, 2], log_probs=[0.0, 0.0], finish_reason="stop", weight_version=0)
    config = Reward(name="my_rewards:brevity", also={"my_rewards:judge": 0.5})
    with Grader(config, max_response_tokens=9) as grader:
        found = grader.submit(prompt, completion, "It is 5.").result(timeout=60)
    assert isinstance(found, Grade) and (found.score, found.reward) == (1.0, 1.5)


def gym(block: Block, folder: Path) -> None:
    exec(block.text.replace("size=1000", "size=3"), {})
    rows = [json.loads(line) for line in Path("countdown.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and {"prompt", "answer", "task", "config", "metadata"} <= set(rows[0])


def part_of_the_table(block: Block, _: Path) -> None:
    table = ast.parse((REPO / "megatron_fspo/weights/table.py").read_text(encoding="utf-8"))
    (shown,) = ast.parse(block.text).body
    assert ast.dump(shown) in map(ast.dump, table.body)


def names_of_the_adapter(block: Block, _: Path) -> None:
    """Check the imported names; where the trainer is installed, tests/adapters runs the code."""
    for module, names in re.findall(r"from (megatron_fspo[\w.]+) import ([\w, ]+)", block.text):
        path = REPO / f"{module.replace('.', '/')}.py"
        for name in names.split(","):
            assert re.search(rf"^(class|def) {name.strip()}\b", path.read_text(encoding="utf-8"), re.M)


def own_environment(block: Block, folder: Path) -> None:
    """Named as on the page, and asked as a worker asks it."""
    (folder / "my_tools.py").write_text(block.text)
    prompt = {"index": 0, "token_ids": [1], "text": "?", "answer": "7"}
    said = {
        turn: Observation(**environment_worker.answer("my_tools:guess", prompt, ["3", turn]))
        for turn in ("3", "9", "7", "so")
    }
    assert said["3"] == Observation(text=" higher: ") and said["9"] == Observation(text=" lower: ")
    assert said["7"] == Observation(reward=0.5)
    assert said["so"] == Observation(text=" a number, please: ", failed=True)


def run_from_python(block: Block, folder: Path) -> None:
    """Up to the training, which test_program.py does."""
    assert main(["init", str(folder / "task")]) == 0
    os.chdir(folder / "task")
    with mock.patch("megatron_fspo.trainer.program.Trainer.train", return_value=Path("runs/brief")) as train:
        names: dict[str, Any] = {}
        exec(block.text, names)
    assert train.called and names["trainer"].config.rollout.prompts == 2
    assert names["trainer"].config.data.train.read_text().count("\n") == 2


PYTHON: dict[str, list[Callable[[Block, Path], None]]] = {
    "README.md": [library],
    "docs/adding_a_model.md": [part_of_the_table],
    "docs/choosing_c.md": [calibrated],
    "docs/own_task.md": [run_from_python],
    "docs/rewards.md": [own_rewards, gym],
    "docs/trajectories.md": [own_environment],
    "examples/in_tinker/README.md": [names_of_the_adapter],
    "examples/in_trl/README.md": [names_of_the_adapter],
}
"""Page → what runs its blocks, each in an empty folder."""


def test_every_python_block_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {block.page for block in blocks("python")} == set(PYTHON)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for page, runners in PYTHON.items():
        found = [block for block in blocks("python") if block.page == page]
        for number, (block, run) in enumerate(zip(found, runners, strict=True)):
            folder = tmp_path / page / str(number)
            folder.mkdir(parents=True)
            monkeypatch.chdir(folder)
            run(block, folder)


def test_json_is_what_the_verifier_over_http_is_sent() -> None:
    (block,) = blocks("json")
    remote = (REPO / "megatron_fspo/rewards/remote.py").read_text(encoding="utf-8")
    assert [key for key in json.loads(block.text) if f'"{key}"' not in remote] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("megatron-fspo train --config run.toml --loss.no_such 1", "no_such"),
        ("python benchmarks/fairness.py --no-such 1", "no-such"),
        ("make no-such", "no target"),
        ("pytest tests/objective -k no_test_of_that", "no_test_of_that"),
        ("torchrun --nproc-per-node 8 -m megatron_fspo train --config no.toml", "cannot be read"),
    ],
)
def test_what_is_wrong_is_found(text: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        command_check.check(Command("page", tuple(text.split()), {}))
