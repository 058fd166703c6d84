"""The batch that every layout gets, and the float64 transformers oracle of the whole loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend import fitting, supported
from experts import gradients_of
from megatron_fspo.config import Parallel
from megatron_fspo.types import Sample
from megatron_fspo.verify.cases import random_samples

# World size → name → layout.
LAYOUTS = fitting(
    {
        1: {"tp1": Parallel()},
        2: supported(
            {
                "dp2": Parallel(),
                "tp2": Parallel(tensor=2),
                "tp2sp": Parallel(tensor=2, sequence=True),
                "pp2": Parallel(pipeline=2),
                "pp2vpp2": Parallel(pipeline=2, virtual_pipeline=2),
                "cp2": Parallel(context=2),
                "dp2do": Parallel(distributed_optimizer=True, overlap_grad_reduce=True),
                "ep2": Parallel(expert=2),
            },
            but=("dp2", "tp2", "pp2"),
        ),
        4: {
            "ep4do": Parallel(expert=4, distributed_optimizer=True),
            "tp2sp.ep2": Parallel(tensor=2, sequence=True, expert=2),
            "pp2.ep2": Parallel(pipeline=2, expert=2),
        },
    }
)
KINDS = ("tied", "untied", "moe")


def fits(kind: str, layout: str) -> bool:
    """Whether the checkpoint is tried in the layout."""
    return "ep" in layout or layout in ("tp1", "tp2sp") if kind == "moe" else "ep" not in layout


VOCAB = 37
TEMPERATURE = 0.8
C, C_DUAL = 0.05, 0.1
# Prompts and responses of very different lengths; one-token ones among them.
PROMPTS = (1, 3, 2, 5, 4, 2, 6, 1, 3, 2, 4, 1)
RESPONSES = (1, 40, 7, 1, 25, 2, 33, 12, 3, 60, 5, 18)
SHAPES = list(zip(PROMPTS, RESPONSES, strict=True))

PROMPTS_TO_DECODE = [tuple(range(1, 2 + 2 * i)) for i in range(4)]


def samples() -> list[Sample]:
    """The same on every rank. Token 0, which also pads, is sampled too."""
    return random_samples(SHAPES, vocab_size=VOCAB, seed=11)


def drift(index: int) -> Tensor:
    """[L] what the new log-probs of a sample gain on the old ones: some sequences leave the band."""
    length = SHAPES[index][1]
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(length, generator=generator) * 0.04 + 0.02 * (index % 3 - 1)


@dataclass(frozen=True)
class Reference:
    log_probs: list[Tensor]
    """Per sample [L], float64."""
    greedy: Tensor
    """Per prompt to decode, the 20 likeliest tokens one after the other."""
    gradients: dict[str, Tensor]
    """Hugging Face name → gradient of the loss, float64."""
    objective: float
    clipped: int


def reference(checkpoint: Path) -> Reference:
    """FSPO by autograd through transformers in float64, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    rows, scores, clipped = samples(), [], 0
    total = torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(rows):
        prompt, response = sample.prompt.token_ids, sample.completion.token_ids
        ids = torch.tensor([*prompt, *response])
        logits = model(ids[None]).logits[0].double() / TEMPERATURE
        log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(
            -1, torch.tensor(response)[:, None]
        )[:, 0]
        scores.append(log_probs.detach())
        old = log_probs.detach() - drift(index).double()
        s = (log_probs - old).sum()
        edge = C * len(response) ** 0.5
        a = sample.advantage
        j = torch.minimum(s.exp() * a, s.clamp(-edge, edge).exp() * a)
        if a < 0:
            j = torch.maximum(j, torch.tensor(C_DUAL * len(response) ** 0.5, dtype=torch.float64).exp() * a)
        clipped += int(torch.autograd.grad(j, s, retain_graph=True)[0] == 0)
        total = total + j
    objective = total / len(rows)
    (-objective).backward()
    return Reference(
        log_probs=scores,
        greedy=torch.stack([_greedy(model, prompt) for prompt in PROMPTS_TO_DECODE]),
        gradients=gradients_of(model),
        objective=objective.item(),
        clipped=clipped,
    )


@torch.no_grad()
def _greedy(model: Any, prompt: tuple[int, ...]) -> Tensor:
    """20 tokens, without a cache."""
    ids = torch.tensor(prompt)
    for _ in range(20):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1:].argmax(-1)])
    return ids[len(prompt) :]
