"""From errors to words: what is wrong, the likeliest cause first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megatron_fspo.verify.compare import Errors, GradientError, Limits, reported
from megatron_fspo.verify.layouts import Layout
from megatron_fspo.verify.production import Outcome
from megatron_fspo.verify.reference import Reference

# One all-gather of statistics, one broadcast of upstream gradients and one reduction of d hidden; sequence
# parallel gathers hidden as well. The sums that make S, and one rank's decisions on all.
TP_COLLECTIVES, TP_COLLECTIVES_SP, CP_COLLECTIVES = 3, 4, 2
# Backward comes to a layer's parameters in this order.
_LAYER_BACKWARD = (
    *("mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm"),
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.q_proj", "input_layernorm"),
)


def problems(outcome: Outcome, want: Reference, errors: Errors, limits: Limits, layout: Layout) -> list[str]:
    """Empty when everything is within the limits. What comes later is often a consequence of the first."""
    return [
        *_counts(outcome, want),
        *_log_probs(outcome, want, errors, limits, layout),
        *_sums(outcome, want, errors, limits, layout),
        *_clips(outcome, want),
        *_means(outcome, want, errors, limits),
        *_gradients(want, errors, limits, layout),
        *_norm(errors, limits),
        *_collectives(outcome, layout),
    ]


def _counts(outcome: Outcome, want: Reference) -> Iterator[str]:
    if (outcome.seen != 1).any():
        yield (
            f"sequences {_where(outcome.seen != 1)} were seen by no or several data-parallel ranks: "
            "micro-batches or sequences are lost or counted twice"
        )
    tokens = sum(len(row) for row in want.log_probs)
    if outcome.tokens != tokens:
        yield (
            f"{outcome.tokens} tokens are in the loss, the responses have {tokens}: "
            "prompt tokens or padding count, or tokens are lost"
        )


def _log_probs(
    outcome: Outcome, want: Reference, errors: Errors, limits: Limits, layout: Layout
) -> Iterator[str]:
    if errors.log_prob <= limits.value:
        return
    parallel = layout.parallel
    present = torch.tensor([len(row) > 0 for row in want.log_probs])
    wanted = torch.nn.utils.rnn.pad_sequence([*want.log_probs], batch_first=True)
    wrong = ~((outcome.log_probs - wanted).abs().amax(1) <= limits.value)  # NaN is wrong too
    # A first token sees none but itself: whatever attention does to the others, its hidden state is right.
    if bool(wrong[present].all()):
        softmax = ", padded vocabulary rows in the softmax or those of other tensor-parallel ranks not in it"
        cause = (
            "labels that are not the next token, another temperature"
            f"{softmax if parallel.tensor > 1 else ''}, attention to later tokens, or other weights"
        )
    else:
        chunks = ", other chunks than those of its context-parallel rank" if parallel.context > 1 else ""
        cause = (
            "attention that takes tokens for others than they are (wrong RoPE positions or borders of packed "
            f"sequences{chunks}), or weights that differ between ranks"
        )
    responses = f"{int(wrong.sum())} of {int(present.sum())} responses"
    yield f"log-probs are off by {errors.log_prob:.1e} on {responses}: {cause}"


def _sums(outcome: Outcome, want: Reference, errors: Errors, limits: Limits, layout: Layout) -> Iterator[str]:
    if errors.log_ratio_sum <= limits.value:
        return
    got, sums = outcome.log_ratio_sums, want.log_ratio_sums
    if not got.isfinite().all():
        yield (
            f"S is not finite on sequences {_where(~got.isfinite())}: a value outside the mask (NaN here) "
            "got in; multiplying by 0 does not remove it, torch.where does"
        )
        return
    lengths = torch.tensor([max(1, len(row)) for row in want.log_probs])
    context = layout.parallel.context
    # Rounding is a multiple, too, if only of about 1.
    if abs(_factor(got, sums) - 1) > 0.01 and _multiple(got, sums, limits):
        yield (
            f"S is {_factor(got, sums):.4g} x its value on every sequence, "
            f"as by one reduction too many over {context} context-parallel ranks"
        )
    elif _multiple(got, sums / lengths, limits):
        yield "S is divided by the length of the response: a mean in place of the sum"
    elif errors.log_ratio_sum < 0.01 * sums.abs().max():
        yield (
            f"S is off by {errors.log_ratio_sum:.1e}, which is little: log-ratios in bf16, "
            "or log-probs that were summed before they were subtracted"
        )
    elif context > 1:
        yield f"S is off by {errors.log_ratio_sum:.1e}: it lacks tokens of other context-parallel ranks"
    else:
        yield f"S is off by {errors.log_ratio_sum:.1e}: the sum is over other tokens than the response's"


def _clips(outcome: Outcome, want: Reference) -> Iterator[str]:
    wrong = ((outcome.clipped - want.clipped).abs() > 1e-6) | (outcome.out_of_band != want.out_of_band)
    if wrong.any():
        yield (
            f"clip decisions differ on sequences {_where(wrong)}: the band (its width, drift or dual clip), "
            "what it is compared with (S, for `ctpo` that of each prefix), or the advantages"
        )


def _means(outcome: Outcome, want: Reference, errors: Errors, limits: Limits) -> Iterator[str]:
    if errors.loss <= limits.value:
        return
    for key, (name, value) in reported(want).items():
        gap = abs(outcome.metrics[key] - value)
        if not math.isfinite(gap):
            yield f"reported {name} is not finite: a value outside the mask (NaN here) got in"
        elif gap > limits.value:
            yield (
                f"reported {name} is off by {gap:.1e}: a mean with another denominator, such as the count of "
                "a micro-batch or a rank, or over other values"
            )


def _gradients(want: Reference, errors: Errors, limits: Limits, layout: Layout) -> Iterator[str]:
    wrong = {name: error for name, error in errors.gradients.items() if error.error > limits.gradient}
    if not wrong:
        return
    worst = f"largest: {errors.worst_parameter}, relative error {errors.gradient:.1e}"
    factors = [error.factor for error in wrong.values()]
    if want.grad_norm == 0:
        yield f"every sequence is clipped, so gradients must be 0, and are not ({worst})"
    elif math.isinf(errors.gradient):
        yield f"gradients are not finite ({worst})"
    elif len(wrong) < len(errors.gradients):
        yield (
            f"gradients of {len(wrong)} of {len(errors.gradients)} parameters differ: "
            f"{_model_cause(wrong, errors, layout)} ({worst})"
        )
    elif max(error.copies for error in wrong.values()) > limits.gradient:
        yield (
            "gradients of a parameter differ between ranks that hold the same of it: they are not summed "
            f"over data and context parallel ranks ({worst})"
        )
    elif max(error.unlike for error in wrong.values()) < 1e-6 and (
        max(factors) - min(factors) <= limits.gradient * abs(max(factors))
    ):
        digits = 1 - round(math.log10(limits.gradient))
        yield (
            f"every gradient is {factors[0]:.{digits}g} x the reference: a normaliser or the number of ranks "
            f"or micro-batches enters as a factor ({worst})"
        )
    else:
        # Whether the loss has more than the policy gradient.
        more = "the entropy bonus or the KL penalty has another sign or normaliser, "
        yield (
            f"gradients differ in direction: {more if want.loss != -want.objective else ''}sequences or "
            "tokens do not weigh the same (N or T of a micro-batch or a rank, a clipped sequence that keeps "
            f"its gradient), or the gradient of a micro-batch is lost ({worst})"
        )


def _model_cause(wrong: Mapping[str, GradientError], errors: Errors, layout: Layout) -> str:
    """Why only some parameters are wrong: the loss is right, the way back through the model is not."""
    first = min(wrong, key=_backward_order)
    where = f"on the way back from the loss the first is {first}"
    if "lm_head.weight" not in errors.gradients and all("embed_tokens" in name for name in wrong):
        return (
            "the tied embedding, whose two gradients, as embedding and as head, are not added up, "
            "in main_grad or between the first and the last pipeline stage"
        )
    if layout.parallel.tensor > 1 and all(name.endswith("norm.weight") for name in wrong):
        return "norms, of whose gradients each tensor-parallel rank has a part, are not summed over the ranks"
    if first == "model.norm.weight" and len(wrong) == len(errors.gradients) - 1:
        return f"{where}: the head's gradient of hidden states, which tensor-parallel ranks must sum"
    if layout.parallel.context > 1 and first.endswith(("k_norm.weight", "q_proj.weight")):
        return f"{where}: gradients of keys and values, which context-parallel ranks must sum"
    return where


def _norm(errors: Errors, limits: Limits) -> Iterator[str]:
    if errors.grad_norm > limits.gradient:
        yield (
            f"the gradient norm is off by {errors.grad_norm:.1e}, relative: where gradients are right, "
            "copies of a parameter count twice or parts of it are left out"
        )


def _collectives(outcome: Outcome, layout: Layout) -> Iterator[str]:
    parallel = layout.parallel
    tensor = TP_COLLECTIVES_SP if parallel.sequence else TP_COLLECTIVES
    limits = {
        "tp": ("tensor", tensor if parallel.tensor > 1 else 0),
        "cp": ("context", CP_COLLECTIVES if parallel.context > 1 else 0),
    }
    for group, (name, limit) in limits.items():
        if outcome.collectives[group] > limit:
            yield (
                f"{outcome.collectives[group]:.4g} {name}-parallel collectives per micro-batch in head and "
                f"loss, where {limit} would do"
            )


def _multiple(got: Tensor, values: Tensor, limits: Limits) -> bool:
    factor = _factor(got, values)
    return bool((got - factor * values).abs().max() < limits.value * max(1.0, abs(factor)))


def _factor(got: Tensor, values: Tensor) -> float:
    """Least squares."""
    return (got @ values / (values @ values)).item()


def _backward_order(name: str) -> tuple[int, int, int]:
    """Sorts parameters as backward comes to them."""
    if name.startswith("model.layers."):
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        return 2, -int(layer), _LAYER_BACKWARD.index(part)
    return {"lm_head.weight": 0, "model.norm.weight": 1, "model.embed_tokens.weight": 3}.get(name, 0), 0, 0


def _where(flags: Tensor) -> str:
    indices = flags.nonzero().flatten().tolist()
    return ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
