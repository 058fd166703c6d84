"""Wrong inputs to every command and tool: one line, exit status 2, nothing written."""

from __future__ import annotations

import os
import re
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fake_vllm import FakeVLLM
from launch import REPO
from megatron_fspo.cli import main

CONFIG = "--config examples/make_sum/run.toml"
TRAIN = f"train {CONFIG} --nproc 2 --run.folder {{tmp}}/runs"
EVALUATE = f"evaluate {CONFIG} --nproc 2"
CALIBRATE = f"calibrate {CONFIG} --nproc 2 --run.folder {{tmp}}/runs"
MODEL = "examples/make_sum/checkpoint"

# The words of a command line, and what its one line has to name. {tmp} holds what `make_files` makes.
CASES = [
    ("train", ["required: --config", "train --help"]),
    ("train --confg run.toml", ["'--confg'", "did you mean --config?"]),
    (f"{TRAIN} --confg run.toml", ["'--confg'", "did you mean --config?"]),
    ("sweep sweep.toml --jbs=3", ["'--jbs'", "did you mean --jobs?"]),
    ("sweep {tmp}/no_arms.toml", ["no_arms.toml", "arms is missing", "[arms.NAME]"]),
    ("sweep {tmp}/empty", ["{tmp}/empty", "config is missing"]),
    ("sweep {tmp}/jbos.toml", ["jbos.toml", "unknown key jbos", "did you mean jobs?"]),
    (f"{TRAIN} --loss.c-low abc", ["fspo: --loss.c_low = 'abc'", "number"]),
    (
        f"{TRAIN} --optimizer.learning-rate 1",
        ["fspo: --optimizer.learning_rate", "mean optimizer.lr?"],
    ),
    (f"{TRAIN} --data.train {{tmp}}/data.csv", ["data.csv:1: not JSON", "JSON lines", "parquet"]),
    ("train --config {tmp}", ["{tmp}: cannot be read: Is a directory"]),
    ("train --config {tmp}/latin.txt", ["latin.txt: not TOML"]),
    ("train --config {tmp}/list.toml", ["list.toml", "run"]),
    (f"{TRAIN} --loss 3", ["unexpected argument '--loss'", "--section.key value"]),
    (f"{TRAIN} --nproc two", ["--nproc", "invalid int value: 'two'"]),
    (f"{TRAIN} --resume never", ["--resume", "'never'", "auto"]),
    (f"{TRAIN} --run.steps true", ["run.steps = true", "neither true nor false"]),
    (f"{TRAIN} --rollout.engine trt", ["rollout.engine = 'trt'", "'embedded' or 'vllm'"]),
    (f"{TRAIN} --rollout.stop_token_ids [12,14]", ["rollout.stop_token_ids has [14]", "end at 13"]),
    (f"{TRAIN} --rollout.stop [''] ", ["rollout.stop", "at least 1 character"]),
    (f"{TRAIN} --rollout.stop ['\ufffd']", ["rollout.stop", "stands for a part of a character"]),
    (f"{TRAIN} --vllm.colocated true --vllm.transfer nccl", ["vllm", "NCCL takes a GPU for one process"]),
    (
        f"{TRAIN} --rollout.engine vllm --vllm.colocated true --rollout.max_staleness 1",
        ["vllm.colocated = true needs rollout.max_staleness = 0"],
    ),
    (f"{TRAIN} --log.wandb yes", ["log.wandb = 'yes'", "'off', 'offline' or 'online'"]),
    (f"{TRAIN} --log.wandb online", ["log.wandb = online", "no API key", "wandb login"]),
    (f"{TRAIN} --data.validation none", ["evaluation.every > 0 needs data.validation"]),
    (f"{TRAIN} --data.train {{tmp}}", ["{tmp}", "Is a directory"]),
    (f"{TRAIN} --data.train {{tmp}}/latin.txt", ["latin.txt", "UTF-8"]),
    (f"{TRAIN} --model.checkpoint {{tmp}}/file", ["{tmp}/file"]),
    (f"{TRAIN} --run.folder {{tmp}}/file", ["run.folder", "{tmp}/file"]),
    (f"{TRAIN} --reward.name os:nothing", ["os:nothing"]),
    (f"{TRAIN} --reward.name os:sep", ["os:sep"]),
    (f"{TRAIN} --loss.noise {{tmp}}/none.json", ["none.json"]),
    (f"{TRAIN} --loss.noise {{tmp}}/latin.txt", ["latin.txt"]),
    (f"{TRAIN} --vllm.urls http://h:1", ["vllm.urls = 'http://h:1'"]),
    (f"{TRAIN} --run.folder /proc/nope --check", ["run.folder", "/proc/nope", "cannot be written"]),
    (f"{TRAIN} --resume auto --run.folder {{tmp}}/file --check", ["{tmp}/file"]),
    (f"{EVALUATE} --resume", ["unexpected argument '--resume'"]),
    (f"{EVALUATE} --data.validation {{tmp}}/empty", ["{tmp}/empty", "no prompts"]),
    (f"{EVALUATE} --samples 4 32", ["--samples has 2 numbers", "--data 0 files"]),
    (f"{EVALUATE} --samples 4 many", ["--samples", "invalid int value: 'many'"]),
    (f"{EVALUATE} --data.validation [{{{{file='a',samples=0}}}}]", ["data.validation[0].samples = 0"]),
    (f"{EVALUATE} --data.validation [{{{{file='a',samples=true}}}}]", ["samples = true", "neither true nor"]),
    (f"{TRAIN} --data.train [{{{{file='a',samples=4}}}}]", ["a has samples", "rollout.samples"]),
    ("evaluate --config {tmp}/none.toml", ["none.toml: cannot be read: No such file"]),
    ("verify --layouts tp2.xx3 --nproc 2", ["tp2.xx3", "xx3"]),
    ("verify --layouts tp2 --nproc 3", ["3"]),
    ("verify --layouts tp2 --all", ["--all", "not allowed with"]),
    ("verify --dtype float16", ["--dtype", "float16", "float32"]),
    ("verify --nproc 0", ["--nproc 0"]),
    ("verify --nproc 2 --layouts tp2 --json {tmp}/none/found.json", ["--json", "{tmp}/none"]),
    (f"{CALIBRATE} --emulate fp4", ["--emulate", "'fp4'", "mxfp8"]),
    (f"{CALIBRATE} --responses {{tmp}}", ["{tmp}", "Is a directory"]),
    (f"{CALIBRATE} --responses {{tmp}}/latin.txt", ["latin.txt"]),
    (f"{CALIBRATE} --responses {{tmp}}/empty", ["{tmp}/empty"]),
    (f"{CALIBRATE} --run.folder {{tmp}}/file", ["{tmp}/file"]),
    ("serve", ["required: --model"]),
    ("serve --model {tmp}/none --vllm {program}", ["{tmp}/none"]),
    (f"serve --model {MODEL} --vllm /none/vllm", ["/none/vllm"]),
    ("serve --model {tmp}/model --port 99999 --vllm {program}", ["99999"]),
    ("serve --model {tmp}/model --port {port} --vllm {program} --log {tmp}/log", ["{port}"]),
    ("report", ["name the folder of a run"]),
    ("report {tmp}/none", ["{tmp}/none"]),
    ("report {tmp}/bin", ["{tmp}/bin"]),
    ("report {tmp}/corrupt", ["corrupt/metrics.jsonl:2: not a row of this trainer"]),
    ("doctor --config {tmp}/none.toml", ["none.toml: cannot be read"]),
    ("doctor now", ["invalid choice: 'now'", "verl"]),
    ("explain", ["required: file"]),
    ("explain {tmp}/none.jsonl", ["none.jsonl: cannot be read: No such file"]),
    ("explain {tmp}/empty", ["{tmp}/empty: holds no responses"]),
    ("explain {tmp}/empty now", ["unexpected argument 'now'", "--fspo.c-high"]),
    ("explain {tmp}/empty --fspo.c-hihg 1", ["--fspo.c_hihg: no such limit", "c_high"]),
    ("explain {tmp}/empty --rate 1.5", ["--rate 1.5", "between 0 and 1"]),
    ("invent", ["invalid choice: 'invent'"]),
    ("tools/convert_hf_to_megatron.py {tmp}/none {tmp}/out", ["{tmp}/none/config.json"]),
    (f"tools/convert_hf_to_megatron.py {MODEL}", ["required: out"]),
    (f"tools/convert_hf_to_megatron.py {MODEL} {{tmp}}/file/out", ["{tmp}/file"]),
    (f"tools/convert_megatron_to_hf.py {MODEL} {{tmp}}/out", [MODEL]),
    (f"tools/convert_megatron_to_hf.py {MODEL} {{tmp}}/out --dtype int8", ["--dtype", "'int8'"]),
    ("tools/verify_checkpoint.py", ["name a checkpoint folder"]),
    ("tools/verify_checkpoint.py {tmp}/none", ["{tmp}/none/config.json"]),
    (f"tools/verify_checkpoint.py {MODEL}", [MODEL, "no manifest"]),
    (f"tools/verify_checkpoint.py {MODEL} {MODEL} --tolerance nan", ["--tolerance nan"]),
    (f"tools/verify_checkpoint.py {MODEL} --logits", ["--logits compares two checkpoints"]),
    (f"tools/verify_checkpoint.py {MODEL} {MODEL} --logits --layout xx", ["xx"]),
]


@pytest.fixture
def tmp(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the cases name; the surroundings of a person at a prompt without keys."""
    make_files(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_API_KEY", "VLLM_BIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.chdir(REPO)

    def start_ranks(*_: object) -> None:
        pytest.fail("the input was found to be good: torchrun would start now, in place of pytest")

    monkeypatch.setattr(os, "execv", start_ranks)
    return tmp_path


def make_files(tmp: Path) -> None:
    (tmp / "file").touch()
    (tmp / "empty").touch()
    (tmp / "data.csv").write_text('prompt,answer\n"^37=",37\n')
    (tmp / "no_arms.toml").write_text('config = ["run.toml"]\nfolder = "runs"\n')
    (tmp / "jbos.toml").write_text('config = ["run.toml"]\nfolder = "runs"\njbos = 3\n[arms.a]\n')
    (tmp / "latin.txt").write_bytes("naïf".encode("latin-1"))
    (tmp / "list.toml").write_text("run = []\n")
    (tmp / "corrupt").mkdir()
    (tmp / "corrupt/metrics.jsonl").write_text('{"step": 0}\n{"step": 1\n{"step": 2}\n')
    (tmp / "corrupt/config.toml").write_text((REPO / "examples/make_sum/run.toml").read_text())
    (tmp / "model").mkdir()
    (tmp / "model/config.json").write_text('{"head_dim": 32}')
    (tmp / "bin").mkdir()
    FakeVLLM(tmp / "bin").write()


@contextmanager
def port_in_use() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of the command, or of a tool."""
    try:
        if not words[0].startswith("tools/"):
            return main(words)
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    return None


@pytest.mark.parametrize(("line", "told"), CASES, ids=[line for line, _ in CASES])
def test_one_line_and_nothing_written(
    line: str, told: list[str], tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp.rglob("*"))
    with port_in_use() as port:
        values = {"tmp": tmp, "program": FakeVLLM(tmp / "bin").program, "port": port}
        status = run([word.format(**values) for word in line.split()], monkeypatch)
    out, err = capfd.readouterr()
    assert (status, out) == (2, ""), err[-2000:]
    assert re.fullmatch(r"[\w-]+( \w+)?(\.py)?: [^\n]+\n", err), err[-2000:]
    assert [word for word in told if word.format(**values) not in err] == [], err
    assert sorted(tmp.rglob("*")) == before, "something was written"


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK expected, but not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}, "is in use"),
    ],
)
def test_a_wrong_environment_of_a_rank(
    variables: dict[str, str],
    told: str,
    tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp.rglob("*"))
    with port_in_use() as port:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(port=port))
        status = run(TRAIN.format(tmp=tmp).split(), monkeypatch)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("megatron-fspo: ")]
    assert (status, out, len(lines)) == (2, "", 1) and told in err, err[-2000:]
    assert "Traceback" not in err and sorted(tmp.rglob("*")) == before
