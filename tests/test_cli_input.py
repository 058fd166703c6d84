"""The command line around a run: --check, --help, doctor, broken pipes, and ranks that end."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launch import REPO, environment, python
from megatron_fspo.cli import main, make_parser
from megatron_fspo.config.loading import legal_keys

CONFIG = "examples/make_sum/run.toml"
CHECKPOINT = REPO / "examples/make_sum/checkpoint"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the root of the repository, and not as a rank of torchrun."""

    def start_ranks(*_: object) -> None:
        pytest.fail("the input was found to be good: torchrun would start now, in place of pytest")

    monkeypatch.setattr(os, "execv", start_ranks)
    monkeypatch.chdir(REPO)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, list[str]]]:
    """``train --check`` on the make-sum configuration: exit status, output and lines of complaint."""

    def call(*words: str, nproc: int = 2) -> tuple[int, str, list[str]]:
        arguments = ["train", "--config", CONFIG, "--nproc", str(nproc), "--run.folder", str(tmp_path)]
        status = main([*arguments, "--check", *words])
        assert not torch.distributed.is_initialized()
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return call


Check = Callable[..., tuple[int, str, list[str]]]


def test_check_says_that_all_is_fine(tmp_path: Path, check: Check) -> None:
    assert check() == (0, f"{CONFIG}: fine; the run would be in {tmp_path}/demo\n", [])
    assert list(tmp_path.iterdir()) == []


def test_check_warns_of_a_band_that_is_a_ratio(check: Check) -> None:
    status, out, _ = check(*"--loss.calibrate 0 --loss.c-low 0.2 --loss.c-high 0.2".split())
    assert status == 0 and "loss.c_high = 0.2" in out and "e^6.3" in out


def test_check_lists_all_that_is_wrong(tmp_path: Path, check: Check) -> None:
    status, _, (first, second) = check("--run.steps", "0", "--loss.c-hihg", "1")
    assert status == 2 and "unknown key loss.c_hihg" in first and "run.steps = 0" in second
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint, ignore=lambda *_: ["tokenizer_config.json"])
    more = f"--model.checkpoint {checkpoint} --data.train no.jsonl --data.validation no_other.jsonl "
    more += "--reward.name no --reward.also.neither 1 --parallel.expert 2 --rollout.engine vllm "
    more += "--vllm.transfer disk --vllm.urls ['http://127.0.0.1:9','http://127.0.0.1:9']"
    status, out, lines = check(*more.split(), nproc=3)
    told = ["vllm.urls", "vllm.folder", "parallel.tensor", "parallel.expert", "holds no tokenizer"]
    told += ["no.jsonl", "no_other.jsonl", "'no'", "'neither'"]
    assert status == 2 and out == ""
    assert all(word in line for word, line in zip(told, lines, strict=True)), lines
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is a check on a machine without GPUs")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (
            "--rollout.engine vllm --vllm.urls ['http://127.0.0.1:9'] --vllm.recovery-seconds 0.01",
            "127.0.0.1:9",
        ),
        pytest.param("--model.backend cuda --model.dtype bfloat16", "no GPU", marks=GPU),
    ],
)
def test_check_notes_what_may_be_elsewhere(
    words: str, missing: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, lines = check(*words.split())
    fine, note = out.splitlines()
    assert status == 0 and "fine" in fine and note.startswith("note: ") and missing in note and not lines
    monkeypatch.setenv("WORLD_SIZE", "2")  # the run will begin now, and here
    status, out, (line,) = check(*words.split())
    assert status == 2 and out == "" and missing in line


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("def grade(prompt, response): return 1.0", "too many positional"),
        ("def grade(prompt, completion, response, gold): return 1.0", "'gold'"),
        ("class Grade:\n    def __call__(self, prompt): return 1.0\ngrade = Grade()", "too many positional"),
        ("def grade(prompt, completion, response, gold=None): return 1.0", None),
        ("grade = max", None),  # without a signature
    ],
)
def test_check_calls_no_reward_but_knows_its_arguments(
    function: str, wrong: str | None, tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward.py").write_text(function)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    status, _, lines = check("--reward.name", "own_reward:grade")
    assert (status, len(lines)) == ((0, 0) if wrong is None else (2, 1))
    assert wrong is None or ("own_reward:grade" in lines[0] and wrong in lines[0])


def test_help_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert err == "" and "torchrun --nproc-per-node 8 -m megatron_fspo train" in out
    assert out.index("common keys:") < out.index("--optimizer.lr") < out.index("[run]:")
    words = set(out.split())
    assert {f"--{key.replace('_', '-')}" for key, _, _ in legal_keys()} <= words


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    # A CUDA wheel names its toolkit in torch's own version alone: 2.13.0+cu130.
    assert findings["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert findings["use"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert all(item in text for item in (*findings["packages"], *findings["missing"]))


def test_output_that_nobody_reads(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["data", "check", "examples/make_sum/train.jsonl"], ["report", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(words) == 141
    assert capfd.readouterr().err == ""


def test_another_pipe_that_broke_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("megatron_fspo.cli._main", broken)
    with (tmp_path / "out").open("w") as stdout, pytest.raises(BrokenPipeError):
        monkeypatch.setattr(sys, "stdout", stdout)
        main([])


def torchrun(folder: Path, program: str, **more: Any) -> subprocess.Popen[str]:
    """The launcher with two ranks of a program."""
    (folder / "rank.py").write_text(f"import os, signal, sys, time\n{program}\ntime.sleep(60)\n")
    words = "--rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2 --shutdown-timeout 600".split()
    command = [sys.executable, "-m", "megatron_fspo.cli.launch", *words, str(folder / "rank.py")]
    return subprocess.Popen(command, cwd=REPO, env=environment(), stderr=subprocess.PIPE, text=True, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("sys.exit(2)", 2, ""), ("os.kill(os.getpid(), 9)", 1, r"megatron-fspo: rank 1 .* killed by SIGKILL\n")],
)
def test_torchrun_adds_nothing_to_what_its_ranks_say(
    tmp_path: Path, end: str, status: int, said: str
) -> None:
    process = torchrun(tmp_path, f"if os.environ['RANK'] == '1': {end}")
    told = process.communicate(timeout=90)[1]
    assert process.returncode == status and re.fullmatch(said, told)


@pytest.mark.slow
def test_the_launcher_raises_limits_and_says_where_dumps_of_a_hang_are(tmp_path: Path) -> None:
    """As NCCL's watchdog does: it writes, and aborts."""
    process = torchrun(
        tmp_path,
        f"""
import pathlib, resource
from megatron_fspo.job.hang import make_folder, record_collectives
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
assert soft == hard > 300
record_collectives(pathlib.Path({str(tmp_path)!r}, "hang"))
make_folder()
pathlib.Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"]).write_text("x")
if os.environ["RANK"] == "1": os.abort()
""",
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
    )
    told = process.communicate(timeout=90)[1].splitlines()
    assert process.returncode == 1 and len(told) == 2
    assert re.fullmatch(
        rf"megatron-fspo: a collective timed out; .* ranks are in {tmp_path}/hang: .*", told[0]
    )
    assert told[1].endswith("was killed by SIGABRT")
    assert {path.name for path in (tmp_path / "hang").iterdir()} <= {"rank_0", "rank_1"}


@pytest.mark.slow
def test_ranks_that_were_stopped_hear_of_sigterm(tmp_path: Path) -> None:
    process = torchrun(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 or any(rank.status() != psutil.STATUS_STOPPED for rank in ranks):
        time.sleep(0.1)
        ranks = psutil.Process(process.pid).children()
    process.terminate()
    try:
        assert process.communicate(timeout=30)[1] == "" and process.returncode == 143
    finally:
        for each in (process, *ranks):
            with suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.slow
def test_ctrl_c_under_nproc(tmp_path: Path) -> None:
    words = ["train", "--config", CONFIG, "--nproc", "2", "--run.folder", str(tmp_path), "--run.steps", "200"]
    words += ["--rollout.prompts", "8", "--evaluation.every", "0"]
    with (tmp_path / "err").open("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fspo", *words],
            cwd=REPO,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,  # a terminal sends Ctrl-C to all of its foreground group
        )
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if "reward" in line)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
            err.seek(0)
            # Where CUDA's compiler is and no GPU, torch says so.
            lines = [line for line in err.read().splitlines() if "No CUDA runtime" not in line]
            assert lines == ["megatron-fspo: interrupted"]
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("line", "offered"),
    [("tr", ["train"]), ("convert v", ["verify"]), ("train --optimizer.lr-m", ["--optimizer.lr-min"])],
)
def test_the_shell_completes_commands_and_keys(line: str, offered: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line = f"megatron-fspo {line}"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": f"{tmp_path}/out"}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    assert python("-m", "megatron_fspo", **asked).returncode == 0
    assert (tmp_path / "out").read_text().split() == offered


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[1mcheckpoints:\033[0m" in make_parser([]).format_help()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in make_parser([]).format_help()


@pytest.mark.parametrize(
    "words", ["--help", "init --help", "serve --help", "status no_run", "doctor --quick"]
)
def test_commands_that_need_no_torch_do_not_import_it(words: str) -> None:
    """Of 1.5 s to a prompt, 1.1 s were torch."""
    program = (
        "import sys\nfrom megatron_fspo.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'megatron', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy and len(sys.modules) < 250, (heavy, len(sys.modules))"
    )
    result = python("-c", program, *words.split())
    assert result.returncode == 0, result.stderr
