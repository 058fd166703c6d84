"""On-policy distillation: the KL to a teacher as the signal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch import REPO, forked, why
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.packing.batch import Sequences
from megatron_fspo.packing.pack import PackLayout, pack
from runs import PROGRAM, rows

CHECKPOINT = REPO / "examples/make_sum/checkpoint"
TIMES = (8, 4, 2, 1, 1)
"""How often each of five tokens was sampled; the policy's probabilities are these over 16."""


def test_the_expected_gradient_is_that_of_the_kl_to_the_teacher() -> None:
    """A KL over the top k of the teacher as one advantage for the sampled token would give 0 instead: it does
    not depend on which token was sampled."""
    logits = torch.tensor(TIMES, dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1], dtype=torch.float64).log()
    log_policy = logits.log_softmax(0)
    kl = (log_policy.exp() * (log_policy - teacher)).sum()
    (wanted,) = torch.autograd.grad(kl, logits, retain_graph=True)
    assert wanted.abs().max() > 0.1

    sampled = [token for token, times in enumerate(TIMES) for _ in range(times)]
    sequences = Sequences.of(
        prompts=[[0]] * len(sampled),
        responses=[[token] for token in sampled],
        advantages=[0.0] * len(sampled),
    )
    (batch,) = pack(sequences, PackLayout(max_tokens=1000)).on_host

    def scored(values: Tensor) -> Tensor:
        return torch.where(batch.loss_mask, values[batch.labels], 0.0)

    class Scoring:
        groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))

        def __call__(self, *_: Any) -> tuple[Tensor, Tensor]:
            return scored(log_policy), torch.zeros(len(batch.labels), dtype=torch.float64)

    given = replace(batch, reference_log_probs=scored(teacher))
    scoring: Any = Scoring()
    loss = PolicyLoss(objective=FSPOLoss(c_low=0.1, c_high=0.1).objective(), scoring=scoring, kl_coef=1.0)
    value, tokens, _ = loss.loss(given, torch.nn.Identity(), torch.empty(0))
    (gradient,) = torch.autograd.grad(value / tokens, logits, retain_graph=True)
    assert torch.allclose(gradient, wanted, atol=1e-12)
    # The trap: the same number as an advantage of every token.
    constant = (log_policy.detach().exp() * (log_policy.detach() - teacher)).sum()
    (nothing,) = torch.autograd.grad((constant * log_policy[sampled]).mean(), logits)
    assert nothing.abs().max() < 1e-12


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, moved a little."""
    folder = tmp_path_factory.mktemp("student")
    for file in CHECKPOINT.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight += 0.012 * torch.randn(weight.shape, generator=generator) * ("norm" not in name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def distilled(folder: Path, name: str, student: Path, *extra: str) -> list[dict[str, Any]]:
    words = f"--model.checkpoint {student} --teacher.checkpoint {CHECKPOINT} --run.folder {folder}"
    words += f" --run.name {name} --run.steps 8 --evaluation.every 0 --rollout.prompts 16 --rollout.samples 2"
    words += " --batch.mini-batches 1 --batch.epochs 1 --optimizer.lr 5e-4 --optimizer.warmup-steps 2"
    configs = [f"--config={REPO}/examples/make_sum/{file}.toml" for file in ("run", "distil")]
    words += " --loss.calibrate 0 --checkpoint.every 0 --rollout.max-response-tokens 60"
    done = forked([*PROGRAM, "train", *configs, *words.split(), *extra], nproc=2)
    assert done.returncode == 0, why(done.stderr)
    return [row for row in rows(folder, name) if row["step"] > 0]


@pytest.mark.slow
def test_a_run_approaches_its_teacher_in_any_layout(tmp_path: Path, student: Path) -> None:
    tensor = distilled(tmp_path, "tensor", student)
    pipeline = distilled(tmp_path, "data", student, *"--parallel.tensor 1 --parallel.sequence false".split())
    gaps = [row["actor/kl_loss"] for row in tensor]
    assert sum(gaps[4:]) < 0.8 * sum(gaps[:4])
    assert all(row["critic/rewards/max"] == 0 and row["actor/pg_loss"] == 0 for row in tensor)
    first = [[row[key] for key in ("actor/kl_loss", "actor/grad_norm")] for row in (tensor[0], pipeline[0])]
    assert first[0] == pytest.approx(first[1], rel=1e-4)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("--loss.kl-coef 0 --teacher.checkpoint t", "loss.kl_coef > 0"),
        ("--teacher.checkpoint t --teacher.urls ['http://a']", "exclude each other"),
        ("--teacher.urls ['a:8000']", "must be http://host:port"),
        ("--teacher.urls ['http://a'] --rollout.temperature 0.8", "rollout.temperature = 1"),
        ("--teacher.urls ['http://a'] --rollout.dynamic-sampling true", "rollout.dynamic_sampling"),
    ],
)
def test_keys_that_do_not_fit_a_teacher(keys: str, named: str) -> None:
    configs = [REPO / f"examples/make_sum/{file}.toml" for file in ("run", "distil")]
    with pytest.raises(InputError, match=named):
        load_config(configs, keys.split())


def test_a_teacher_with_another_vocabulary(tmp_path: Path, student: Path) -> None:
    for file in student.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace('"7": 7', '"x": 7').replace('"7":7', '"x":7'))
    configs = [f"--config={REPO}/examples/make_sum/{file}.toml" for file in ("run", "distil")]
    words = ["train", *configs, "--teacher.checkpoint", str(tmp_path), "--check", "--nproc", "2"]
    done = forked([*PROGRAM, *words, "--model.backend", "cpu"], nproc=0)
    assert done.returncode == 2 and "2 entries of its vocabulary" in done.stderr, done.stderr
