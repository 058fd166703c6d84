"""Errors of an outcome against the reference: of one rank, and of several that hold parts and copies."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from verify_records import OUTCOME, WANT

from megatron_fspo.verify.cases import SMALL
from megatron_fspo.verify.compare import Errors, compare
from megatron_fspo.verify.production import Outcome, cut_shard
from megatron_fspo.verify.reference import Reference
from megatron_fspo.weights import Row, expected_hf_shapes, resolve

pytestmark = pytest.mark.usefixtures("one_rank")

NORM, QKV = "decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
HEAD = "output_layer.weight"


def policy(*, tp: int = 1, rank: int = 0) -> Any:
    """As much of one as is asked for."""
    group = SimpleNamespace(size=lambda: tp, rank=lambda: rank)
    return SimpleNamespace(arch=SMALL, groups=SimpleNamespace(tp=group), padded_vocab=61 + -61 % tp)


def reference(**gradients: Tensor) -> Reference:
    generator = torch.Generator().manual_seed(1)
    found = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in expected_hf_shapes(SMALL).items()
    }
    return replace(WANT, gradients=found | {name.replace("__", "."): g for name, g in gradients.items()})


def gradient(name: str, owner: Any, want: Reference) -> tuple[Row, Tensor]:
    """This rank's part of a parameter, right."""
    row = resolve(name, owner.arch)
    return row, cut_shard(row, want.gradients, owner).clone()


def of_one(name: str, change: Any, want: Reference | None = None) -> Any:
    want = reference() if want is None else want
    row, right = gradient(name, policy(), want)
    return compare(policy(), replace(OUTCOME, gradients=[(row, change(right))]), want).gradients[
        row.hf[0].name
    ]


def of(outcome: Outcome, want: Reference | None = None) -> Errors:
    """With right gradients."""
    want = reference() if want is None else want
    rows = [gradient(name, policy(), want) for name in (NORM, QKV)]
    return compare(policy(), replace(outcome, gradients=rows), want)


def test_what_is_right_has_no_error() -> None:
    errors = of(OUTCOME)
    assert [*errors.gradients] == ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]
    for found in errors.gradients.values():
        assert (found.error, found.copies) == (0, 0)
        assert found.factor == pytest.approx(1, abs=1e-14) and found.unlike == pytest.approx(0, abs=1e-14)
    assert (errors.log_prob, errors.log_ratio_sum, errors.loss, errors.grad_norm) == (0, 0, 0, 0)


def test_a_factor_and_a_direction_are_told_apart() -> None:
    twice = of_one(NORM, lambda g: 2 * g)
    assert twice.error == 1 and twice.factor == 2 and twice.unlike == pytest.approx(0, abs=1e-14)
    opposite = of_one(NORM, lambda g: -g)
    assert (opposite.factor, opposite.error) == (-1, 2)
    turned = of_one(NORM, lambda g: g.flip(0))
    assert turned.unlike > 0.5
    nothing = of_one(NORM, lambda g: 0 * g)
    assert (nothing.factor, nothing.unlike, nothing.error, nothing.copies) == (0, 0, 1, 0)


def test_the_error_is_relative_to_the_largest_entry_of_all_that_makes_the_parameter() -> None:
    want = reference()
    want.gradients["model.layers.0.self_attn.v_proj.weight"].fill_(50.0)

    def change(g: Tensor) -> Tensor:
        g[3, 4] += 0.5
        return g

    assert of_one(QKV, change, want).error == pytest.approx(0.01)
    assert of_one(QKV, lambda g: g.float(), want).error < 1e-6


def test_a_gradient_that_must_be_0() -> None:
    want = reference(model__norm__weight=torch.zeros(32, dtype=torch.float64))
    right = of_one(NORM, lambda g: g, want)
    assert (right.error, right.unlike) == (0, 0) and math.isnan(right.factor)
    assert of_one(NORM, lambda g: g + 1e-30, want).error == math.inf
    for value in (math.nan, math.inf, -math.inf):  # what is not finite is the worst
        assert of_one(NORM, lambda g, value=value: g + value).error == math.inf


# The other numbers.


def test_log_probs_and_sums() -> None:
    log_probs, sums = OUTCOME.log_probs.clone(), OUTCOME.log_ratio_sums.clone()
    log_probs[0, 3] -= 0.25
    sums[2] += 0.5
    errors = of(replace(OUTCOME, log_probs=log_probs, log_ratio_sums=sums))
    assert (errors.log_prob, errors.log_ratio_sum) == (0.25, 0.5)
    log_probs[2, 1] = -1.5  # a token beyond the response
    assert of(replace(OUTCOME, log_probs=log_probs)).log_prob == 1.5
    log_probs[1, 0] = math.nan
    sums[0] = math.inf
    errors = of(replace(OUTCOME, log_probs=log_probs, log_ratio_sums=sums))
    assert (errors.log_prob, errors.log_ratio_sum) == (math.inf, math.inf)


@pytest.mark.parametrize("key", ["actor/pg_loss", "actor/entropy", "actor/kl_loss"])
def test_the_largest_of_the_means_counts(key: str) -> None:
    assert of(replace(OUTCOME, metrics=OUTCOME.metrics | {key: OUTCOME.metrics[key] - 0.5})).loss == 0.5
    assert of(replace(OUTCOME, metrics=OUTCOME.metrics | {key: math.nan})).loss == math.inf


def test_the_norm_is_relative() -> None:
    assert of(replace(OUTCOME, grad_norm=2.5)).grad_norm == 0.25
    assert of(replace(OUTCOME, grad_norm=math.nan)).grad_norm == math.inf
    assert of(replace(OUTCOME, grad_norm=None)).grad_norm == 0
    assert of(replace(OUTCOME, grad_norm=0.0)).grad_norm == 1
    nothing = replace(reference(), grad_norm=0.0)
    assert of(replace(OUTCOME, grad_norm=0.5), nothing).grad_norm == 0.5
    assert of(replace(OUTCOME, grad_norm=0.0), nothing).grad_norm == 0


# Several ranks: what another rank sends is what compare() sends there.


def of_ranks(
    monkeypatch: pytest.MonkeyPatch, want: Reference, *ranks: tuple[Any, list[tuple[Row, Tensor]]]
) -> Errors:
    """What rank 0 finds where each rank has a policy and gradients."""
    sent: list[Any] = []

    def send(into: list[Any], mine: Any) -> None:
        sent.append(mine)
        into[:] = sent[-len(into) :]

    monkeypatch.setattr(dist, "all_gather_object", send)
    for owner, found in reversed(ranks):
        monkeypatch.setattr(dist, "get_world_size", lambda: min(len(sent) + 1, len(ranks)))
        errors = compare(owner, replace(OUTCOME, gradients=found), want)
    return errors


def test_parts_of_a_parameter_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    want = reference()
    owners = [policy(tp=2, rank=rank) for rank in range(2)]
    found = [[gradient(name, owner, want) for name in (QKV, NORM, HEAD)] for owner in owners]
    right = of_ranks(monkeypatch, want, *zip(owners, found, strict=True))
    assert all(error.error == 0 and error.copies == 0 for error in right.gradients.values())

    found[1][0][1].mul_(3)  # rank 1's query groups
    errors = of_ranks(monkeypatch, want, *zip(owners, found, strict=True))
    error = errors.gradients["model.layers.0.self_attn.q_proj.weight"]
    mine, other = (cut_shard(found[0][0][0], want.gradients, owner).square().sum() for owner in owners)
    assert error.factor == pytest.approx(((mine + 3 * other) / (mine + other)).item())
    assert error.unlike > 0.1
    assert error.copies == 0, "different parts have different norms"
    assert errors.worst_parameter == "model.layers.0.self_attn.q_proj.weight"
    assert all(error.error == 0 for name, error in errors.gradients.items() if "q_proj" not in name)


def test_copies_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a replicated parameter over all ranks, of a part over those that hold the same."""
    want = reference()
    owners = [policy(tp=2, rank=rank) for rank in (0, 1, 0, 1)]
    found = [[gradient(name, owner, want) for name in (QKV, NORM)] for owner in owners]
    found[3][0][1].mul_(2)
    errors = of_ranks(monkeypatch, want, *zip(owners, found, strict=True))
    assert errors.gradients["model.layers.0.self_attn.q_proj.weight"].copies == pytest.approx(0.75)
    assert errors.gradients["model.norm.weight"].copies == 0
    for number in (1, 3):  # the same within a tensor-parallel rank
        found[number][1][1].mul_(0.5)
    errors = of_ranks(monkeypatch, want, *zip(owners, found, strict=True))
    assert errors.gradients["model.norm.weight"].copies == pytest.approx(0.75)
    assert errors.gradients["model.norm.weight"].error == pytest.approx(0.5)
