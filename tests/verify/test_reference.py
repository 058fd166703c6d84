"""The losses of the float64 reference: by hand, against the objective room, and through the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference_rows import SHAPES, load, random_rows, relative_error, samples
from torch import Tensor

from megatron_fspo.losses import FSPOLoss, PolicyLossConfig
from megatron_fspo.losses.ratio import GSPOLoss, RLOOLoss
from megatron_fspo.losses.token import DAPOLoss, GRPOLoss
from megatron_fspo.verify.cases import LOSSES
from megatron_fspo.verify.reference import Scores, forward, log_probs_and_entropy, reference


@pytest.fixture(params=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, random_checkpoints: dict[str, Path]) -> Path:
    return random_checkpoints[request.param]


# The losses. Here a weight is the log-probs themselves, so its gradient is d loss / d log π(y_t).


def leaf_scores(lengths: Sequence[int], advantages: Sequence[float], seed: int = 0) -> Scores:
    log_probs = torch.cat(random_rows(lengths, 1.0, seed)).requires_grad_()
    entropies = torch.cat(random_rows(lengths, 1.0, seed + 1)).requires_grad_()
    return Scores(
        weights={"log_probs": log_probs, "entropies": entropies, "frozen": torch.ones(1)},
        advantages=tuple(advantages),
        log_probs=log_probs.split(list(lengths)),
        entropies=tuple(row * row for row in entropies.split(list(lengths))),
    )


def by_token(gradients: dict[str, Tensor], scores: Scores) -> list[Tensor]:
    """d objective / d log π(y_t), per sample [L]: minus the gradient of the loss."""
    return list((-gradients["log_probs"]).split([len(row) for row in scores.log_probs]))


e = math.exp
# Three sequences of 4, 1 and 9 tokens, their S and A. FSPO's band is −0.1·√L to 0.2·√L: the first lies inside
# [−0.2, 0.4], the second below [−0.1, 0.2], the third above [−0.3, 0.6], where A < 0 needs a dual clip.
LENGTHS, SUMS, ADVANTAGES = (4, 1, 9), (0.3, -0.5, 1.5), (2.0, -1.0, -3.0)
BAND = {"c_low": 0.1, "c_high": 0.2}
IN, LOW, HIGH = 2 * e(0.3), -e(-0.1), -3 * e(1.5)


# fmt: off
HAND: list[tuple[PolicyLossConfig, tuple[float, ...], tuple[float, ...], str, str]] = [
    (FSPOLoss(**BAND, dual_clip="off"), (IN, LOW, HIGH), (IN, 0, HIGH), "010", "011"),
    # S <= c_dual·√L is 1.8, above S; and with the default of 2·c_high 1.2, below S.
    (FSPOLoss(**BAND, c_dual=0.6), (IN, LOW, HIGH), (IN, 0, HIGH), "010", "011"),
    (FSPOLoss(**BAND), (IN, LOW, -3 * e(1.2)), (IN, 0, 0), "011", "011"),
    (FSPOLoss(**BAND, dual_clip="constant", dual_clip_ratio=3.5),
     (IN, LOW, -3 * 3.5), (IN, 0, 0), "011", "011"),
    # L, not √L: [−0.4, 0.8], [−0.1, 0.2], [−0.9, 1.8].
    (FSPOLoss(**BAND, exponent=1.0), (IN, LOW, HIGH), (IN, 0, HIGH), "010", "010"),
    # Shifted by −0.1·L: [−0.6, 0], [−0.2, 0.1], [−1.2, −0.3]; dual clip 1.2 − 0.9.
    (FSPOLoss(**BAND, drift="given", drift_value=-0.1),
     (2.0, -e(-0.2), -3 * e(0.3)), (0, 0, 0), "111", "111"),
    # A drift value that the loss is not told to use.
    (FSPOLoss(**BAND, drift_value=-0.1), (IN, LOW, -3 * e(1.2)), (IN, 0, 0), "011", "011"),
    (RLOOLoss(eps_low=0.3, eps_high=0.4), (IN, -0.7, HIGH), (IN, 0, HIGH), "010", "011"),
    (RLOOLoss(dual_clip_ratio=4.0), (2.4, -0.8, -12.0), (0, 0, 0), "111", "111"),
    # S / L is 0.075, −0.5 and 1/6; the slope is dJ/dS.
    (GSPOLoss(eps_low=0.1, eps_high=0.08),
     (2 * e(0.075), -0.9, -3 * e(1 / 6)), (2 * e(0.075) / 4, 0, -3 * e(1 / 6) / 9), "010", "011"),
    (GSPOLoss(eps_low=0.1, eps_high=0.05, dual_clip_ratio=1.1),
     (2.1, -0.9, -3.3), (0, 0, 0), "111", "111"),
]
# fmt: on


@pytest.mark.parametrize(("loss", "j", "slope", "clipped", "out"), HAND)
def test_a_sequence_level_loss_by_hand(
    loss: PolicyLossConfig, j: Sequence[float], slope: Sequence[float], clipped: str, out: str
) -> None:
    scores = leaf_scores(LENGTHS, ADVANTAGES)
    noise = random_rows(LENGTHS, 0.3, seed=5)  # how S is spread over the tokens must not matter
    got = reference(
        scores, loss, [row - row.mean() + s / len(row) for row, s in zip(noise, SUMS, strict=True)]
    )
    assert got.log_ratio_sums.tolist() == pytest.approx(SUMS)
    assert got.objective == pytest.approx(sum(j) / 3)
    assert got.loss == -got.objective
    assert got.clipped.tolist() == [float(flag) for flag in clipped]
    assert got.out_of_band.tolist() == [flag == "1" for flag in out]
    for row, want in zip(by_token(got.gradients, scores), slope, strict=True):
        assert row.tolist() == pytest.approx([want / 3] * len(row))
    assert got.grad_norm == pytest.approx(
        math.sqrt(sum(n * (x / 3) ** 2 for n, x in zip(LENGTHS, slope, strict=True)))
    )


@pytest.mark.parametrize("dual", [None, 1.5])
def test_a_token_level_loss_by_hand(dual: float | None) -> None:
    scores = leaf_scores((2, 4), (2.0, -1.0))
    drifts = [torch.tensor([0.3, 0.1]).double(), torch.tensor([0.5, -0.4, 0.0, 0.2]).double()]
    # A > 0: 0.3 is above log 1.25. A < 0: −0.4 is below log 0.9; 0.5 is above log 1.5.
    j = [[2 * 1.25, 2 * e(0.1)], [-e(0.5) if dual is None else -1.5, -0.9, -1.0, -e(0.2)]]
    slope = [[0.0, 2 * e(0.1)], [-e(0.5) if dual is None else 0.0, 0.0, -1.0, -e(0.2)]]

    got = reference(scores, GRPOLoss(eps_low=0.1, eps_high=0.25, dual_clip_ratio=dual), drifts)
    assert got.objective == pytest.approx((sum(j[0]) / 2 + sum(j[1]) / 4) / 2)
    for row, want in zip(by_token(got.gradients, scores), slope, strict=True):
        assert row.tolist() == pytest.approx([x / len(want) / 2 for x in want])
    assert got.clipped.tolist() == [0.5, 0.25 if dual is None else 0.5]
    assert got.log_ratio_sums.tolist() == pytest.approx([0.4, 0.3])

    got = reference(scores, DAPOLoss(eps_low=0.1, eps_high=0.25, dual_clip_ratio=dual), drifts)
    assert got.objective == pytest.approx((sum(j[0]) + sum(j[1])) / 6)
    for row, want in zip(by_token(got.gradients, scores), slope, strict=True):
        assert row.tolist() == pytest.approx([x / 6 for x in want])
    assert got.out_of_band.tolist() == [True, True]
    inside = reference(scores, DAPOLoss(eps_low=0.4, eps_high=0.7), drifts)
    assert inside.out_of_band.tolist() == [False, False] and inside.clipped.tolist() == [0.0, 0.0]


def test_bonus_and_penalty_by_hand() -> None:
    """Per response token of the step, not per sequence; the penalty pulls log π to log π_ref."""
    scores = leaf_scores((1, 0, 3), (0.0, 5.0, 0.0))
    ref_drifts = [torch.tensor(row, dtype=torch.float64) for row in ([2.0], [], [1.0, -1.0, 0.5])]
    zeros = [torch.zeros_like(row) for row in ref_drifts]
    got = reference(scores, FSPOLoss(entropy_coef=0.3), zeros, ref_drifts=ref_drifts, kl_coef=0.7)
    entropies = scores.weights["entropies"].detach()
    assert got.entropy == pytest.approx(entropies.square().mean().item())
    assert got.kl == pytest.approx((4 + 1 + 1 + 0.25) / 2 / 4)
    assert got.objective == 0.0
    assert got.loss == pytest.approx(-0.3 * got.entropy + 0.7 * got.kl)
    assert torch.allclose(got.gradients["log_probs"], 0.7 * torch.cat(ref_drifts) / 4, rtol=1e-12)
    assert torch.allclose(got.gradients["entropies"], -0.3 * 2 * entropies / 4, rtol=1e-12)
    assert got.gradients.keys() == {"log_probs", "entropies"}

    unpenalised = reference(scores, FSPOLoss(), zeros, ref_drifts=ref_drifts)
    assert unpenalised.kl == got.kl and unpenalised.loss == 0.0
    assert reference(scores, FSPOLoss(entropy_coef=0.3), zeros).kl == 0.0


# All of it, through the model


def test_the_gradient_of_a_real_model(checkpoint: Path) -> None:
    """Chain rule: Σ_t (d loss / d log π(y_t)) ∇log π(y_t), and the same for the entropy."""
    weights, arch = load(checkpoint)
    rows = samples()
    scores = forward(weights, arch, rows, 0.7)
    lengths = [length for _, length in SHAPES]
    drifts, ref_drifts = random_rows(lengths, 0.05, seed=1), random_rows(lengths, 0.5, seed=2)
    leaves = leaf_scores(lengths, scores.advantages)
    for seen, row, sample in zip(scores.log_probs, scores.entropies, rows, strict=True):
        alone = log_probs_and_entropy(
            weights, arch, sample.prompt.token_ids, sample.completion.token_ids, 0.7
        )
        assert torch.equal(seen, alone[0]) and torch.equal(row, alone[1])
    for loss in (
        FSPOLoss(c_low=0.02, c_high=0.02, entropy_coef=0.1),
        DAPOLoss(eps_low=0.05, entropy_coef=0.02),
    ):
        got = reference(scores, loss, drifts, ref_drifts=ref_drifts, kl_coef=0.3)
        slope = reference(leaves, loss, drifts, ref_drifts=ref_drifts, kl_coef=0.3)
        assert 0 < got.clipped.sum() < 4 and torch.equal(got.clipped, slope.clipped)
        log_probs, entropies = torch.cat(scores.log_probs), torch.cat(scores.entropies)
        total = (slope.gradients["log_probs"] * log_probs).sum() - loss.entropy_coef * entropies.mean()
        want = torch.autograd.grad(total, list(weights.values()), retain_graph=True)
        assert got.gradients.keys() == weights.keys()
        for (name, gradient), wanted in zip(got.gradients.items(), want, strict=True):
            assert relative_error(gradient, wanted) < 1e-10, name
        assert got.grad_norm == pytest.approx(torch.cat([g.flatten() for g in want]).norm().item(), rel=1e-10)


def test_a_prompt_without_a_response_counts_nowhere() -> None:
    lengths, advantages = [1, 40, 2, 0, 17], [1.0, -1.5, 0.5, 2.0, -2.0]
    for loss in LOSSES.values():
        results = []
        for kept in (range(5), (0, 1, 2, 4)):
            some = [lengths[i] for i in kept]
            results.append(
                reference(
                    leaf_scores(some, [advantages[i] for i in kept]),
                    loss.model_copy(update={"entropy_coef": 0.1}),
                    random_rows(some, 0.05, seed=1),
                    ref_drifts=random_rows(some, 1.0, seed=2),
                    kl_coef=0.1,
                )
            )
        one, other = results
        assert one.loss == pytest.approx(other.loss, rel=1e-14)
        assert one.clipped[3] == 0 and not one.out_of_band[3] and one.log_ratio_sums[3] == 0
        for name, gradient in one.gradients.items():
            assert relative_error(gradient, other.gradients[name]) < 1e-12


def test_no_gradient_where_everything_is_clipped() -> None:
    """Also far outside the bands, where nothing may become NaN; and where every advantage is 0."""
    lengths, advantages = [1, 40, 2, 0, 17], [1.0, -1.5, 0.5, 2.0, -2.0]
    scores = leaf_scores(lengths, advantages)
    for name in ("fspo", "fspo-drift", "fspo-dual", "rloo", "gspo", "grpo", "dapo"):
        loss = LOSSES[name]
        for size in (0.5, 10.0):
            drifts = [
                torch.full_like(row.detach(), math.copysign(size, a))
                for row, a in zip(scores.log_probs, advantages, strict=True)
            ]
            got = reference(scores, loss, drifts)
            assert got.clipped.tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]
            assert math.isfinite(got.objective) and got.grad_norm == 0.0
        got = reference(replace(scores, advantages=(0.0,) * 5), loss, drifts)
        assert got.objective == got.grad_norm == 0.0
        assert not got.clipped.any() and got.out_of_band.sum() == 4


def test_what_does_not_fit_is_refused(checkpoint: Path) -> None:
    weights, arch = load(checkpoint)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.float32"):
        forward({**weights, "model.norm.weight": torch.ones(48)}, arch, samples(), 1.0)
    scores = leaf_scores((3, 1), (1.0, 1.0))
    drifts = random_rows((3, 1), 0.1, seed=0)
    with pytest.raises(ValueError, match=r"sample 0 are \[1\]; it has 3 tokens"):
        reference(scores, FSPOLoss(), drifts[::-1])
    with pytest.raises(ValueError, match="sample 0 are"):
        reference(scores, FSPOLoss(), drifts, ref_drifts=drifts[::-1])
    with pytest.raises(ValueError):
        reference(scores, FSPOLoss(), drifts[:1])
    with pytest.raises(ValueError, match=r"kl_coef = 0\.1 needs ref_drifts"):
        reference(scores, FSPOLoss(), drifts, kl_coef=0.1)
    with pytest.raises(ValueError, match="no sample has a response"):
        reference(leaf_scores((0, 0), (1.0, 1.0)), FSPOLoss(), random_rows((0, 0), 0.1, seed=0))
