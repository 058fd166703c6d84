"""Checks a command of the pages without running it: its program, options, files and keys."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from torch.distributed.run import get_args_parser

from launch import REPO
from megatron_fspo.cli import make_parser
from megatron_fspo.cli.console import OneLineParser
from megatron_fspo.cli.evaluate import make_evaluation_config
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.explain.losses import with_limits
from megatron_fspo.lab.plan.presets import PRESETS
from snippets import Command

YOURS = {
    "run.toml": "examples/make_sum/run.toml",
    "runs/demo/config.toml": "examples/make_sum/run.toml",
    "HF_OR_MEGATRON": "examples/make_sum/checkpoint",
    "runs/demo/hf": "examples/make_sum/checkpoint",
    "math500.jsonl": "examples/make_sum/train.jsonl",
    "aime.jsonl": "examples/make_sum/validation.jsonl",
}
"""File that a page takes to be there → a file of the same kind that is there."""
NOT_OURS = tuple(
    "runs/ build/ / Qwen3-8B Qwen/ BytedTsinghua-SIA/ REAL OUT FOLDER FILE DIR dapo-math-17k.parquet "
    "test.jsonl amc23.parquet aime24.parquet aime25.jsonl evaluations/ servers sweep.toml "
    "http:// tests: .venv fspo- benchmarks/results/gpu-NAME.md megatron_fspo.adapters".split()
)
"""First letters of words that name what the reader has, or what another command on the page makes."""
_MAKEFILE = (REPO / "Makefile").read_text(encoding="utf-8")
_PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))


class Legal(BaseException):
    """What a parser misses is what the page leaves out."""


def check(command: Command) -> None:
    """``AssertionError`` with what is wrong; the working directory is the root of the repository."""
    program, *words = command.given
    name = Path(program).name
    try:
        _PROGRAMS.get(name, _nothing)(program, words, command)
    except AssertionError as error:
        raise AssertionError(f"{command.where}: `{command.text}`: {error}") from error
    except Exception as error:
        raise AssertionError(f"{command.where}: `{command.text}`: {type(error).__name__}: {error}") from error
    for word in words:
        if re.search(r"/|\.(py|toml|jsonl|sh)$", word) and not word.startswith("-"):
            there = word in YOURS or word.startswith(NOT_OURS) or Path(word.split("::")[0]).exists()
            assert there or re.search(r"[=\[:]", word), f"{command.where}: {word} is not there"


def _nothing(program: str, words: list[str], command: Command) -> None:
    """Programs that are not ours have their place in the tables only."""


def _replaced(words: Sequence[str]) -> list[str]:
    return [YOURS.get(word, "2" if word == "N" else word) for word in words]


def _ours(program: str, words: list[str], command: Command) -> None:
    words = _replaced(words)

    def error(self: argparse.ArgumentParser, message: str) -> None:
        left_out = command.elided and re.search("required|expected (one|at least one) arg", message)
        raise Legal if left_out else AssertionError(message)

    with mock.patch.object(OneLineParser, "error", error):
        try:
            args, rest = make_parser().parse_known_args(words)
        except Legal:
            return
        except SystemExit as done:  # --help
            assert done.code == 0
            return
    if args.command == "evaluate":
        if not command.elided or args.config or args.data:
            args.compare = None
            make_evaluation_config(args, rest)
    elif args.command == "explain":
        with_limits(rest)
    elif args.command == "sweep":
        load_config([Path("examples/make_sum/run.toml")], rest)
    elif getattr(args, "config", None):
        load_config(args.config, rest)
    else:
        assert not rest, f"unrecognized: {rest}"
    if args.command == "plan" and args.model is not None:
        assert args.model in PRESETS


def _torchrun(program: str, words: list[str], command: Command) -> None:
    parser = get_args_parser()
    known = {option for action in parser._actions for option in action.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        assert words[at] in known, f"torchrun has no {words[at]}"
        at += 1 if words[at] == "--standalone" else 2
    rest = words[at:]
    if rest[:2] == ["-m", "megatron_fspo"]:
        if len(rest) > 2:
            _ours(program, rest[2:], command)
    elif rest:
        (_launch if rest[0].endswith(".sh") else _script)(rest[0], rest[1:], command)
    else:
        assert command.elided, "nothing is started"


def _script(path: str, words: list[str], command: Command) -> None:
    """The script has the options; its help is printed, and runs read its arguments, in tests of it."""
    assert Path(path).is_file(), f"{path} is not there"
    text = Path(path).read_text(encoding="utf-8")
    options = [word.removeprefix("--") for word in words if word.startswith("--")]
    missing = [name for name in options if name != "help" and not re.search(rf'"(--)?{name}"', text)]
    assert missing == [], f"{path} has no options {missing}"


def _python(program: str, words: list[str], command: Command) -> None:
    if words[:2] == ["-m", "megatron_fspo"]:
        if words[2:]:
            _ours(program, words[2:], command)
    elif words[0] != "examples/in_skyrl/main.py":  # its arguments are SkyRL's
        _script(words[0], words[1:], command)


def _launch(path: str, words: list[str], command: Command) -> None:
    """The launch scripts hand their arguments on to ``train``, over their own configuration."""
    assert Path(path).is_file(), f"{path} is not there"
    base = ["--config", "examples/qwen3_8b/run.toml"]
    layer = ["--config", "examples/qwen3_1_7b/run.toml"] if "1_7b" in path else []
    if path.endswith("smollm2/run.sh"):
        base, words = ["--config", "examples/smollm2/run.toml"], words[1:]
    _ours(path, ["train", *base, *layer, *(word for word in words if word != "--smoke")], command)


def _sbatch(program: str, words: list[str], command: Command) -> None:
    at = next(number for number, word in enumerate(words) if not word.startswith("-"))
    assert Path(words[at]).is_file()
    _launch("examples/run_fspo_qwen3_8b.sh", words[at + 1 :], command)


def _make(program: str, words: list[str], command: Command) -> None:
    for word in words:
        name, given, value = word.partition("=")
        if not given:
            plain = _MAKEFILE
            for variable, text in re.findall(r"^(\w+) := (\S+)$", _MAKEFILE, re.MULTILINE):
                plain = plain.replace(f"$({variable})", text)
            assert re.search(rf"^(?:\S+ )*{re.escape(word)}(?: \S+)*:", plain, re.MULTILINE), (
                f"make has no target {word}"
            )
            continue
        assert f"$({name})" in _MAKEFILE, f"make has no variable {name}"
        if name == "DEMO_ARGS":
            load_config([Path("examples/make_sum/run.toml")], shlex.split(value))
        elif name == "PYTEST_ARGS":
            _pytest("pytest", shlex.split(value), command)


def _pytest(program: str, words: list[str], command: Command) -> None:
    """Paths are there, and ``-k`` picks a test in them."""
    picked = words[words.index("-k") + 1] if "-k" in words else None
    paths = [Path(word) for word in words if word.startswith("tests")]
    assert all(path.exists() for path in paths), f"{words}"
    if picked is not None:
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        named = rf"def test_\w*{picked}|{picked}\w*\.py"
        assert any(re.search(named, f"{file.read_text()}{file}") for file in files), (
            f"no test is called {picked}"
        )


def _pip(program: str, words: list[str], command: Command) -> None:
    if "-r" in words:
        assert Path(words[words.index("-r") + 1]).is_file()
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
        assert extra in _PROJECT["project"]["optional-dependencies"], extra


_PROGRAMS: dict[str, Callable[[str, list[str], Command], None]] = {
    "megatron-fspo": _ours,
    "torchrun": _torchrun,
    "python": _python,
    "bash": lambda program, words, command: _launch(words[0], words[1:], command),
    "run.sh": _launch,
    "sbatch": _sbatch,
    "make": _make,
    "pytest": _pytest,
    "pip": _pip,
}
