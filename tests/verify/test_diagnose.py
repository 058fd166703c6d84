"""From errors to words: each cause by its own line, the likeliest first, and silence within the limits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from verify_records import ERRORS, NAMES, OUTCOME, RIGHT, SUMS, WANT, with_gradients

from megatron_fspo.verify.compare import LIMITS, Errors, GradientError
from megatron_fspo.verify.diagnose import problems
from megatron_fspo.verify.layouts import Layout, parse_layout
from megatron_fspo.verify.production import Outcome
from megatron_fspo.verify.reference import Reference

SHARP, LOOSE = LIMITS[torch.float64], LIMITS[torch.float32]


def layout(name: str) -> Layout:
    return parse_layout(name, world_size=8)


def diagnose(
    outcome: Outcome = OUTCOME,
    errors: Errors = ERRORS,
    *,
    want: Reference = WANT,
    on: str = "dp8",
    limits: Any = SHARP,
) -> list[str]:
    return problems(outcome, want, errors, limits, layout(on))


def only(found: list[str]) -> str:
    (line,) = found
    assert "\n" not in line
    return line


def test_nothing_wrong_nothing_said() -> None:
    assert diagnose() == []
    assert diagnose(on="tp2.sp.cp2.dp2") == []


def test_errors_at_the_limit_pass_and_errors_above_it_do_not() -> None:
    for limits in LIMITS.values():
        at = {"log_prob": limits.value, "log_ratio_sum": limits.value, "loss": limits.value}
        gradient = replace(RIGHT, error=limits.gradient)
        passing = with_gradients(dict.fromkeys(NAMES, gradient), **at, grad_norm=limits.gradient)
        assert diagnose(errors=passing, limits=limits) == []
        for key in ("log_prob", "log_ratio_sum", "grad_norm"):
            assert len(diagnose(errors=replace(passing, **{key: limits.value * 1.01}), limits=limits)) == 1
        worse = with_gradients({NAMES[3]: replace(RIGHT, error=limits.gradient * 1.01)})
        assert len(diagnose(errors=worse, limits=limits)) == 1


def test_limits_are_those_of_the_promise() -> None:
    assert LIMITS[torch.float32].gradient == LIMITS[torch.float32].value == 1e-5
    assert LIMITS[torch.float64].gradient == LIMITS[torch.float64].value == 1e-10


# Which tokens and sequences.


def test_counts() -> None:
    line = only(diagnose(replace(OUTCOME, tokens=7)))
    assert line.startswith("7 tokens are in the loss, the responses have 5: prompt tokens or padding count")
    for seen in ([1, 0, 1], [1, 2, 1]):
        line = only(diagnose(replace(OUTCOME, seen=torch.tensor(seen))))
        assert line.startswith("sequences 1 were seen by no or several data-parallel ranks")


def test_a_sequence_that_is_lost_or_doubled_comes_before_its_tokens() -> None:
    both = diagnose(replace(OUTCOME, tokens=6, seen=torch.tensor([1, 1, 2])))
    assert ["were seen" in line for line in both] == [True, False]


def test_many_sequences_are_not_all_listed() -> None:
    want = replace(
        WANT,
        log_probs=[row for row in WANT.log_probs for _ in range(4)],
        clipped=torch.zeros(12),
        out_of_band=torch.zeros(12, dtype=torch.bool),
    )
    outcome = replace(
        OUTCOME, tokens=20, seen=torch.ones(12), clipped=torch.ones(12), out_of_band=want.out_of_band
    )
    assert "sequences 0, 1, 2, 3, 4, 5, 6, 7, …:" in only(diagnose(outcome, want=want))
    eight = replace(outcome, clipped=torch.tensor([1.0] * 8 + [0.0] * 4))
    assert "sequences 0, 1, 2, 3, 4, 5, 6, 7:" in only(diagnose(eight, want=want))


# Log-probs.


def shifted(*places: tuple[int, int], by: float = 0.5) -> Outcome:
    log_probs = OUTCOME.log_probs.clone()
    for place in places:
        log_probs[place] += by
    return replace(OUTCOME, log_probs=log_probs)


def test_log_probs_that_are_off_everywhere_are_the_heads() -> None:
    errors = replace(ERRORS, log_prob=0.5)
    line = only(diagnose(shifted((0, 1), (2, 0)), errors))
    assert line.startswith("log-probs are off by 5.0e-01 on 2 of 2 responses: labels that are not the next")
    assert "temperature" in line and "tensor-parallel" not in line
    line = only(diagnose(shifted((0, 1), (2, 0)), errors, on="tp2"))
    assert "padded vocabulary rows in the softmax or those of other tensor-parallel ranks" in line


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf])
def test_log_probs_that_are_off_somewhere_are_not(value: float) -> None:
    errors = replace(ERRORS, log_prob=math.inf if value != 0.5 else 0.5)
    line = only(diagnose(shifted((0, 3), by=value), errors))
    assert " on 1 of 2 responses: attention that takes tokens for others" in line
    assert "context-parallel" not in line and "weights that differ between ranks" in line
    assert "chunks than those of its context-parallel rank" in diagnose(shifted((0, 3)), errors, on="cp2")[0]


# S.


def of_sums(sums: torch.Tensor, on: str = "cp2", *, want: Reference = WANT, limits: Any = SHARP) -> str:
    gap = (sums - want.log_ratio_sums).abs().max().item()
    errors = replace(ERRORS, log_ratio_sum=gap if math.isfinite(gap) else math.inf)
    return only(diagnose(replace(OUTCOME, log_ratio_sums=sums), errors, want=want, on=on, limits=limits))


def test_a_little_off_is_rounding_and_not_a_multiple() -> None:
    limit = SHARP.value
    assert "is little: log-ratios in bf16" in of_sums(SUMS * (1 + 1.5 * limit / SUMS.abs().max().item()))


def test_sums() -> None:
    lengths = torch.tensor([4, 1, 1])
    assert "S is 2 x its value on every sequence, as by one reduction too many over 2" in of_sums(2 * SUMS)
    assert of_sums(4 * SUMS, "cp4").startswith("S is 4 x ")
    assert of_sums(SUMS / lengths) == "S is divided by the length of the response: a mean in place of the sum"
    some = torch.tensor([0.25, 0, -0.125], dtype=torch.float64)
    assert "2.5e-01: it lacks tokens of other context-parallel ranks" in of_sums(some)
    assert "2.5e-01: the sum is over other tokens than the response's" in of_sums(some, "dp8")
    for value in (math.nan, math.inf):
        broken = torch.tensor([0.5, value, -0.125], dtype=torch.float64)
        line = of_sums(broken)
        assert line.startswith("S is not finite on sequences 1: ") and "torch.where does" in line


def test_a_small_error_of_s_is_one_of_precision() -> None:
    """Below a hundredth of the largest S. A lost token is more than that."""
    near = SUMS + torch.tensor([0.0, 0.0, 0.0049])
    assert of_sums(near, "dp8").startswith("S is off by 4.9e-03, which is little: log-ratios in bf16")
    assert "which is little" in of_sums(near)
    assert "which is little" not in of_sums(SUMS + torch.tensor([0.0, 0.0, 0.0051]))


def test_a_factor_is_one_within_the_limits() -> None:
    noise = torch.tensor([1e-6, 0, -1e-6], dtype=torch.float64)
    assert of_sums(2 * SUMS + noise, limits=LOOSE).startswith("S is 2 x ")
    assert not of_sums(2 * SUMS + noise, limits=SHARP).startswith("S is 2 x ")


# Clips and means.


def test_clip_decisions() -> None:
    line = only(diagnose(replace(OUTCOME, clipped=torch.tensor([0.0, 0.0, 0.75]))))
    assert line.startswith("clip decisions differ on sequences 2: the band (its width, drift or dual clip)")
    line = only(diagnose(replace(OUTCOME, out_of_band=torch.tensor([True, False, True]))))
    assert "on sequences 0:" in line
    assert diagnose(replace(OUTCOME, clipped=torch.tensor([0.0, 0.0, 1 - 1e-7]))) == []


@pytest.mark.parametrize(
    ("key", "name"), [("actor/pg_loss", "loss"), ("actor/entropy", "entropy"), ("actor/kl_loss", "KL")]
)
def test_the_mean_that_is_off_is_named(key: str, name: str) -> None:
    metrics = OUTCOME.metrics | {key: OUTCOME.metrics[key] + 0.25}
    line = only(diagnose(replace(OUTCOME, metrics=metrics), replace(ERRORS, loss=0.25)))
    assert line.startswith(f"reported {name} is off by 2.5e-01: a mean with another denominator")
    metrics = OUTCOME.metrics | {key: math.nan}
    line = only(diagnose(replace(OUTCOME, metrics=metrics), replace(ERRORS, loss=math.inf)))
    assert line == f"reported {name} is not finite: a value outside the mask (NaN here) got in"


# Gradients.


def wrong(error: float = 1.0, **changes: float) -> GradientError:
    return replace(GradientError(error=error, factor=0.7, unlike=0.3, copies=0.0), **changes)


def everywhere(error: GradientError, **changes: Any) -> Errors:
    return with_gradients(dict.fromkeys(NAMES, error), **changes)


def test_one_factor_on_every_gradient() -> None:
    line = only(diagnose(errors=everywhere(wrong(factor=2.0, unlike=0.0))))
    assert line.startswith("every gradient is 2 x the reference: a normaliser or the number of ranks")
    tiny = everywhere(wrong(factor=1 - 7.25e-8, unlike=1e-16))
    assert "is 0.9999999275 x" in only(diagnose(errors=tiny))
    noisy = {name: wrong(factor=2 + number * 1e-6, unlike=1e-8) for number, name in enumerate(NAMES)}
    assert "is 2 x" in only(diagnose(errors=with_gradients(noisy), limits=LOOSE))
    assert "differ in direction" in only(diagnose(errors=with_gradients(noisy), limits=SHARP))
    assert "is -1 x" in only(diagnose(errors=everywhere(wrong(factor=-1.0, unlike=0.0))))
    assert "differ in direction" in only(diagnose(errors=everywhere(wrong(factor=2.0, unlike=1e-5))))
    turned = {**dict.fromkeys(NAMES, wrong(factor=2.0, unlike=0.0)), NAMES[4]: wrong(factor=2.0)}
    assert "differ in direction" in only(diagnose(errors=with_gradients(turned)))
    assert "is 0 x" in only(diagnose(errors=everywhere(wrong(factor=0.0, unlike=0.0))))


def test_the_worst_parameter_is_named_with_its_error() -> None:
    errors = with_gradients({**dict.fromkeys(NAMES, wrong()), "model.norm.weight": wrong(3.0)})
    assert only(diagnose(errors=errors)).endswith("(largest: model.norm.weight, relative error 3.0e+00)")


def test_gradients_of_another_direction() -> None:
    line = only(diagnose(errors=everywhere(wrong())))
    assert line.startswith("gradients differ in direction: sequences or tokens do not weigh the same (N or T")
    assert "the gradient of a micro-batch is lost" in line
    for extra in (-0.8, -0.7):  # an entropy bonus, a KL penalty
        line = only(diagnose(errors=everywhere(wrong()), want=replace(WANT, loss=extra)))
        assert line.startswith(
            "gradients differ in direction: the entropy bonus or the KL penalty has another"
        )


def test_gradients_that_ranks_do_not_share() -> None:
    line = only(diagnose(errors=everywhere(wrong(copies=1e-9))))
    assert "they are not summed over data and context parallel ranks" in line
    some = {**dict.fromkeys(NAMES, wrong(copies=0.5)), NAMES[4]: wrong()}  # by chance
    assert "they are not summed over data" in only(diagnose(errors=with_gradients(some)))
    assert "differ in direction" in only(diagnose(errors=everywhere(wrong(copies=1e-9)), limits=LOOSE))


def test_gradients_that_are_not_finite() -> None:
    broken = wrong(math.inf, factor=math.nan, unlike=math.nan, copies=math.nan)
    assert only(diagnose(errors=everywhere(broken))).startswith("gradients are not finite (largest: ")
    assert "not finite" in only(diagnose(errors=with_gradients({"model.norm.weight": broken})))


def test_a_gradient_where_there_must_be_none() -> None:
    """All clipped: the reference is 0, and any error is infinite."""
    want = replace(WANT, grad_norm=0.0)
    errors = everywhere(wrong(math.inf, factor=math.nan, unlike=0.0))
    assert only(diagnose(errors=errors, want=want)).startswith(
        "every sequence is clipped, so gradients must be 0"
    )


# Only some parameters are wrong: the model's way back.

ATTENTION_1 = [f"model.layers.1.self_attn.{part}.weight" for part in ("k_norm", "q_norm", "q_proj", "o_proj")]
LAYER_0 = [name for name in NAMES if name.startswith("model.layers.0.")]
EMBEDDING = "model.embed_tokens.weight"
COPY = f"{EMBEDDING} (the copy on the last stage)"


def some(*names: str, on: str = "tp2.cp2", tied: bool = False) -> str:
    return only(diagnose(errors=with_gradients(dict.fromkeys(names, wrong()), tied=tied), on=on))


def test_parameters_that_differ_are_counted_and_the_first_of_backward_is_named() -> None:
    line = some(*LAYER_0, EMBEDDING, "model.layers.1.input_layernorm.weight", on="dp8")
    assert line.startswith(
        "gradients of 10 of 19 parameters differ: on the way back from the loss the first is "
    )
    assert "the first is model.layers.1.input_layernorm.weight (largest:" in line
    upstream = ["model.layers.1.mlp.gate_proj.weight", *ATTENTION_1, *LAYER_0]
    assert "the first is model.layers.1.mlp.gate_proj.weight (" in some(*upstream)
    assert "the first is lm_head.weight (" in some("lm_head.weight", *LAYER_0)
    assert "the first is model.norm.weight (" in some("model.norm.weight", *LAYER_0)
    assert f"the first is {EMBEDDING} (" in some(EMBEDDING)
    assert f"the first is {COPY} (" in some(COPY, EMBEDDING, "model.norm.weight", tied=True, on="pp2")


@pytest.mark.parametrize(
    "order",
    [
        *(["mlp.down_proj", "mlp.gate_proj", "post_attention_layernorm", "self_attn.o_proj"],),
        *(["self_attn.o_proj", "self_attn.q_norm"], ["self_attn.q_proj", "input_layernorm"]),
    ],
)
def test_the_order_within_a_layer(order: list[str]) -> None:
    names = [f"model.layers.1.{part}.weight" for part in order]
    for number in range(len(names)):
        assert f"the first is {names[number]}" in some(*reversed(names[number:]), on="pp2")


def test_a_tied_embedding() -> None:
    line = some(EMBEDDING, tied=True)
    assert line.startswith("gradients of 1 of 18 parameters differ: the tied embedding, whose two gradients")
    assert "the tied embedding" in some(EMBEDDING, COPY, tied=True, on="pp2")
    assert "the tied embedding" in some(COPY, tied=True, on="pp2")
    assert "the tied embedding" not in some(EMBEDDING)
    assert "the tied embedding" not in some(EMBEDDING, *LAYER_0, tied=True)


def test_norms_under_tensor_parallel() -> None:
    norms = [name for name in NAMES if "norm" in name]
    assert len(norms) == 9
    assert "norms, of whose gradients each tensor-parallel rank has a part, are not summed" in some(*norms)
    assert "norms, of whose" in some("model.norm.weight", on="tp2.sp")
    assert "norms, of whose" not in some(*norms, on="cp2")
    assert "norms, of whose" not in some(*norms, "lm_head.weight")


def test_the_gradient_that_the_head_hands_on() -> None:
    all_but_the_head = [name for name in NAMES if name != "lm_head.weight"]
    assert "the head's gradient of hidden states" in some(*all_but_the_head)
    assert "the head's gradient" not in some(*all_but_the_head[1:])
    assert "the head's gradient" not in some(*[name for name in NAMES if name != "model.norm.weight"])


def test_keys_and_values_under_context_parallel() -> None:
    upstream = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight", *LAYER_0]
    for names in (upstream, [*upstream, "model.layers.1.self_attn.k_norm.weight"]):
        assert "gradients of keys and values, which context-parallel ranks must sum" in some(*names)
        assert "keys and values" not in some(*names, on="tp2")
        assert "keys and values" not in some(*names, "model.layers.1.self_attn.q_norm.weight")


# The norm, the collectives, the order.


def test_a_norm_that_is_off_alone() -> None:
    line = only(diagnose(errors=replace(ERRORS, grad_norm=0.125)))
    assert line.startswith("the gradient norm is off by 1.2e-01, relative") and "count twice" in line


@pytest.mark.parametrize(
    ("on", "tensor", "context"),
    [("dp8", 0, 0), ("tp2", 3, 0), ("tp2.sp", 4, 0), ("cp2", 0, 2), ("tp2.cp2", 3, 2)],
)
def test_collectives(on: str, tensor: int, context: int) -> None:
    right = {"tp": float(tensor), "cp": float(context)}
    assert diagnose(replace(OUTCOME, collectives=right), on=on) == []
    for group, name, limit in (("tp", "tensor", tensor), ("cp", "context", context)):
        counts = right | {group: right[group] + 0.25}
        line = only(diagnose(replace(OUTCOME, collectives=counts), on=on))
        want = (
            f"{limit + 0.25:.4g} {name}-parallel collectives per micro-batch in head and loss, where {limit}"
        )
        assert line.startswith(want)


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
    starts = [
        *(
            "sequences 1 were",
            "9 tokens",
            "log-probs",
            "S is",
            "clip decisions",
            "reported loss",
            "reported ent",
        ),
        *("reported KL", "gradients differ", "the gradient norm", "5 tensor-parallel", "5 context-parallel"),
    ]
    found = diagnose(outcome, errors)
    assert len(found) == len(starts)
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True))
