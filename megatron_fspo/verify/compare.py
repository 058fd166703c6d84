"""One outcome against the reference: errors, their limits, and the likeliest causes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.policy import Policy
from megatron_fspo.verify.layouts import Layout
from megatron_fspo.verify.production import Outcome, shard_of
from megatron_fspo.verify.reference import Reference, plain_name

# fp32 rounds at 6e-8, and a gradient is a sum of thousands of terms; what a wrong factor or a lost token does
# is larger by orders of magnitude, and float64 shows everything else.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Largest errors that pass: of log-probs, S, losses and means in nats; of a gradient relative to its largest
entry; of the gradient norm relative."""


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """One parameter, over all ranks that hold a part or a copy of it."""

    error: float
    """max |got - want| / max |want|; inf where that is not a number, or want is 0 and got is not."""
    factor: float
    """Least-squares got ≈ factor · want; NaN where want is 0."""
    unlike: float
    """1 - cos² of the angle between the two: 0 where only the factor is wrong."""
    copies: float
    """Relative difference of the squared norms between ranks that hold the same part."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """All errors of one case."""

    gradients: dict[str, GradientError]
    """Gaps by Hugging Face name (the first, where several make one parameter)."""
    log_prob: float
    log_ratio_sum: float
    loss: float
    """The largest of those of J, the entropy and the KL."""
    grad_norm: float
    """Relative; 0 where the optimizer gave none."""

    @property
    def worst_parameter(self) -> str:
        """The one with the largest gradient error."""
        return max(self.gradients, key=lambda name: self.gradients[name].error)

    @property
    def gradient(self) -> float:
        """The largest gradient error."""
        return self.gradients[self.worst_parameter].error


def compare(policy: Policy, outcome: Outcome, want: Reference) -> Errors:
    """Every rank's part of every gradient, and what all ranks share. Collective."""
    log_probs = torch.nn.utils.rnn.pad_sequence([*want.log_probs], batch_first=True)
    norm = want.grad_norm if outcome.grad_norm is None else outcome.grad_norm
    return Errors(
        gradients=_gradient_errors(policy, outcome, want),
        log_prob=_largest(outcome.log_probs - log_probs),
        log_ratio_sum=_largest(outcome.log_ratio_sums - want.log_ratio_sums),
        loss=max(_or_inf(abs(outcome.metrics[key] - value)) for key, value in reported(want).items()),
        grad_norm=_or_inf(abs(norm - want.grad_norm) / (want.grad_norm or 1.0)),
    )


def reported(want: Reference) -> dict[str, float]:
    """Metrics of a training step that are compared, with the values that they must have."""
    return {"actor/pg_loss": -want.objective, "actor/entropy": want.entropy, "actor/kl_loss": want.kl}


class _ShardError(NamedTuple):
    """One rank's part of one parameter."""

    name: str
    shard: int
    """Ranks with the same number hold the same part."""
    gap: float
    scale: float
    product: float
    wanted: float
    gotten: float


def _gradient_errors(policy: Policy, outcome: Outcome, want: Reference) -> dict[str, GradientError]:
    mine: list[_ShardError] = []
    for row, gradient in outcome.gradients:
        got, right = gradient.double().cpu(), shard_of(row, want.gradients, policy)
        mine.append(
            _ShardError(
                name=f"{row.hf[0].name}{' (the copy on the last stage)' if row.copy else ''}",
                shard=0 if row.layout == "replicated" or row.of_expert else policy.groups.tp.rank(),
                gap=(got - right).abs().max().item(),
                scale=right.abs().max().item(),
                product=(got * right).sum().item(),
                wanted=right.square().sum().item(),
                gotten=got.square().sum().item(),
            )
        )
    everywhere: list[list[_ShardError]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    by_name: dict[str, list[_ShardError]] = {}
    for shard in (shard for rank in everywhere for shard in rank):
        by_name.setdefault(shard.name, []).append(shard)
    errors = {}
    for name, shards in sorted(by_name.items()):
        gap, scale = max(_or_inf(shard.gap) for shard in shards), max(shard.scale for shard in shards)
        product = sum(shard.product for shard in shards)
        wanted, gotten = sum(shard.wanted for shard in shards), sum(shard.gotten for shard in shards)
        numbers = {shard.shard for shard in shards}
        copies = [[shard.gotten for shard in shards if shard.shard == number] for number in numbers]
        errors[name] = GradientError(
            error=gap / scale if scale else (0.0 if gap == 0 else math.inf),
            factor=product / wanted if wanted else math.nan,
            unlike=1 - product**2 / (wanted * gotten) if wanted and gotten else 0.0,
            copies=max(1 - min(squares) / max(squares) if max(squares) else 0.0 for squares in copies),
        )
    return errors


def _largest(gap: Tensor) -> float:
    return _or_inf(gap.abs().max().item())


def _or_inf(value: float) -> float:
    """NaN compares with nothing; as infinity it is the worst."""
    return value if math.isfinite(value) else math.inf


CAUSES = {
    "sequences": "seen by no or several data-parallel ranks: lost, or counted twice",
    "tokens": "prompt tokens, padding or what an environment inserted count, or tokens are lost",
    "head": "labels, temperature, vocabulary (padding, tensor-parallel ranks), attention to later tokens",
    "attention": "RoPE positions, borders of sequences, shared prompts, chunks or weights of other ranks",
    "replay": "experts are not the given ones, those of another micro-batch, or weighed by other scores",
    "adapter": "adapters: their scale, the order of targets, what tensor-parallel ranks sum, frozen inputs",
    "mask": "a value outside the mask got in: torch.where removes it, multiplying by 0 does not",
    "sum-factor": "S is reduced too often over context-parallel ranks",
    "sum-mean": "S is divided by the length of the response",
    "sum-rounding": "log-ratios in bf16, or log-probs that were summed before they were subtracted",
    "sum-tokens": "S lacks tokens of context-parallel ranks, or is over tokens that are not the response's",
    "clip": "the band (width, drift, dual clip), what it is compared with (CTPO: S of prefixes), advantages",
    "denominator": "a mean over a micro-batch or a rank, or over other values",
    "clipped-gradient": "every sequence is clipped, and gradients are not 0",
    "infinite-gradient": "gradients are not finite",
    "tied-embedding": "its two gradients, as embedding and as head, are not added up",
    "norms": "gradients of norms are not summed over tensor-parallel ranks",
    "head-gradient": "the head's gradient of hidden states is not summed over tensor-parallel ranks",
    "router": "gradients of routers are not summed over tensor-parallel ranks, or the denominator of their "
    "losses is another",
    "expert-gradient": "gradients of experts are not summed over the ranks that hold the same experts",
    "key-value-gradient": "gradients of keys and values are not summed over context-parallel ranks",
    "backward": "the loss is right, and the way back through the model is not",
    "not-reduced": "gradients are not summed over data and context parallel ranks",
    "factor": "a normaliser, or the number of ranks or micro-batches, enters as a factor",
    "weighting": "N or T of a micro-batch or rank, a clipped sequence with a gradient, a lost micro-batch",
    "regularizer": "sign or normaliser of the entropy bonus or the KL penalty; else as weighting",
    "grad-norm": "copies of a parameter count twice, or parts of it are left out",
    "collectives": "more than head and loss need for a micro-batch",
}
# Backward comes to a layer's parameters in this order; "experts" are those of any number.
_LAYER_BACKWARD = (
    *("mlp.experts.down_proj", "mlp.experts.gate_proj", "mlp.gate"),
    *("mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm"),
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.q_proj", "input_layernorm"),
)


def diagnose(
    outcome: Outcome,
    want: Reference,
    errors: Errors,
    limit: float,
    layout: Layout,
    *,
    replay: bool = False,
    sums: int = 2,
) -> list[str]:
    """Lines ``cause: explanation (figures)``, the likeliest of ``CAUSES`` first; later ones often follow from
    it. Empty where everything is within the limits. With ``replay``, what is wrong is more often that than
    what every case would have. ``sums``: the loss's ``COLLECTIVES``."""
    causes = _causes(outcome, want, errors, limit, layout, replay, sums)
    return [f"{cause}: {CAUSES[cause]} ({figures})" for cause, figures in causes]


def _causes(
    outcome: Outcome,
    want: Reference,
    errors: Errors,
    limit: float,
    layout: Layout,
    replay: bool,
    sums: int,
) -> Iterator[tuple[str, str]]:
    tokens = sum(len(row) for row in want.log_probs)
    if (outcome.seen != 1).any():
        yield "sequences", _indices(outcome.seen != 1)
    if outcome.tokens != tokens:
        yield "tokens", f"{outcome.tokens} are in the loss, the responses have {tokens}"
    if errors.log_prob > limit:
        wanted = torch.nn.utils.rnn.pad_sequence([*want.log_probs], batch_first=True)
        right = (outcome.log_probs - wanted).abs().amax(1) <= limit  # NaN is not
        # A first token sees none but itself: attention cannot make its hidden state wrong.
        some = any(flag for flag, row in zip(right.tolist(), want.log_probs, strict=True) if len(row))
        special = "adapter" if layout.lora else "replay" if replay else None
        yield (
            special or ("attention" if some else "head"),
            f"log-probs are off by {errors.log_prob:.1e}",
        )
    if errors.log_ratio_sum > limit:
        cause = _sum_cause(outcome.log_ratio_sums, want, limit)
        yield (
            "replay" if replay and cause == "sum-tokens" else cause,
            f"S is off by {errors.log_ratio_sum:.1e}",
        )
    decided = ((outcome.clipped - want.clipped).abs() > 1e-6) | (outcome.out_of_band != want.out_of_band)
    if decided.any():
        yield "clip", f"sequences {_indices(decided)}"
    for key, value in reported(want).items():
        gap = _or_inf(abs(outcome.metrics[key] - value))
        if gap > limit:
            yield "denominator" if math.isfinite(gap) else "mask", f"{key} is off by {gap:.1e}"
    if errors.gradient > limit:
        cause, figures = _gradient_cause(want, errors, limit, layout)
        yield cause, f"{figures}worst: {errors.worst_parameter}, relative error {errors.gradient:.1e}"
    if errors.grad_norm > limit:
        yield "grad-norm", f"relative error {errors.grad_norm:.1e}"
    # An all-gather of statistics, a broadcast of upstream gradients and a reduction of d hidden; sequence
    # parallel gathers hidden as well. The sums that make S, and one rank's decisions on all.
    tensor, context = layout.parallel.tensor > 1, layout.parallel.context > 1
    for group, most in (("tp", tensor * (3 + layout.parallel.sequence)), ("cp", context * sums)):
        if outcome.collectives[group] > most:
            yield "collectives", f"{outcome.collectives[group]:.4g} over {group}, where {most} would do"


def _sum_cause(got: Tensor, want: Reference, limit: float) -> str:
    if not got.isfinite().all():
        return "mask"
    sums, lengths = want.log_ratio_sums, torch.tensor([max(1, len(row)) for row in want.log_probs])
    for cause, values in (("sum-factor", sums), ("sum-mean", sums / lengths)):
        factor = (got @ values / (values @ values)).item()  # least squares
        multiple = (got - factor * values).abs().max() < limit * max(1.0, abs(factor))
        if multiple and (cause == "sum-mean" or abs(factor - 1) > 0.01):  # rounding is a multiple of about 1
            return cause
    return "sum-rounding" if (got - sums).abs().max() < 0.01 * sums.abs().max() else "sum-tokens"


def _gradient_cause(want: Reference, errors: Errors, limit: float, layout: Layout) -> tuple[str, str]:
    wrong = {name: error for name, error in errors.gradients.items() if error.error > limit}
    factors = [error.factor for error in wrong.values()]
    if want.grad_norm == 0:
        return "clipped-gradient", ""
    if math.isinf(errors.gradient):
        return "infinite-gradient", ""
    if layout.lora and (len(wrong) < len(errors.gradients) or not any(factors)):
        return "adapter", ""
    if len(wrong) < len(errors.gradients):
        return _model_cause([*wrong], errors, layout)
    if max(error.copies for error in wrong.values()) > limit:
        return "not-reduced", ""
    if max(error.unlike for error in wrong.values()) < 1e-6 and (
        max(factors) - min(factors) <= limit * abs(max(factors))
    ):
        return "factor", f"{factors[0]:.{1 - round(math.log10(limit))}g} x the reference; "
    return "regularizer" if want.loss != -want.objective else "weighting", ""


def _model_cause(wrong: Sequence[str], errors: Errors, layout: Layout) -> tuple[str, str]:
    """The loss is right and the way back through the model is not, as only some parameters are wrong."""
    first = min(wrong, key=_backward_order)
    cause = "backward"
    if "lm_head.weight" not in errors.gradients and all("embed_tokens" in name for name in wrong):
        cause = "tied-embedding"
    elif layout.parallel.tensor > 1 and all(name.endswith("norm.weight") for name in wrong):
        cause = "norms"
    elif first == "model.norm.weight" and len(wrong) == len(errors.gradients) - 1:
        cause = "head-gradient"
    elif all(".experts." in name for name in wrong):
        cause = "expert-gradient"
    elif plain_name(first).endswith("mlp.gate.weight"):
        cause = "router"
    elif layout.parallel.context > 1 and first.endswith(("k_norm.weight", "q_proj.weight")):
        cause = "key-value-gradient"
    return cause, f"the first on the way back: {first}; "


def _backward_order(name: str) -> tuple[int, int, int]:
    """Sorts parameters as backward comes to them."""
    if name.startswith("model.layers."):
        name = plain_name(name)
        layer, module = name.removeprefix("model.layers.").rpartition(".")[0].split(".", 1)
        return 2, -int(layer), _LAYER_BACKWARD.index(re.sub(r"[.]\d+[.]", ".", module))
    return {"lm_head.weight": 0, "model.norm.weight": 1, "model.embed_tokens.weight": 3}.get(name, 0), 0, 0


def _indices(flags: Tensor) -> str:
    indices = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
