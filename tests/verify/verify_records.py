"""Records as ``verify`` makes them, by hand: a batch of three sequences, and nothing wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_fspo.losses import GRPOLoss
from megatron_fspo.verify.cases import Case
from megatron_fspo.verify.compare import Errors, GradientError
from megatron_fspo.verify.production import Outcome
from megatron_fspo.verify.reference import Reference
from megatron_fspo.verify.run import Result

ROWS = [torch.tensor([-1.0, -2.0, -0.5, -3.0]), torch.zeros(0), torch.tensor([-0.25])]
SUMS = torch.tensor([0.5, 0.0, -0.125], dtype=torch.float64)

WANT = Reference(
    log_probs=[row.double() for row in ROWS],
    log_ratio_sums=SUMS,
    clipped=torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64),
    out_of_band=torch.tensor([False, False, True]),
    objective=0.75,
    loss=-0.75,
    entropy=1.5,
    kl=0.0,
    gradients={},
    grad_norm=2.0,
)
OUTCOME = Outcome(
    log_probs=torch.nn.utils.rnn.pad_sequence(WANT.log_probs, batch_first=True),
    log_ratio_sums=SUMS.clone(),
    clipped=WANT.clipped.clone(),
    out_of_band=WANT.out_of_band.clone(),
    seen=torch.ones(3, dtype=torch.float64),
    tokens=5,
    metrics={"actor/pg_loss": -0.75, "actor/entropy": 1.5, "actor/kl_loss": 0.0, "actor/ppo_kl": 9.0},
    grad_norm=2.0,
    gradients=[],
    collectives={"tp": 0.0, "cp": 0.0},
)
# In the order of the alphabet, as compare() has them.
NAMES = [
    "lm_head.weight",
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (
            *("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm"),
            *("self_attn.k_norm", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj"),
        )
    ),
    "model.norm.weight",
]
RIGHT = GradientError(error=1e-16, factor=1.0, unlike=0.0, copies=0.0)
ERRORS = Errors(
    gradients=dict.fromkeys(NAMES, RIGHT), log_prob=0.0, log_ratio_sum=0.0, loss=0.0, grad_norm=0.0
)


def with_gradients(wrong: dict[str, GradientError], *, tied: bool = False, **changes: Any) -> Errors:
    """Errors where these are wrong; tied: without the head."""
    gradients = {name: wrong.get(name, RIGHT) for name in [*NAMES, *(w for w in wrong if w not in NAMES)]}
    if tied:
        del gradients["lm_head.weight"]
    return replace(ERRORS, gradients=gradients, **changes)


def result(**changes: Any) -> Result:
    """One case that passed."""
    passed = Result(
        layout="tp2.cp2",
        case=Case(name="grpo", loss=GRPOLoss(), split="uneven"),
        dtype=torch.float32,
        tied=False,
        errors=ERRORS,
        grad_norm=2.0,
        collectives={"tp": 2.0, "cp": 1.0},
        problems=[],
    )
    return replace(passed, **changes)
