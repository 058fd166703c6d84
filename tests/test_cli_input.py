"""Wrong inputs end in one clear line and exit status 2, before any process group forms."""

from __future__ import annotations

import json
import os
import re
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

from launch import REPO, environment
from megatron_fspo.cli import main
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
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls ``train`` on the make-sum configuration for two processes, and returns the one line it says."""

    def call(*overrides: str, command: str = "train", config: str = CONFIG) -> str:
        arguments = [command, "--config", config, "--nproc", "2", "--run.folder", str(tmp_path / "runs")]
        before = sorted(tmp_path.rglob("*"))
        assert main([*arguments, *overrides]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(r"megatron-fspo: [^\n]+\n", err)
        assert not torch.distributed.is_initialized()
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("megatron-fspo: ").rstrip("\n")

    return call


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("--model.checkpoint /no/such", ["/no/such/config.json", "not found"]),
        ("--loss.c-hihg 0.04", ["--loss.c_hihg: ", "did you mean loss.c_high?"]),
        ("--nproc 3 --parallel.tensor 3", ["3", "num_attention_heads 4"]),
        ("--nproc 3", ["parallel.tensor = 2", "world size 3"]),
        ("--nproc 6 --parallel.pipeline 3", ["parallel.pipeline = 3", "does not divide", "2 layers"]),
        ("--nproc 4 --parallel.context 4", ["parallel.tensor = 2 x parallel.context = 4", "a multiple of 8"]),
        ("--parallel.virtual-pipeline 2", ["parallel.virtual_pipeline = 2", "parallel.pipeline > 1"]),
        ("--parallel.context 8 --batch.max-tokens 104", ["batch.max_tokens = 104", "a multiple of 16"]),
        ("--nproc 16 --rollout.prompts 4", ["rollout.prompts = 4", "8 data-parallel ranks"]),
        ("--rollout.prompts 72", ["rollout.prompts = 72", "train.jsonl", "68 prompts"]),
        ("--data.train no.jsonl", ["no.jsonl", "No such file"]),
        ("--data.validation no.jsonl", ["no.jsonl", "No such file"]),
        ("--data.answer-key solution", ["train.jsonl:1", "'solution'", "'answer'"]),
        ("--data.max-prompt-tokens 3", ["train.jsonl:1", "4 tokens", "max_prompt_tokens is 3"]),
        ("--data.chat-template true", ["train.jsonl", "no chat template"]),
        ("--rollout.max-response-tokens 253", ["257", "max_position_embeddings is 256"]),
        ("--reward.name make_sun", ["'make_sun'", "did you mean 'make_sum'?", "exact_match"]),
        ("--reward.name my_rewards:grade", ["my_rewards:grade", "cannot import"]),
        ("--rollout.max-staleness 1", ["rollout.max_staleness = 1 needs rollout.engine = vllm"]),
        ("--resume", ["--resume", "no run in", "runs/demo"]),
    ],
)
def test_a_wrong_argument(refusal: Callable[..., str], overrides: str, words: list[str]) -> None:
    line = refusal(*overrides.split())
    assert [word for word in words if word not in line] == [], line


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_cuda_without_a_gpu(refusal: Callable[..., str]) -> None:
    assert refusal("--model.backend", "cuda").startswith("model.backend = cuda, but torch sees no GPU here.")


def test_training_with_evaluation_needs_validation_prompts(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    lines = Path(CONFIG).read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("validation")))
    assert "evaluation.every > 0 needs data.validation" in refusal(config=str(config))
    line = refusal("--evaluation.every", "0", command="evaluate", config=str(config))
    assert line == "evaluate needs data.validation"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("--vllm.transfer disk", "vllm.transfer = disk needs vllm.folder"),
        ("--vllm.transfer nccl", "vllm.transfer = nccl needs a trainer on GPUs"),
        ("--vllm.urls ['http://h:1/','http://h:1']", "vllm.urls names http://h:1 twice"),
        ("--vllm.urls ['h:1']", "'h:1'"),
        ("--vllm.urls []", "vllm.urls"),
        ("--vllm.urls ['http://10.0.0.7:1'] --vllm.address localhost", "vllm.address = localhost"),
        ("--rollout.temperature 2.1", "rollout.temperature = 2.1: vLLM takes at most 2"),
        ("--evaluation.temperature 3", "evaluation.temperature = 3.0: vLLM takes at most 2"),
    ],
)
def test_wrong_options_of_vllm(refusal: Callable[..., str], overrides: str, words: str) -> None:
    assert words in refusal("--rollout.engine", "vllm", *overrides.split())


def test_a_wrong_api_key(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "not a key")
    line = refusal("--rollout.engine", "vllm")
    assert "API key" in line and "not a key" not in line


GOOD = '{"prompt": "^37=", "answer": "37"}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["prompts.jsonl", "holds no prompts"]),
        (GOOD * 36 + '{"prompt": "^37=", "answer"\n' + GOOD * 40, ["prompts.jsonl:37: not JSON"]),
        (GOOD * 36 + "[1]\n" + GOOD * 40, ["prompts.jsonl:37: not an object but a list"]),
        (GOOD * 36 + '{"prompt": "^37="}\n' + GOOD * 40, ["prompts.jsonl:37: no key 'answer'"]),
        (GOOD * 36 + '{"prompt": "", "answer": "1"}\n' + GOOD * 40, ["prompts.jsonl:37", "is empty"]),
        (GOOD * 63, ["rollout.prompts = 64", "prompts.jsonl has only 1 prompts (left out: 62 with the"]),
    ],
)
def test_a_wrong_prompt_file(
    refusal: Callable[..., str], tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    line = refusal("--data.train", str(path))
    assert [word for word in words if word not in line] == [], line


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
    ("damage", "words"),
    [
        (truncate_weights, ["{c}/model.safetensors is truncated, or not a safetensors file"]),
        (
            lambda c: (c / "model.safetensors").unlink(),
            ["{c} has neither model.safetensors nor "],
        ),
        (
            lambda c: change_json(c / "config.json", intermediate_size=130),
            ["mlp.down_proj.weight has shape", "config.json makes it"],
        ),
        (
            lambda c: change_json(c / "config.json", model_type="gpt2"),
            ["{c}/config.json: model_type is 'gpt2'; supported: llama, qwen2, qwen3, qwen3_moe"],
        ),
        (add_a_token, ["it must be at least", "'<more>'"]),
        (lambda c: (c / "tokenizer_config.json").unlink(), ["holds no tokenizer"]),
        (lambda c: (c / "tokenizer.json").write_text("{"), ["cannot load the tokenizer"]),
    ],
)
def test_a_damaged_checkpoint(
    refusal: Callable[..., str], tmp_path: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    checkpoint = Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))
    damage(checkpoint)
    line = refusal("--model.checkpoint", str(checkpoint))
    assert [word for word in words if word.format(c=checkpoint) not in line] == [], line


def test_a_folder_that_holds_a_run(refusal: Callable[..., str], tmp_path: Path) -> None:
    metrics = tmp_path / "runs/demo/metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text("{}\n")
    line = refusal()
    assert "runs/demo holds a run already" in line and "--resume" in line and "run.name" in line
    assert metrics.read_text() == "{}\n"


def test_only_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    arguments = ["train", "--config", CONFIG, "--run.folder", str(tmp_path)]
    for rank, told in (("0", "parallel.tensor = 2 does not divide the world size 3"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and told in err and bool(err) == bool(told)


def test_check_says_that_all_is_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--config", CONFIG, "--nproc", "2", "--run.folder", str(tmp_path)]
    assert main([*arguments, "--check"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{CONFIG}: fine; the run would be in {tmp_path}/demo\n" and err == ""
    assert not torch.distributed.is_initialized() and list(tmp_path.iterdir()) == []


def test_check_lists_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--config", CONFIG, "--nproc", "3", "--run.folder", str(tmp_path), "--check"]
    assert main([*arguments, "--data.train", "no.jsonl", "--reward.name", "no"]) == 2
    out, err = capsys.readouterr()
    told = ["parallel.tensor = 2 does not divide the world size 3", "no.jsonl", "no reward is called 'no'"]
    assert out == "" and all(word in line for word, line in zip(told, err.splitlines(), strict=True))
    assert main([*arguments, "--run.steps", "0", "--loss.c-hihg", "1"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "unknown key loss.c_hihg" in first and "run.steps = 0" in second
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, checkpoint, ignore=lambda *_: ["tokenizer_config.json"])
    more = f"--model.checkpoint {checkpoint} --data.train no.jsonl --data.validation no_other.jsonl "
    more += "--reward.name no --reward.also.neither 1 --parallel.expert 2 --rollout.engine vllm "
    more += "--vllm.transfer disk --vllm.urls ['http://127.0.0.1:9','http://127.0.0.1:9']"
    assert main([*arguments, *more.split()]) == 2
    told = ["vllm.urls", "vllm.folder", "parallel.tensor", "parallel.expert", "holds no tokenizer"]
    told += ["no.jsonl", "no_other.jsonl", "'no'", "'neither'"]
    lines = capsys.readouterr().err.splitlines()
    assert all(word in line for word, line in zip(told, lines, strict=True)), lines
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_check_notes_an_absent_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "--config", CONFIG, "--nproc", "2", "--run.folder", str(tmp_path), "--check"]
    arguments += ["--rollout.engine", "vllm", "--vllm.urls", "['http://127.0.0.1:9']"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    fine, note = out.splitlines()
    assert "fine" in fine and note.startswith("note: ") and "127.0.0.1:9" in note and err == ""
    monkeypatch.setenv("WORLD_SIZE", "2")  # the run will begin now
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "127.0.0.1:9" in err


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("def grade(prompt, response): return 1.0", "too many positional"),
        ("def grade(prompt, completion, response, gold): return 1.0", "'gold'"),
        ("def grade(*, prompt, completion, response): return 1.0", "too many positional"),
        ("class Grade:\n    def __call__(self, prompt): return 1.0\ngrade = Grade()", "too many positional"),
        ("def grade(prompt, completion, response, gold=None): return 1.0", None),
        ("def grade(*arguments): return 1.0", None),
        ("grade = max", None),  # without a signature
    ],
)
def test_check_calls_no_reward_but_knows_its_arguments(
    function: str,
    wrong: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_reward.py").write_text(function)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)
    arguments = ["train", "--config", CONFIG, "--nproc", "2", "--run.folder", str(tmp_path), "--check"]
    status = main([*arguments, "--reward.name", "own_reward:grade"])
    err = capsys.readouterr().err
    if wrong is None:
        assert (status, err) == (0, "")
    else:
        assert status == 2 and err.count("\n") == 1
        assert all(word in err for word in ("own_reward:grade", "(prompt, completion, response)", wrong)), err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is a check on a machine without GPUs")
def test_check_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "--config", CONFIG, "--nproc", "2", "--run.folder", str(tmp_path), "--check"]
    arguments += ["--model.backend", "cuda", "--model.dtype", "bfloat16"]
    assert main(arguments) == 0
    assert "note: no GPU here" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")  # the run will be here
    assert main(arguments) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_ends_with_status_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megatron_fspo", "train", "--config", CONFIG, "--loss.c-hihg", "1"]
    words += ["--run.folder", str(tmp_path / "runs")]
    result = subprocess.run(words, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=120)
    # A CUDA build of torch logs a line of its own where there is no GPU.
    lines = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]
    told = "megatron-fspo: --loss.c_hihg: unknown key loss.c_hihg; did you mean loss.c_high?"
    assert (result.returncode, result.stdout, lines) == (2, "", [told])
    assert list(tmp_path.iterdir()) == []


def test_help_has_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert err == "" and "torchrun --nproc-per-node 8 -m megatron_fspo train" in out
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
    assert all(name in text for name in findings["packages"])
    assert all(item in text for item in findings["missing"])


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


def torchrun(folder: Path, program: str) -> subprocess.Popen[str]:
    """The launcher with two ranks of a program."""
    (folder / "rank.py").write_text(f"import os, signal, sys, time\n{program}\ntime.sleep(60)\n")
    words = "-m megatron_fspo.cli.launch --standalone --nproc-per-node 2 --shutdown-timeout 600"
    command = [sys.executable, *words.split(), str(folder / "rank.py")]
    return subprocess.Popen(command, cwd=REPO, env=environment(), stderr=subprocess.PIPE, text=True)


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
            assert err.read() == "megatron-fspo: interrupted\n"
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("--config {gspo}", "loss.name is gspo"),
        (
            "--emulate mxfp8 --fp8.recipe blockwise --model.dtype bfloat16",
            "--emulate is for runs in bfloat16",
        ),
        ("--responses no.jsonl", "no.jsonl: No such file"),
        ("--responses {one} --parallel.tensor 1 --parallel.sequence false", "fewer than the 2 data-parallel"),
        ("--rollout.prompts 4000", "rollout.prompts = 4000"),
    ],
)
def test_what_calibrate_refuses(
    overrides: str, said: str, refusal: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    gspo = tmp_path_factory.mktemp("config") / "gspo.toml"
    gspo.write_text('[loss]\nname = "gspo"')
    one = gspo.with_name("one.jsonl")
    one.write_text('{"prompt_token_ids": [1], "token_ids": [2]}')
    assert said in refusal(*overrides.format(gspo=gspo, one=one).split(), command="calibrate")
