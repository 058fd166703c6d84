"""The cases: the batch is as uneven as is said, every clip acts, and splits lose nothing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.config import Parallel
from megatron_fspo.losses import PolicyLossConfig, loss_sections
from megatron_fspo.mcore.machine.sizes import check_parallel
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.verify.cases import (
    LOSSES,
    SMALL,
    SPLITS,
    Case,
    cases,
    drifts,
    make_samples,
    narrow,
    random_weights,
    reference_drifts,
    split,
    with_layers,
)
from megatron_fspo.verify.layouts import all_layouts
from megatron_fspo.verify.reference import Reference, Scores, reference
from megatron_fspo.verify.run import _share, possible_dtypes
from megatron_fspo.weights import Architecture, expected_hf_shapes
from packs import sequences_of

SAMPLES = make_samples(SMALL)
RESPONSES = [sample.completion.length for sample in SAMPLES]
PRESENT = [i for i, length in enumerate(RESPONSES) if length]


# The batch.


def test_the_batch_is_very_uneven() -> None:
    assert len(SAMPLES) == 16 and len(PRESENT) == 14
    assert max(RESPONSES) > sum(RESPONSES) - max(RESPONSES)
    assert sum(length == 1 for length in RESPONSES) >= 3
    # Megatron divides by T exactly, and not by N: a power of two would hide a wrong N in rounding.
    assert sum(RESPONSES) == 256 and len(PRESENT) & (len(PRESENT) - 1)


def test_samples_have_what_a_loss_must_not_mix_up() -> None:
    advantages = [sample.advantage for sample in SAMPLES]
    assert len({abs(a) for a in advantages}) == len(SAMPLES)
    assert {math.copysign(1, a) for a in advantages} == {1.0, -1.0}
    assert all(torch.tensor(a, dtype=torch.float32).item() == a for a in advantages)
    ids = [t for sample in SAMPLES for t in sample.completion.token_ids]
    assert 0 in ids, "the id that pads is sampled too"
    assert min(ids) == 0 and max(ids) == SMALL.vocab_size - 1
    assert make_samples(SMALL) == SAMPLES


def test_weights_are_the_same_everywhere_and_large_enough() -> None:
    for tied in (False, True):
        arch = replace(SMALL, tied=tied)
        weights = random_weights(arch)
        assert {name: tuple(w.shape) for name, w in weights.items()} == expected_hf_shapes(arch)
        assert all(torch.equal(w, random_weights(arch)[name]) for name, w in weights.items())
        assert all(w.dtype == torch.float32 and w.std() > 0.05 for w in weights.values())
        assert all((w.mean() - 1).abs() < 0.2 for name, w in weights.items() if "norm" in name)


# Drifts and losses: the reference's own words, with log-probs as the weights.


def refer(loss: PolicyLossConfig, *, clipped: bool = False) -> Reference:
    log_probs = torch.full((sum(RESPONSES),), -2.0, dtype=torch.float64).requires_grad_()
    rows = log_probs.split(RESPONSES)
    scores = Scores(
        weights={"log_probs": log_probs},
        advantages=tuple(sample.advantage for sample in SAMPLES),
        log_probs=rows,
        entropies=tuple(row * 0 for row in rows),
        turns=tuple(tuple(len(turn) for turn in one.completion.turns if turn) for one in SAMPLES),
    )
    return reference(
        scores,
        loss,
        Case(name="", loss=loss, split="", clipped=clipped).drifts(SAMPLES),
        ref_drifts=reference_drifts(SAMPLES),
        kl_coef=0.0,
    )


def test_drifts_are_exact_in_fp32_and_as_an_update_makes_them() -> None:
    one, other = drifts(SAMPLES, seed=3), drifts(SAMPLES, seed=4)
    for rows in (one, other, drifts(SAMPLES, seed=3, clipped=True)):
        assert [len(row) for row in rows] == RESPONSES
        assert all(row.dtype == torch.float64 and torch.equal(row, row.float().double()) for row in rows)
    assert all(torch.equal(a, b) for a, b in zip(one, drifts(SAMPLES, seed=3), strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True) if len(a))
    assert 0.02 < torch.cat(one).std() < 0.08 and max(row.sum().abs().item() for row in one) < 10


def without_dual_clip(loss: PolicyLossConfig) -> PolicyLossConfig:
    fields = type(loss).model_fields
    off: dict[str, Any] = {"dual_clip": "off", "dual_clip_ratio": None, "c_dual": None}
    return loss.model_copy(update={key: value for key, value in off.items() if key in fields})


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.CLIPS))
def test_a_clip_acts_on_both_sides_and_not_everywhere(name: str) -> None:
    got = refer(without_dual_clip(LOSSES[name])).clipped
    positive = torch.tensor([sample.advantage > 0 for sample in SAMPLES])
    assert (got[positive] > 0).any(), "above the band, A > 0"
    assert (got[~positive] > 0).any(), "below the band, A < 0"
    assert (got[PRESENT] < 1).sum() >= 4


def test_each_kind_of_dual_clip_acts_and_no_other() -> None:
    acts = set()
    for name, loss in LOSSES.items():
        gained = refer(loss).clipped - refer(without_dual_clip(loss)).clipped
        assert (gained >= 0).all()
        if gained.any():
            acts.add(name)
    assert acts >= {"fspo-dual", "fspo-entropy-kl", "rloo", "grpo"}  # c_dual, constant, of a sum, of tokens
    assert not acts & {"fspo-drift", "gspo", "gspo-entropy", "dapo", "grpo-kl"}


def test_losses_cover_what_a_loss_can_have() -> None:
    names = {section.model_fields["name"].default for section in loss_sections()}
    assert {loss.name for loss in LOSSES.values()} == names
    for coefficient in ("entropy_coef", "kl_coef"):
        having = {loss.name for loss in LOSSES.values() if getattr(loss, coefficient)}
        assert len(having) >= 2, f"{coefficient} with a sequence-level and a token-level loss, or two of them"


def test_all_clipped_is() -> None:
    case = next(case for case in cases(None, 0) if case.name == "all-clipped")
    got = refer(case.loss, clipped=True)
    assert got.clipped[PRESENT].tolist() == [1.0] * len(PRESENT)
    assert got.grad_norm == 0
    assert refer(without_dual_clip(case.loss), clipped=True).grad_norm == 0, "by the band, on its two sides"
    assert refer(case.loss).grad_norm > 0


# Cases.


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("precisions", [("float32", "float64"), ("float32",), ("bfloat16",)])
def test_all_layouts_together_cover_the_pairs(ranks: int, precisions: tuple[str, ...]) -> None:
    """Every layout has every loss, and many splits; every loss meets every split and every precision."""
    seen: set[tuple[str, ...]] = set()
    dtypes = [getattr(torch, name) for name in precisions]
    layouts = all_layouts(SMALL, world_size=ranks)
    for number, layout in enumerate(layouts):
        asked, possible = cases(None, number), possible_dtypes(layout, dtypes)
        shares = [_share(asked, i, len(possible), number) for i in range(len(possible))]
        assert Counter(case.name for share in shares for case in share) == Counter(c.name for c in asked)
        assert all(shares)
        splits = [{case.split for case in share} for share in shares]
        assert sum(map(len, splits)) == len(SPLITS)  # none is scored twice
        for dtype, share in zip(possible, shares, strict=True):
            for case in share:
                seen |= {("split", layout.name, case.split), ("loss", case.name, case.split)}
                seen |= {("dtype", case.name, str(dtype)), ("both", case.split, str(dtype))}
    for layout in layouts:
        assert {("split", layout.name, split) for split in SPLITS} <= seen
    everything = [*LOSSES, "all-clipped", "distil"]
    assert {("loss", name, split) for name in everything for split in SPLITS} <= seen
    kinds = {dtype for layout in layouts for dtype in possible_dtypes(layout, dtypes)}
    assert {("dtype", name, str(dtype)) for name in everything for dtype in kinds} <= seen
    assert {("both", split, str(dtype)) for split in SPLITS for dtype in kinds} <= seen


# Splits.


def places(
    name: str, ranks: int, multiple_of: int, context: int = 1, share: bool = False
) -> list[list[list[int]]]:
    layout = PackLayout(
        data_size=ranks, count_multiple_of=multiple_of, context_size=context, share_prompts=share
    )
    return split(name, sequences_of(SAMPLES), SMALL, layout)


@given(
    name=st.sampled_from(SPLITS),
    ranks=st.integers(1, 8),
    multiple_of=st.integers(1, 5),
    context=st.integers(0, 4),
)
def test_splits_place_every_sequence_once(name: str, ranks: int, multiple_of: int, context: int) -> None:
    plan = places(name, ranks, multiple_of, max(context, 1), share=not context)
    assert len(plan) == ranks
    (count,) = {len(packs) for packs in plan}
    assert count > 0 and count % multiple_of == 0
    assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(len(SAMPLES)))
    if name.endswith(("micro-batch", "micro-batches")):
        asked = int(name.split()[0])
        assert count == asked + -asked % multiple_of
    elif name == "1 sequence each":
        assert {len(pack) for packs in plan for pack in packs} <= {0, 1}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_uneven_is(ranks: int) -> None:
    first, *others = places("uneven", ranks, 1)
    assert first[0] == [RESPONSES.index(max(RESPONSES))], "the longest alone"
    assert all(RESPONSES[i] == 0 for i in first[1]) and len(first[1]) == 2, "prompts without response alone"
    assert first[2] == [], "an empty pack"
    assert all(len(packs[0]) == 1 and packs[1:] == [[], [], []] for packs in others), "one sequence each"
    assert len(first[3]) == 13 - len(others)
    work = [sum(RESPONSES[i] for pack in packs for i in pack) for packs in (first, *others)]
    assert work[0] > 5 * sum(work[1:])
    assert all(work), "every rank has a response, with a weight that a local N would change"


def test_the_8_micro_batches_balance_the_square_of_the_length() -> None:
    """Costs as a run with ``batch.balance = attention`` has them; the others balance tokens."""
    wide = [replace(sample, prompt=replace(sample.prompt, token_ids=(1,) * 30)) for sample in SAMPLES]
    sequences = sequences_of(wide)
    for count in (2, 8):  # with little but attention to compute, and with much else
        narrow_plan, wide_plan = (
            split(f"{count} micro-batches", sequences, replace(SMALL, hidden_size=size), PackLayout())
            for size in (1, 10_000)
        )
        assert (narrow_plan == wide_plan) == (count == 2)


# Small models with the heads of large ones.

QWEN3_8B = replace(
    SMALL,
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    vocab_size=151936,
    rope_theta=1e6,
    dtype=torch.bfloat16,
)
QWEN3_06B = replace(QWEN3_8B, num_layers=28, hidden_size=1024, num_heads=16, ffn_size=3072, tied=True)


@pytest.mark.parametrize("arch", [QWEN3_8B, QWEN3_06B], ids=["8B", "0.6B"])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 3)])
def test_a_runs_layout_fits_its_small_model(
    arch: Architecture, tensor: int, pipeline: int, virtual: int
) -> None:
    parallel = Parallel(tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual)
    small = with_layers(narrow(arch), parallel)
    check_parallel(small, parallel)
    each, rest = divmod(small.num_layers, pipeline * virtual)
    assert rest == 0 and 1 <= each <= 2, "every chunk has the same few layers"
    assert each == 2 or pipeline * virtual > 2, "a stage that has a layer behind a layer"
    kept = ("num_heads", "num_kv_heads", "tied", "rms_norm_eps", "rope_theta", "model_type")
    assert {key: getattr(small, key) for key in kept} == {key: getattr(arch, key) for key in kept}
    size = sum(math.prod(shape) for shape in expected_hf_shapes(small).values())
    assert size < 400_000
    assert small.dtype == torch.float32 and small.vocab_size == 61


def test_what_does_not_fit_the_run_does_not_fit_its_small_model() -> None:
    for ffn in (12288, 100, 48, 36):
        small = narrow(replace(QWEN3_8B, ffn_size=ffn))
        for tensor in (2, 4, 8):
            assert (small.ffn_size % tensor == 0) == (ffn % tensor == 0)
    assert narrow(replace(QWEN3_8B, vocab_size=37)).vocab_size == 37
