"""The likeliest cause of each kind of error comes first, and within the limits there is none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from verify_records import ERRORS, NAMES, OUTCOME, RIGHT, SUMS, WANT, with_gradients

from megatron_fspo.verify import compare
from megatron_fspo.verify.compare import LIMITS, Errors, GradientError
from megatron_fspo.verify.layouts import parse_layout
from megatron_fspo.verify.production import Outcome
from megatron_fspo.verify.reference import Reference

SHARP, LOOSE = LIMITS[torch.float64], LIMITS[torch.float32]


def diagnose(
    outcome: Outcome = OUTCOME,
    errors: Errors = ERRORS,
    *,
    want: Reference = WANT,
    on: str = "dp8",
    limit: float = SHARP,
) -> list[str]:
    return compare.diagnose(outcome, want, errors, limit, parse_layout(on, world_size=8))


def only(*arguments: Any, **more: Any) -> tuple[str, str]:
    """The one cause, and its figures."""
    (line,) = diagnose(*arguments, **more)
    name, _, rest = line.partition(": ")
    return name, rest.removeprefix(f"{compare.CAUSES[name]} ")


def cause(*arguments: Any, **more: Any) -> str:
    return only(*arguments, **more)[0]


def test_errors_at_the_limit_pass_and_errors_above_it_do_not() -> None:
    assert diagnose() == [] and diagnose(on="tp2.sp.cp2.dp2") == []
    assert (LOOSE, SHARP) == (1e-5, 1e-10)
    for limit in (SHARP, LOOSE):
        at = dict.fromkeys(("log_prob", "log_ratio_sum", "loss", "grad_norm"), limit)
        passing = with_gradients(dict.fromkeys(NAMES, replace(RIGHT, error=limit)), **at)
        assert diagnose(errors=passing, limit=limit) == []
        for key in ("log_prob", "log_ratio_sum", "grad_norm"):
            assert len(diagnose(errors=replace(passing, **{key: limit * 1.01}), limit=limit)) == 1
        worse = with_gradients({NAMES[3]: replace(RIGHT, error=limit * 1.01)})
        assert len(diagnose(errors=worse, limit=limit)) == 1


def test_counts_of_sequences_and_tokens() -> None:
    assert only(replace(OUTCOME, tokens=7)) == ("tokens", "(7 tokens are in the loss; the responses have 5)")
    for seen, figures in (([1, 0, 1], "(1)"), ([1, 2, 1], "(1)"), ([0, 1, 2], "(0, 2)")):
        assert only(replace(OUTCOME, seen=torch.tensor(seen))) == ("sequences", figures)


def shifted(*places: tuple[int, int], by: float = 0.5) -> Outcome:
    log_probs = OUTCOME.log_probs.clone()
    for place in places:
        log_probs[place] += by
    return replace(OUTCOME, log_probs=log_probs)


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_log_probs_that_are_off_everywhere_or_somewhere(value: float) -> None:
    """Sequence 1 has none."""
    errors = replace(ERRORS, log_prob=value if value == 0.5 else math.inf)
    assert cause(shifted((0, 1), (2, 0), by=value), errors) == "head"
    assert cause(shifted((0, 3), by=value), errors) == "attention"


def cause_of_sums(sums: Tensor, limit: float = SHARP) -> str:
    gap = (sums - SUMS).abs().max().item()
    errors = replace(ERRORS, log_ratio_sum=gap if math.isfinite(gap) else math.inf)
    return cause(replace(OUTCOME, log_ratio_sums=sums), errors, on="cp2", limit=limit)


def test_sums() -> None:
    assert cause_of_sums(2 * SUMS) == cause_of_sums(4 * SUMS) == "sum-factor"
    assert cause_of_sums(SUMS / torch.tensor([4, 1, 1])) == "sum-mean"
    assert cause_of_sums(torch.tensor([0.25, 0, -0.125], dtype=torch.float64)) == "sum-tokens"
    for value in (math.nan, math.inf):
        assert cause_of_sums(torch.tensor([0.5, value, -0.125], dtype=torch.float64)) == "mask"
    # Below a hundredth of the largest S it is rounding, which is no multiple. A lost token is more than that.
    assert cause_of_sums(SUMS + torch.tensor([0.0, 0.0, 0.0049])) == "sum-rounding"
    assert cause_of_sums(SUMS + torch.tensor([0.0, 0.0, 0.0051])) == "sum-tokens"
    assert cause_of_sums(SUMS * (1 + 1.5 * SHARP / SUMS.abs().max().item())) == "sum-rounding"
    # A factor is one within the limits.
    noise = torch.tensor([1e-6, 0, -1e-6], dtype=torch.float64)
    assert cause_of_sums(2 * SUMS + noise, LOOSE) == "sum-factor" != cause_of_sums(2 * SUMS + noise, SHARP)


def test_clip_decisions() -> None:
    clipped, band = torch.tensor([0.0, 0.0, 0.75]), torch.tensor([True, False, True])
    assert only(replace(OUTCOME, clipped=clipped)) == ("clip", "(sequences 2)")
    assert only(replace(OUTCOME, out_of_band=band)) == ("clip", "(sequences 0)")
    assert diagnose(replace(OUTCOME, clipped=torch.tensor([0.0, 0.0, 1 - 1e-7]))) == []


@pytest.mark.parametrize("key", ["actor/pg_loss", "actor/entropy", "actor/kl_loss"])
def test_the_mean_that_is_off_is_named(key: str) -> None:
    for gap, wanted in ((0.25, "denominator"), (math.nan, "mask")):
        metrics = OUTCOME.metrics | {key: OUTCOME.metrics[key] + gap}
        name, figures = only(replace(OUTCOME, metrics=metrics), replace(ERRORS, loss=abs(gap)))
        assert name == wanted and key in figures


# Gradients.


def wrong(error: float = 1.0, **changes: float) -> GradientError:
    return replace(GradientError(error=error, factor=0.7, unlike=0.3, copies=0.0), **changes)


def everywhere(error: GradientError, **changes: Any) -> Errors:
    return with_gradients(dict.fromkeys(NAMES, error), **changes)


@pytest.mark.parametrize(
    ("factor", "figures"), [(2.0, "2 x"), (1 - 7.25e-8, "0.9999999275 x"), (-1.0, "-1 x"), (0.0, "0 x")]
)
def test_one_factor_on_every_gradient(factor: float, figures: str) -> None:
    errors = with_gradients(dict.fromkeys(NAMES, wrong(factor=factor, unlike=1e-16)))
    errors.gradients["model.norm.weight"] = wrong(3.0, factor=factor, unlike=0.0)
    name, line = only(errors=errors)
    assert name == "factor" and line.startswith(f"({figures} ") and "model.norm.weight" in line


BROKEN = wrong(math.inf, factor=math.nan, unlike=math.nan, copies=math.nan)
NOISY = with_gradients({n: wrong(factor=2 + i * 1e-6, unlike=1e-8) for i, n in enumerate(NAMES)})
TURNED = {**dict.fromkeys(NAMES, wrong(factor=2.0, unlike=0.0)), NAMES[4]: wrong(factor=2.0)}
BY_CHANCE_ONE_COPY = {**dict.fromkeys(NAMES, wrong(copies=0.5)), NAMES[4]: wrong()}


@pytest.mark.parametrize(
    ("errors", "more", "wanted"),
    [
        (NOISY, {"limit": LOOSE}, "factor"),
        (NOISY, {}, "weighting"),
        (everywhere(wrong(factor=2.0, unlike=1e-5)), {}, "weighting"),
        (with_gradients(TURNED), {}, "weighting"),
        (everywhere(wrong()), {"want": replace(WANT, loss=-0.8)}, "regularizer"),  # an entropy bonus
        (everywhere(wrong()), {"want": replace(WANT, loss=-0.7)}, "regularizer"),  # a KL penalty
        (everywhere(wrong(copies=1e-9)), {}, "not-reduced"),
        (everywhere(wrong(copies=1e-9)), {"limit": LOOSE}, "weighting"),
        (with_gradients(BY_CHANCE_ONE_COPY), {}, "not-reduced"),
        (everywhere(BROKEN), {}, "infinite-gradient"),
        (with_gradients({"model.norm.weight": BROKEN}), {}, "infinite-gradient"),
        (everywhere(replace(BROKEN, unlike=0.0)), {"want": replace(WANT, grad_norm=0.0)}, "clipped-gradient"),
        (replace(ERRORS, grad_norm=0.125), {}, "grad-norm"),
    ],
)
def test_causes_of_gradients(errors: Errors, more: dict[str, Any], wanted: str) -> None:
    assert cause(errors=errors, **more) == wanted


# Only some parameters are wrong: the way back through the model.

LAYER_0 = [name for name in NAMES if name.startswith("model.layers.0.")]
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
COPY = f"{EMBEDDING} (the copy on the last stage)"
NORMS = [name for name in NAMES if "norm" in name]
ALL_BUT_THE_HEAD = [name for name in NAMES if name != "lm_head.weight"]


def some(*names: str, on: str = "tp2.cp2", tied: bool = False) -> tuple[str, str]:
    """Cause, and the first of the parameters as backward comes to them."""
    name, line = only(errors=with_gradients(dict.fromkeys(names, wrong()), tied=tied), on=on)
    return name, line.partition("first in the backward pass: ")[2].partition(";")[0]


def layer_1(*modules: str) -> list[str]:
    return [f"model.layers.1.{module}.weight" for module in modules]


def test_the_first_parameter_of_backward_is_named() -> None:
    bias = "model.layers.1.self_attn.q_proj.bias"  # of Qwen2's attention
    for first in (*layer_1("input_layernorm"), "lm_head.weight", NORM, bias):
        assert some(*LAYER_0, EMBEDDING, first, on="dp8") == ("backward", first)
    assert some(COPY, EMBEDDING, NORM, tied=True, on="pp2") == ("backward", COPY)
    order = layer_1(
        *("mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm", "self_attn.o_proj"),
        *("self_attn.q_norm", "self_attn.q_proj", "input_layernorm"),
    )
    for number, name in enumerate(order):
        assert some(*reversed(order[number:]), on="pp2") == ("backward", name)


@pytest.mark.parametrize(
    ("names", "on", "tied", "wanted"),
    [
        ([EMBEDDING], "tp2", True, "tied-embedding"),
        ([COPY], "pp2", True, "tied-embedding"),
        ([EMBEDDING], "tp2", False, "backward"),
        ([EMBEDDING, *LAYER_0], "tp2", True, "backward"),
        (NORMS, "tp2.cp2", False, "norms"),
        ([NORM], "tp2.sp", False, "norms"),
        (NORMS, "cp2", False, "backward"),
        (ALL_BUT_THE_HEAD, "tp2", False, "head-gradient"),
        (ALL_BUT_THE_HEAD[1:], "tp2", False, "backward"),
        ([*layer_1("self_attn.q_proj"), *LAYER_0], "tp2.cp2", False, "key-value-gradient"),
        ([*layer_1("self_attn.q_proj"), *LAYER_0], "tp2", False, "backward"),
        ([*layer_1("self_attn.q_proj", "self_attn.q_norm"), *LAYER_0], "cp2", False, "backward"),
    ],
)
def test_causes_in_the_model(names: list[str], on: str, tied: bool, wanted: str) -> None:
    assert some(*names, on=on, tied=tied)[0] == wanted


@pytest.mark.parametrize(
    ("on", "tensor", "context"),
    [("dp8", 0, 0), ("tp2", 3, 0), ("tp2.sp", 4, 0), ("cp2", 0, 2), ("tp2.cp2", 3, 2)],
)
def test_collectives(on: str, tensor: int, context: int) -> None:
    right = {"tp": float(tensor), "cp": float(context)}
    assert diagnose(replace(OUTCOME, collectives=right), on=on) == []
    for group, limit in (("tp", tensor), ("cp", context)):
        found = only(replace(OUTCOME, collectives=right | {group: limit + 0.25}), on=on)
        assert found == ("collectives", f"({limit + 0.25:.4g} over {group}, but {limit} suffice)")


def test_causes_come_before_consequences() -> None:
    outcome = replace(
        shifted((0, 0), (2, 0)),
        seen=torch.tensor([1, 2, 1]),
        tokens=9,
        log_ratio_sums=2 * SUMS,
        clipped=torch.ones(3),
        metrics=dict.fromkeys(OUTCOME.metrics, 7.0),
        collectives={"tp": 5.0, "cp": 5.0},
    )
    errors = everywhere(wrong(), log_prob=0.5, log_ratio_sum=0.5, loss=7.0, grad_norm=1.0)
    order = "sequences tokens head sum-factor clip denominator denominator denominator weighting grad-norm"
    causes = [line.partition(": ")[0] for line in diagnose(outcome, errors)]
    assert causes == [*order.split(), "collectives", "collectives"]
