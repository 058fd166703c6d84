"""Compare an outcome with the reference: errors, their limits, and the likeliest causes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.verify.layouts import Layout
from megatron_fspo.verify.production import Outcome, cut_shard
from megatron_fspo.verify.reference import Reference, plain_name

# fp32 rounds at 6e-8, and a gradient is a sum of thousands of terms. A wrong factor or a lost token causes
# errors that are larger by orders of magnitude; float64 shows everything else.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Largest errors that pass: in nats, or relative for gradients (to the largest entry) and their norm."""


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """Error of one parameter, over all ranks that hold a part or copy of it."""

    error: float
    """max |got − want| / max |want|; infinite if that is not finite, or if want is 0 and got is not."""
    factor: float
    """Least-squares factor in got ≈ factor · want; NaN if want is 0."""
    unlike: float
    """1 − cos² of the angle between got and want: 0 if only the factor is wrong."""
    copies: float
    """Relative difference of the squared norms between ranks that hold the same part."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    gradients: dict[str, GradientError]
    """By Hugging Face name, the first if several tensors form one parameter."""
    log_prob: float
    log_ratio_sum: float
    loss: float
    """The largest error of J, entropy and KL."""
    grad_norm: float
    """Relative; 0 if the optimizer returned none."""

    @property
    def worst_parameter(self) -> str:
        """Name of the parameter with the largest gradient error."""
        return max(self.gradients, key=lambda name: self.gradients[name].error)

    @property
    def gradient(self) -> float:
        """The largest gradient error."""
        return self.gradients[self.worst_parameter].error


def compare(policy: Policy, outcome: Outcome, want: Reference) -> Errors:
    """Compute the errors over all ranks. Collective."""
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
    """Return the metrics of a training step that are compared, with their reference values."""
    return {"actor/pg_loss": -want.objective, "actor/entropy": want.entropy, "actor/kl_loss": want.kl}


class _ShardError(NamedTuple):
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
    tp = policy.groups.tp
    for row, gradient in outcome.gradients:
        got, right = gradient.double().cpu(), cut_shard(row, want.gradients, policy)
        mine.append(
            _ShardError(
                name=f"{row.hf[0].name}{' (the copy on the last stage)' if row.copy else ''}",
                shard=row.expert if row.in_expert else tp.rank() * (row.layout != "replicated"),
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
    """Replace NaN by infinity, so that it compares as the worst error."""
    return value if math.isfinite(value) else math.inf


CAUSES = {
    "sequences": "a sequence is on no data-parallel rank, or on several: it is lost or counted twice",
    "tokens": "prompt, padding or inserted tokens are counted, or response tokens are lost",
    "head": "labels, temperature, vocabulary (padding, tensor-parallel ranks), or attention to later tokens",
    "attention": "RoPE positions, sequence boundaries, shared prompts, or chunks or weights of other ranks",
    "replay": "experts are not the given ones, are another micro-batch's, or have wrong weights",
    "adapter": "adapters: scale, order of targets, sums over tensor-parallel ranks, inputs without gradient",
    "mask": "a value outside the mask is used; remove it by torch.where, not by multiplying by 0",
    "sum-factor": "S is summed more than once over context-parallel ranks",
    "sum-mean": "S is divided by the response length",
    "sum-rounding": "log-ratios are in bf16, or log-probs are summed before they are subtracted",
    "sum-tokens": "S lacks tokens of context-parallel ranks, or includes tokens outside the response",
    "clip": "band (width, drift, dual clip), value compared with it (CTPO: S of prefixes), or advantages",
    "denominator": "a mean is over one micro-batch or rank, or over wrong values",
    "clipped-gradient": "every sequence is clipped, but gradients are not 0",
    "infinite-gradient": "gradients are not finite",
    "tied-embedding": "its gradients as embedding and as head are not added",
    "norms": "gradients of norms are not summed over tensor-parallel ranks",
    "head-gradient": "the head's gradient of hidden states is not summed over tensor-parallel ranks",
    "router": "router gradients are not summed over TP ranks, or router losses have a wrong denominator",
    "expert-gradient": "gradients of experts are not summed over the ranks that hold the same experts",
    "key-value-gradient": "gradients of keys and values are not summed over context-parallel ranks",
    "backward": "the loss is right, but the backward pass through the model is not",
    "not-reduced": "gradients are not summed over data- and context-parallel ranks",
    "factor": "gradients have a wrong factor: a normaliser, or the number of ranks or micro-batches",
    "weighting": "N or T of a micro-batch or rank, a clipped sequence with gradient, or a lost micro-batch",
    "regularizer": "sign or normaliser of the entropy bonus or KL penalty; otherwise as for weighting",
    "grad-norm": "the norm counts copies of a parameter twice, or omits parts",
    "collectives": "head and loss call more collectives per micro-batch than they need",
}
# Order of a layer's parameters in the backward pass; "experts" stands for an expert of any number.
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
    """Return the lines ``cause: explanation (figures)``, the likeliest of ``CAUSES`` first; later ones often
    follow from it. ``replay``: the case replays routes. ``sums``: the loss's ``COLLECTIVES``."""
    causes = _causes(outcome, want, errors, limit, layout, replay, sums)
    return [f"{cause}: {CAUSES[cause]} ({figures})" for cause, figures in causes]


def _causes(
    outcome: Outcome, want: Reference, errors: Errors, limit: float, layout: Layout, replay: bool, sums: int
) -> Iterator[tuple[str, str]]:
    tokens = sum(len(row) for row in want.log_probs)
    if (outcome.seen != 1).any():
        yield "sequences", _indices(outcome.seen != 1)
    if outcome.tokens != tokens:
        yield "tokens", f"{outcome.tokens} tokens are in the loss; the responses have {tokens}"
    if errors.log_prob > limit:
        wanted = torch.nn.utils.rnn.pad_sequence([*want.log_probs], batch_first=True)
        right = (outcome.log_probs - wanted).abs().amax(1) <= limit  # False for NaN
        # One prompt and one response token attend to one token: faults of attention leave them right.
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
    # TP: all-gather of statistics, broadcast of upstream gradients, reduction of hidden-state gradients, and
    # with sequence parallelism a gather of hidden states. CP: sums for S, broadcast of one rank's decisions.
    tensor, context = layout.parallel.tensor > 1, layout.parallel.context > 1
    for group, most in (("tp", tensor * (3 + layout.parallel.sequence)), ("cp", context * sums)):
        if outcome.collectives[group] > most:
            yield "collectives", f"{outcome.collectives[group]:.4g} over {group}, but {most} suffice"


def _sum_cause(got: Tensor, want: Reference, limit: float) -> str:
    if not got.isfinite().all():
        return "mask"
    sums, lengths = want.log_ratio_sums, torch.tensor([max(1, len(row)) for row in want.log_probs])
    for cause, values in (("sum-factor", sums), ("sum-mean", sums / lengths)):
        factor = (got @ values / (values @ values)).item()  # least squares
        multiple = (got - factor * values).abs().max() < limit * max(1.0, abs(factor))
        if multiple and (cause == "sum-mean" or abs(factor - 1) > 0.01):  # rounding has a factor of about 1
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
    """Return the cause in the backward pass of the model, which is wrong if only some parameters are."""
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
    return cause, f"first in the backward pass: {first}; "


def _backward_order(name: str) -> tuple[int, int, int]:
    """Sort key: the order of parameters in the backward pass."""
    if name.startswith("model.layers."):
        name = plain_name(name)
        layer, module = name.removeprefix("model.layers.").rpartition(".")[0].split(".", 1)
        name = re.sub(r"[.]\d+[.]", ".", module)
        return 2, -int(layer), (*_LAYER_BACKWARD, name).index(name)
    return {"lm_head.weight": 0, "model.norm.weight": 1, "model.embed_tokens.weight": 3}.get(name, 0), 0, 0


def _indices(flags: Tensor) -> str:
    indices = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
