"""Wrong inputs to every command and tool: one line, exit status 2, nothing written."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from fake_vllm import FakeVLLM
from launch import REPO
from megatron_fspo.cli import main

CONFIG = "--config examples/make_sum/run.toml"
TRAIN = f"train {CONFIG} --nproc 2 --run.folder {{tmp}}/runs"
EVALUATE = f"evaluate {CONFIG} --nproc 2"
CALIBRATE = f"calibrate {CONFIG} --nproc 2 --run.folder {{tmp}}/runs"
MODEL = "examples/make_sum/checkpoint"
VLLM = f"{TRAIN} --rollout.engine vllm"

# The words of a command line, and what its one line has to name. {tmp} holds what `make_files` makes.
CASES = [
    ("train", ["required: --config", "train --help"]),
    ("train --confg run.toml", ["'--confg'", "did you mean --config?"]),
    ("sweep {tmp}/empty", ["{tmp}/empty", "config is missing"]),
    ("sweep sweep.toml --jbs=3", ["'--jbs'", "did you mean --jobs?"]),
    (f"{TRAIN} --loss.c-low abc", ["fspo: --loss.c_low = 'abc'", "number"]),
    (f"{TRAIN} --lr 1e-4", ["'--lr'", "did you mean --optimizer.lr?"]),
    (f"{TRAIN} --steps 3", ["did you mean --run.steps?"]),
    (f"{TRAIN} --loss.name fpso", ["loss.name = 'fpso'", "did you mean fspo?", "rloo"]),
    (f"{TRAIN} --log.wandb true", ["log.wandb = true", "one of off, offline, online"]),
    (f"{TRAIN} --config {{tmp}}/run.yaml", ["run.yaml: YAML is not read", "TOML"]),
    (f"{TRAIN} --config {{tmp}}/twice.toml", ["twice.toml: not TOML", "line 3", "steps = 4"]),
    (f"{TRAIN} --model.checkpoint Qwen/Qwen3-0.6B", ["`hf download Qwen/Qwen3-0.6B`"]),
    (f"{TRAIN} --data.train openai/gsm8k", ["`hf download --repo-type dataset openai/gsm8k`"]),
    (f"{TRAIN} --model.checkpoint {{tmp}}/no_tokenizer", ["no_tokenizer", "tokenizer.json is missing"]),
    (f"{TRAIN} --model.checkpoint {{tmp}}/bad_tokenizer", ["bad_tokenizer/tokenizer.json: transformers"]),
    (f"{TRAIN} --model.checkpoint {{tmp}}/other", ["'gemma2'", "docs/adding_a_model.md"]),
    (f"{TRAIN} --data.chat-template true", ["no chat template", "set data.chat_template = false"]),
    (f"{TRAIN} --optimizer.learning-rate 1", ["fspo: --optimizer.learning_rate", "mean optimizer.lr?"]),
    (f"{TRAIN} --data.train {{tmp}}/data.csv", ["data.csv:1: not JSON", "JSON lines", "parquet"]),
    (f"plan {CONFIG} --trace x", ["--trace", "'x'"]),
    (f"plan {CONFIG} --trace 1", ["--trace 1", "ranks 0 to 0"]),
    (f"plan {CONFIG} --trace 0 --model.backend cpu", ["model.backend = cpu", "--model.backend cuda"]),
    ("train --config {tmp}", ["{tmp}: cannot be read: Is a directory"]),
    (f"{TRAIN} --resume never", ["--resume", "'never'", "auto"]),
    (f"{TRAIN} --run.steps true", ["run.steps = true", "neither true nor false"]),
    (f"{TRAIN} --rollout.stop_token_ids [12,14]", ["rollout.stop_token_ids has [14]", "end at 13"]),
    (f"{TRAIN} --rollout.stop [''] ", ["rollout.stop", "at least 1 character"]),
    (f"{TRAIN} --rollout.stop ['\ufffd']", ["rollout.stop", "stands for a part of a character"]),
    (f"{TRAIN} --vllm.colocated true --vllm.transfer nccl", ["vllm", "NCCL allows one process per GPU"]),
    (
        f"{TRAIN} --rollout.engine vllm --vllm.colocated true --rollout.max_staleness 1",
        ["vllm.colocated = true needs rollout.max_staleness = 0"],
    ),
    (f"{TRAIN} --log.wandb online", ["log.wandb = online", "no API key", "wandb login"]),
    (f"{TRAIN} --data.validation none", ["evaluation.every > 0 needs data.validation"]),
    (f"{TRAIN} --model.head triton", ["model.head = triton", "no GPU"]),
    (f"{TRAIN} --data.train {{tmp}}/latin.txt", ["latin.txt", "UTF-8"]),
    (f"{TRAIN} --run.folder {{tmp}}/file", ["run.folder", "{tmp}/file"]),
    (f"{TRAIN} --reward.name os:nothing", ["os:nothing"]),
    (f"{TRAIN} --loss.noise {{tmp}}/latin.txt", ["latin.txt"]),
    (f"{TRAIN} --vllm.urls http://h:1", ["vllm.urls = 'http://h:1'"]),
    (f"{VLLM} --vllm.transfer disk", ["vllm.transfer = disk needs vllm.folder"]),
    (f"{VLLM} --vllm.transfer nccl", ["vllm.transfer = nccl", "GPU"]),
    (f"{VLLM} --vllm.urls ['http://h:1/','http://h:1']", ["vllm.urls", "http://h:1 twice"]),
    (f"{VLLM} --vllm.urls ['h:1']", ["'h:1'"]),
    (f"{VLLM} --vllm.urls ['http://10.0.0.7:1'] --vllm.address localhost", ["vllm.address = localhost"]),
    (f"{VLLM} --moe.replay rollout", ["[moe]", "mixture of experts"]),
    (f"{TRAIN} --moe.aux-loss-coef 0.1", ["[moe]", "mixture of experts"]),
    (f"{VLLM} --rollout.temperature 2.1", ["rollout.temperature = 2.1"]),
    (f"{VLLM} --evaluation.temperature 3", ["evaluation.temperature = 3.0"]),
    (f"{TRAIN} --rollout.max-staleness 1", ["rollout.max_staleness = 1 needs rollout.engine = vllm"]),
    (f"{TRAIN} --model.checkpoint /no/such", ["/no/such/config.json"]),
    (f"{TRAIN} --nproc 3 --parallel.tensor 3", ["3", "num_attention_heads 4"]),
    (f"{TRAIN} --parallel.context 8 --batch.max-tokens 104", ["max_tokens = 104", "a multiple of 16"]),
    (f"{TRAIN} --environment.name http --environment.url tools", ["environment.url", "http://host"]),
    (f'{TRAIN} --environment.name agent --environment.command ["x"]', ["needs a model with a chat"]),
    (f"{TRAIN} --environment.turns 3", ["[environment] need environment.name"]),
    (f"{TRAIN} --environment.name calculator --environment.url http://x", ["environment.url goes with"]),
    (f"{TRAIN} --nproc 16 --rollout.prompts 4", ["rollout.prompts = 4", "8 data-parallel ranks"]),
    (f"{TRAIN} --rollout.prompts 72", ["rollout.prompts = 72", "train.jsonl", "68 prompts"]),
    (f"{TRAIN} --data.max-prompt-tokens 3", ["train.jsonl:1", "4 tokens", "max_prompt_tokens is 3"]),
    (f"{TRAIN} --rollout.max-response-tokens 253", ["257", "max_position_embeddings is 256"]),
    (f"{TRAIN} --reward.name make_sun", ["'make_sun'", "did you mean 'make_sum'?", "exact_match"]),
    (f"{TRAIN} --resume", ["--resume", "no run in", "runs/demo"]),
    (f"{TRAIN} --run.folder {{tmp}}/held", ["held/demo holds a run already", "--resume", "run.name"]),
    (f"{TRAIN} --run.folder /proc/nope --check", ["run.folder", "/proc/nope", "cannot be written"]),
    (f"{TRAIN} --resume auto --run.folder {{tmp}}/file --check", ["{tmp}/file"]),
    (f"{EVALUATE} --data.validation none --evaluation.every 0", ["evaluate needs data.validation"]),
    (f"{EVALUATE} --resume", ["unexpected argument '--resume'"]),
    (f"{EVALUATE} --data.validation {{tmp}}/empty", ["{tmp}/empty", "no prompts"]),
    (f"{EVALUATE} --samples 4 many", ["--samples", "invalid int value: 'many'"]),
    (f"{EVALUATE} --data.validation [{{{{file='a',samples=0}}}}]", ["data.validation[0].samples = 0"]),
    (f"{TRAIN} --data.train [{{{{file='a',samples=4}}}}]", ["a has samples", "rollout.samples"]),
    ("verify --layouts tp2.xx3 --nproc 2", ["layout tp2.xx3", "'xx3'", "tpN, sp, ppN"]),
    ("verify --layouts tp3", ["layout tp3", "a multiple of 3 ranks, not 1"]),
    ("verify --nproc 4 --layouts tp2 tp2.dp4", ["layout tp2.dp4 needs 8 ranks, not 4"]),
    ("verify --nproc 8 --layouts tp8", ["parallel.tensor = 8", "num_key_value_heads 4"]),
    (f"verify {CONFIG} --nproc 3", ["a multiple of 2 ranks, not 3"]),
    (f"verify {CONFIG} --nproc 8 --layouts tp8", ["parallel.tensor = 8"]),
    ("verify --config nothing.toml", ["nothing.toml"]),
    ("verify --nproc 0", ["--nproc 0"]),
    ("verify --nproc 2 --layouts tp2 --json {tmp}/none/found.json", ["--json", "{tmp}/none"]),
    (f"{CALIBRATE} --emulate fp4", ["--emulate", "'fp4'", "mxfp8"]),
    (f"{CALIBRATE} --responses {{tmp}}/latin.txt", ["latin.txt"]),
    (f"{CALIBRATE} --responses {{tmp}}/empty", ["{tmp}/empty"]),
    (f"{CALIBRATE} --run.folder {{tmp}}/file", ["{tmp}/file"]),
    (f"{CALIBRATE} --config {{tmp}}/gspo.toml", ["loss.name is gspo"]),
    (
        f"{CALIBRATE} --emulate mxfp8 --fp8.recipe blockwise --model.dtype bfloat16 --model.backend auto",
        ["--emulate"],
    ),
    (
        f"{CALIBRATE} --responses {{tmp}}/one.jsonl --parallel.tensor 1 --parallel.sequence false",
        ["2 data-parallel"],
    ),
    ("serve", ["required: --model"]),
    ("serve --model {tmp}/none --vllm {program}", ["{tmp}/none"]),
    (f"serve --model {MODEL} --vllm /none/vllm", ["/none/vllm"]),
    (f"serve --model {MODEL} --routes --vllm {{program}}", ["--routes", "experts"]),
    ("serve --model {tmp}/model --port 99999 --vllm {program}", ["99999"]),
    ("serve --model {tmp}/model --port {port} --vllm {program} --log {tmp}/log", ["{port}"]),
    (f"serve --model {MODEL} --lora-rank 600 --vllm {{program}}", ["--lora-rank 600", "512"]),
    (f"serve --model {MODEL} --lora-rank -1 --vllm {{program}}", ["--lora-rank -1"]),
    ("init", ["required: folder"]),
    ("init {tmp}/bin", ["{tmp}/bin exists"]),
    ("init {tmp}/file/new", ["{tmp}/file/new cannot be made"]),
    ("init {tmp}/new --from invented", ["invalid choice: 'invented'"]),
    ("convert", ["required: action"]),
    ("report", ["name the folder of a run"]),
    ("report {tmp}/bin", ["{tmp}/bin"]),
    ("report {tmp}/corrupt", ["corrupt/metrics.jsonl:2: not a row of this trainer"]),
    ("explain {tmp}/none.jsonl", ["none.jsonl: cannot be read: No such file"]),
    ("explain {tmp}/empty now", ["unexpected argument 'now'", "--fspo.c-high"]),
    ("explain {tmp}/empty --rate 1.5", ["--rate 1.5", "between 0 and 1"]),
    ("invent", ["invalid choice: 'invent'"]),
    ("tools/convert_hf_to_megatron.py {tmp}/none {tmp}/out", ["{tmp}/none/config.json"]),
    (f"tools/convert_hf_to_megatron.py {MODEL}", ["required: out"]),
    (f"tools/convert_hf_to_megatron.py {MODEL} {{tmp}}/file/out", ["{tmp}/file"]),
    (f"tools/convert_megatron_to_hf.py {MODEL} {{tmp}}/out", [MODEL]),
    (f"tools/convert_megatron_to_hf.py {MODEL} {{tmp}}/out --dtype int8", ["--dtype", "'int8'"]),
    ("tools/verify_checkpoint.py", ["name a checkpoint folder"]),
    ("tools/verify_checkpoint.py {tmp}/none", ["{tmp}/none/config.json"]),
    (f"tools/verify_checkpoint.py {MODEL} {MODEL} --logits --layout xx", ["xx"]),
]


@pytest.fixture
def tmp(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the cases name; the surroundings of a person at a prompt without keys."""
    make_files(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_API_KEY", "VLLM_BIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
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
    (tmp / "latin.txt").write_bytes("naïf".encode("latin-1"))
    (tmp / "gspo.toml").write_text('[loss]\nname = "gspo"')
    (tmp / "run.yaml").write_text("run:\n  steps: 3\n")
    (tmp / "twice.toml").write_text("[run]\nsteps = 3\nsteps = 4\n")
    for name in ("no_tokenizer", "bad_tokenizer", "other"):
        shutil.copytree(REPO / MODEL, tmp / name)
    (tmp / "no_tokenizer/tokenizer.json").unlink()
    (tmp / "bad_tokenizer/tokenizer.json").write_text("{}")
    (tmp / "other/config.json").write_text('{"model_type": "gemma2"}')
    (tmp / "one.jsonl").write_text('{"prompt_token_ids": [1], "token_ids": [2]}')
    (tmp / "held/demo").mkdir(parents=True)
    (tmp / "held/demo/metrics.jsonl").write_text("{}\n")
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


@pytest.fixture
def complaint(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What a command line is refused with: one line, before any process group, and nothing written."""

    def call(line: str) -> str:
        before = {path: path.is_file() and path.read_bytes() for path in tmp.rglob("*")}
        with port_in_use() as port:
            values = {"tmp": tmp, "program": FakeVLLM(tmp / "bin").program, "port": port}
            status = run([word.format(**values) for word in line.split()], monkeypatch)
        out, err = capfd.readouterr()
        assert status == 2 and re.fullmatch(r"(checking [^\n]+\n)?", out), err[-2000:]
        assert re.fullmatch(r"[\w-]+( [\w-]+){0,2}(\.py)?: [^\n]+\n", err), err[-2000:]
        assert {path: path.is_file() and path.read_bytes() for path in tmp.rglob("*")} == before
        assert not torch.distributed.is_initialized()
        return err

    return call


@pytest.mark.parametrize(("line", "told"), CASES, ids=[line for line, _ in CASES])
def test_one_line_and_nothing_written(
    line: str, told: list[str], tmp: Path, complaint: Callable[[str], str]
) -> None:
    said = complaint(line)
    assert [word for word in told if word.format(tmp=tmp, port="") not in said] == [], said


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_cuda_without_a_gpu(complaint: Callable[[str], str]) -> None:
    assert "model.backend = cuda" in complaint(f"{TRAIN} --model.backend cuda")


def test_a_wrong_api_key(complaint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "not a key")
    said = complaint(VLLM)
    assert "API key" in said and "not a key" not in said


GOOD = '{"prompt": "^37=", "answer": "37"}\n'


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"prompt": "^37=", "answer"\n', ":37: not JSON"),
        ("[1]\n", ":37: must be an object, got a list"),
        ('{"prompt": "^37="}\n', ":37: no key 'answer'"),
        ('{"prompt": "", "answer": "1"}\n', ":37"),
        (GOOD * 27, " has only 1 prompts (left out: 62 with the"),
    ],
)
def test_a_wrong_prompt_file(row: str, told: str, tmp: Path, complaint: Callable[[str], str]) -> None:
    (tmp / "prompts.jsonl").write_text(GOOD * 36 + row)
    assert f"prompts.jsonl{told}" in complaint(f"{TRAIN} --data.train {{tmp}}/prompts.jsonl")


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def truncate_weights(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def add_a_token(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": size, "content": "<more>"})
    change_json(checkpoint / "tokenizer.json", added_tokens=tokenizer["added_tokens"])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate_weights, "damaged/model.safetensors is truncated"),
        (lambda c: change_json(c / "config.json", model_type="gpt2"), "'gpt2'; supported: "),
        (add_a_token, "'<more>'"),
    ],
)
def test_a_damaged_checkpoint(
    damage: Callable[[Path], object], told: str, tmp: Path, complaint: Callable[[str], str]
) -> None:
    damage(shutil.copytree(MODEL, tmp / "damaged"))
    assert told in complaint(f"{TRAIN} --model.checkpoint {{tmp}}/damaged")


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK expected, but not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}, "is in use"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "8.8.8.8", "MASTER_PORT": "{port}"},
            "public address",
        ),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "parallel.tensor = 2 does not divide the world size 3"),
        ({"RANK": "1", "WORLD_SIZE": "3"}, ""),
    ],
)
def test_a_wrong_environment_of_a_rank(
    variables: dict[str, str],
    told: str,
    tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Only the first rank speaks."""
    before = sorted(tmp.rglob("*"))
    with port_in_use() as port:
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(port=port))
        status = run(TRAIN.format(tmp=tmp).split(), monkeypatch)
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("megatron-fspo: ")]
    assert (status, len(lines)) == (2, bool(told)) and told in err, err[-2000:]
    assert out in ("", "loading the model; the first step follows\n")
    assert "Traceback" not in err and sorted(tmp.rglob("*")) == before


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / ("x" * 300))]) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron-fspo: ") and said.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_a_syntax_error_in_a_reward(
    tmp: Path, complaint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp / "broken_reward.py").write_text("def f(:\n    pass\n")
    monkeypatch.syspath_prepend(tmp)
    assert "broken_reward.py:1: " in complaint(f"{TRAIN} --reward.name broken_reward:f")
