"""SFT runs: the same numbers as transformers with torch's Adam, in any layout, and after a kill."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import REPO, environment, forked, why
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.page import render_report
from nodes import Nodes, environment_of_a_node, why_not
from runs import PROGRAM, numbers, rows

sys.path.insert(0, str(REPO / "examples/make_sum"))
from make_sum import NUMBERS, demonstration, prompt_text

CHECKPOINT = REPO / "examples/make_sum/checkpoint"
STEPS, BATCH = 4, 6
PARALLEL = {
    "tensor": "--parallel.tensor 2 --parallel.sequence true",
    "context": "--parallel.context 2",
    "data": "--parallel.distributed-optimizer true --batch.max-tokens 128",
}

pytestmark = pytest.mark.slow


def words(folder: Path, name: str, *extra: str) -> list[str]:
    given = f"--run.folder {folder} --run.name {name} --model.checkpoint {CHECKPOINT} --model.backend cpu"
    given += f" --data.train {folder}/train.jsonl --data.validation {folder}/train.jsonl --data.shuffle false"
    given += f" --run.steps {STEPS} --rollout.prompts {BATCH} --evaluation.every {STEPS} --checkpoint.every 1"
    given += " --optimizer.warmup-steps 0 --optimizer.lr 1e-3 --optimizer.weight-decay 0"
    given += " --optimizer.lr-decay constant"
    return [*PROGRAM, "train", "--config", f"{REPO}/examples/make_sum/sft.toml", *given.split(), *extra]


def train(folder: Path, name: str, *extra: str) -> None:
    done = forked(words(folder, name, *extra), nproc=2)
    assert done.returncode == 0, why(done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each layout, on data whose responses have context inside, which must not be learned."""
    folder, rng = tmp_path_factory.mktemp("sft"), random.Random(3)
    with (folder / "train.jsonl").open("w") as file:
        for number in rng.sample(NUMBERS, STEPS * BATCH):
            first, inserted, rest = "1", "2" * rng.randint(0, 3), demonstration(number, rng)
            parts = [("assistant", first), ("tool", inserted or "3"), ("assistant", rest)]
            completion = [{"role": role, "content": text} for role, text in parts]
            file.write(json.dumps({"prompt": prompt_text(number), "completion": completion}) + "\n")
    for name, layout in PARALLEL.items():
        train(folder, name, *layout.split())
    return folder


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[float]]:
    """Loss and gradient norm of each step, and the loss after the last, by transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).float()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    data = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]

    def loss(batch: list[dict[str, Any]]) -> torch.Tensor:
        total, tokens = torch.zeros(()), 0
        for row in batch:
            parts = [
                ("user", row["prompt"]),
                *((part["role"], part["content"]) for part in row["completion"]),
            ]
            ids = [(tokenizer.encode(text), role) for role, text in parts]
            labels = [token if role == "assistant" else -100 for run, role in ids for token in run]
            given = torch.tensor([[token for run, _ in ids for token in run]])
            logits = model(given).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(
                logits, torch.tensor(labels[1:]), reduction="sum"
            )
            tokens += sum(label >= 0 for label in labels)
        return total / tokens

    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        adam.zero_grad()
        now = loss(data[step * BATCH : (step + 1) * BATCH])
        now.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(now.item())
        adam.step()
    with torch.no_grad():
        return {"loss": losses, "norm": norms, "after": [float(loss(data))]}


@pytest.mark.parametrize("name", PARALLEL)
def test_loss_and_gradient_are_those_of_transformers(
    folder: Path, wanted: dict[str, list[float]], name: str
) -> None:
    training = [row for row in rows(folder, name) if row["step"] > 0]
    assert [row["actor/pg_loss"] for row in training] == pytest.approx(wanted["loss"], rel=2e-5)
    assert [row["actor/grad_norm"] for row in training] == pytest.approx(wanted["norm"], rel=2e-4)
    last = training[-1]
    assert [last["val/train/loss"]] == pytest.approx(wanted["after"], rel=2e-5)
    assert last["val/train/loss/low"] < last["val/train/loss"] < last["val/train/loss/high"]
    assert not {"fspo/lre_mean", "critic/rewards/mean", "actor/ppo_kl"} & last.keys()


def test_the_page_shows_the_loss(folder: Path) -> None:
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', render_report(folder / "data")
    )
    assert found and {"loss", "grad_norm"} <= json.loads(found[1]).keys()
    assert not {"reward", "clip_rate"} & json.loads(found[1]).keys()


def test_killed_on_two_nodes_and_resumed_on_one_gives_the_same_bits(folder: Path, tmp_path: Path) -> None:
    layout = PARALLEL["data"].split()
    names = ["node-a", "node-b"]
    launch = [sys.executable, "-m", "megatron_fspo.cli.launch", "--nnodes=2", "--nproc-per-node=1"]
    launch += [f"--rdzv-endpoint={names[0]}:29500"]
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Nodes(names, tmp_path / "hosts") as nodes:
        jobs = [
            nodes.start(
                name,
                [*launch, f"--rdzv-conf=is_host={name == names[0]}", *words(folder, "again", *layout)],
                env=environment_of_a_node(environment()),
            )
            for name in names
        ]
        try:
            end = time.monotonic() + 300
            while not (folder / "again/checkpoints/step_000002").exists():
                assert time.monotonic() < end and [job.poll() for job in jobs] == [None, None]
                time.sleep(0.01)
        finally:
            for job in jobs:
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    assert not (folder / "again/hf").exists()
    train(folder, "again", *layout, "--resume")
    both = [list(map(numbers, rows(folder, run))) for run in ("again", "data")]
    assert both[0] == both[1]
    ends = [(folder / run / "hf/model.safetensors").read_bytes() for run in ("again", "data")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("--rollout.engine vllm", "rollout.engine"),
        ("--loss.kl-coef 0.1", "loss.kl_coef"),
        ("--moe.replay old_pass", "moe.replay"),
    ],
)
def test_keys_that_need_rollouts_are_refused(keys: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        load_config(REPO / "examples/make_sum/sft.toml", keys.split())
