"""How wide the band should be, measured: the noise of S, how fast it grows with length, and the drift.

The exponent a of spread(S) ∝ L^a: √L is the law of noise, of independent terms. What training moves adds up
along a response and grows faster, up to L. A band on L^½ then clips long responses more often, so a run may
measure a and use it instead. The spread is taken from quantiles of |S| by length bin, not from variances: S
has heavy tails, and a few sequences would decide. It is the quantile at 0.7: the median says little of where
the band's edge lies, and the tail beyond 0.85 is too thin to measure in a few mini-batches. A law that is one
power for every quantile gives the same a for each. Where both noise and a shift common to all tokens are in
S, no power fits, and the length L* at which they are equal may be measured in its place.

Two ways that look natural and do harm:

* **A controller that holds a clip rate** is a positive feedback loop: larger updates, larger S, wider band.
  So ``BandCalibrator`` measures until σ̂ is steady, c only falls meanwhile, and is fixed from then on.
* **The batch mean of S/L as drift** is mostly the learning signal: the band follows the policy down. Use
  ``drift_from_kl`` or ``drift_from_sigma``, which are capped, and leave drift at 0 unless there is a reason.

Shapes: N sequences, T tokens. Units: S in nats, L in response tokens; σ in nats per token^a; a has none.
Source: all of this file is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_fspo.objective.band import width
from megatron_fspo.objective.fairness import length_bins

QUANTILE = 0.7
"""The quantile of |S| within a length bin that stands for its spread."""
LEAST_SPAN = 3.0
"""Length of the longest bin over that of the shortest, below which no exponent is measured."""
_LEAST_BINS = 4
_LEAST_IN_BIN = 16


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """The exponent of S in some sequences."""

    value: float
    """a in spread(S) ∝ L^a."""
    interval: tuple[float, float]
    """95%, from leaving out one block after the other."""
    span: float
    """Mean length of the longest bin over that of the shortest."""


def usable(log_ratio_sums: Tensor, lengths: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """S and L in float64 on the CPU, and other columns, without empty responses and what is not finite."""
    sums, lengths = log_ratio_sums.detach().cpu().double(), lengths.detach().cpu().double()
    keep = sums.isfinite() & (lengths > 0)
    return sums[keep], lengths[keep], *(column.cpu()[keep] for column in more)


def fit_exponent(log_ratio_sums: Tensor, lengths: Tensor, num_bins: int = 8) -> float:
    """The exponent a in spread(S) ∝ L^a: the slope of the log quantile of |S| against log L over length bins.

    Takes S [N] in nats and L [N], and leaves out what is not finite or empty; least squares, one point per
    bin. Returns nan if fewer than two bins have a spread above 0. A random walk gives 0.5.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    points = _points(sums, kept, length_bins(kept, num_bins))
    return _slope(points) if len(points) > 1 else math.nan


def fit_crossover(log_ratio_sums: Tensor, lengths: Tensor, num_bins: int = 8) -> float | None:
    """L*, tokens, of spread(S) ∝ √(L + L²/L*), from 1 to 100 times the longest L; None where √L fits best.

    Takes S [N] in nats and L [N]. Of fifty L*, it is the one with which the spread of S over that width
    differs least between bins of length, in log. The end of the range stands for no L* at all.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    bins = length_bins(kept, num_bins)
    if len(_points(sums, kept, bins)) < 2:
        return None
    tried = torch.logspace(0, math.log10(100 * kept.max().item()), 50, dtype=torch.float64).tolist()
    rest = []
    for crossover in tried:
        spreads = [spread for _, spread in _points(sums / width(kept, 0.5, crossover), kept, bins)]
        rest.append(torch.tensor(spreads).var(correction=0).item())
    best = min(range(len(tried)), key=rest.__getitem__)
    return None if best == len(tried) - 1 else tried[best]


def measure_exponent(log_ratio_sums: Tensor, lengths: Tensor, blocks: Tensor, num_bins: int = 8) -> Exponent:
    """The exponent of S with its interval, from sequences that several optimizer steps saw.

    Sequences of one step are moved by the same update, so steps are what is left out, one at a time (a
    delete-a-group jackknife), with the t quantile of their number.

    Args:
        log_ratio_sums: S [N] in nats.
        lengths: L [N].
        blocks: int64 [N], the optimizer step of each, or another group that goes together; at least 3.
        num_bins: bins of length, with equally many sequences.

    Raises:
        ValueError: fewer than 3 blocks; too few sequences with S ≠ 0; or lengths that span too little to say
            anything of growth.
    """
    numbers = sorted(set(blocks.tolist()))
    if len(numbers) < 3:
        raise ValueError(f"{len(numbers)} independent groups of sequences; an interval needs 3")
    sums, kept, steps = usable(log_ratio_sums, lengths, blocks)
    if (count := int((sums != 0).sum())) < _LEAST_BINS * _LEAST_IN_BIN:
        raise ValueError(f"{count} sequences with S other than 0; {_LEAST_BINS * _LEAST_IN_BIN} are needed")
    bins = length_bins(kept, num_bins)
    points = _points(sums, kept, bins)
    span = math.exp(points[-1][0] - points[0][0]) if points else 1.0
    if len(points) < _LEAST_BINS or span < LEAST_SPAN:
        raise ValueError(
            f"the lengths span too little: {len(points)} bins of different lengths, the longest {span:.2g} "
            f"times the shortest; {_LEAST_BINS} bins and {LEAST_SPAN:g} times are needed"
        )
    # The bins stay: edges that jump to another length would count as noise.
    left = [_slope(_points(*(part[steps != number] for part in (sums, kept, bins)))) for number in numbers]
    half = student_t(len(numbers) - 1) * jackknife(left)
    value = _slope(points)
    return Exponent(value=value, interval=(value - half, value + half), span=span)


def _points(sums: Tensor, lengths: Tensor, bins: Tensor) -> list[tuple[float, float]]:
    """(log L, log spread) of every bin that has one, short to long."""
    points = []
    for number in sorted(set(bins.tolist())):
        here = bins == number
        spread = sums[here].abs().quantile(QUANTILE).item()
        if spread > 0:
            points.append((lengths[here].log().mean().item(), math.log(spread)))
    return points


def _slope(points: list[tuple[float, float]]) -> float:
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    x = x - x.mean()
    return ((x * y).sum() / (x * x).sum()).item()


def jackknife(left: list[float]) -> float:
    """Standard error of a figure, from its values with one block after the other left out."""
    values = torch.tensor(left, dtype=torch.float64)
    return ((len(left) - 1) * values.var(correction=0)).sqrt().item()


def student_t(degrees: float) -> float:
    """97.5% quantile of Student's t: to 1% above 2 degrees (Abramowitz, Stegun 26.7.5), below that of 1."""
    if degrees <= 2:
        return math.tan(math.pi * 0.475) if degrees < 2 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees**power for power, term in enumerate(terms, start=1)))


STEADY = 1.5
"""Ratio of σ̂ in two windows up to which it counts as steady. c = 2σ̂ is then between 1.3 and 3 σ̂ of either."""

# Median of |Z| for a standard normal Z.
_NORMAL_MAD = 0.6744897501960817


def sigma_hat(
    log_ratio_sums: Tensor, lengths: Tensor, exponent: float = 0.5, crossover: float | None = None
) -> float:
    """Robust noise of S per unit of the band's width: σ̂ = median_i(|S_i|/w(L_i)) / 0.6745.

    For S ~ Normal(0, σ²L) and w = √L this estimates σ. It is a median because S/√L has very heavy tails
    (kurtosis 147 in a run of ours, where the rms was 3–4 times as large): a few sequences would set the rms.

    Args:
        log_ratio_sums: S [N] in nats. Non-finite ones are left out.
        lengths: L [N], response tokens. Sequences with L = 0 are left out.
        exponent: a of :func:`~megatron_fspo.objective.band.width`, the band's.
        crossover: L* of it.

    Raises ``ValueError`` if no sequence is left.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    if len(sums) == 0:
        raise ValueError(f"no finite S with L > 0 among {len(log_ratio_sums)} sequences")
    return _median(sums.abs() / width(kept, exponent, crossover)) / _NORMAL_MAD


def drift_from_kl(kl_per_token: float, cap: float) -> float:
    """drift = −min(KL, cap), nats per token: E_old[S] = −L·KL(old‖new), the centre of the noise."""
    return 0.0 - min(kl_per_token, cap)


def drift_from_sigma(sigma: float, cap: float) -> float:
    """drift = −min(σ²/2, cap), nats per token: KL ≈ σ²/2 for small per-token log-ratios with deviation σ."""
    return drift_from_kl(sigma * sigma / 2.0, cap)


class BandCalibrator:
    """Measures c = multiple·σ̂ over windows of off-policy mini-batches until two in a row agree.

    The first updates of a run are no measure of the later ones: Adam's are up to ten times as large as those
    that follow. So c is the smallest of the windows until σ̂ is steady, within a factor of :data:`STEADY`,
    and from then on that of the two steady windows, fixed. ``multiple`` = 2 is ours: of a normal S, about
    one sequence in twenty lies outside.

    Example::

        calibrator = BandCalibrator(mini_batches=6)          # of two rollouts with three each
        ...
        calibrator.observe(log_ratio_sums, lengths)      # all of the mini-batch, from all ranks
        if calibrator.c is not None:
            band = FSPOBand(c_low=calibrator.c, c_high=calibrator.c, exponent=calibrator.exponent)

    With ``exponent="measured"`` a is measured too, in the steady windows and within [½, 1], and c is that of
    S/L^a. With ``crossover="measured"`` it is L* that is measured there, and c is that of S/√(L + L²/L*).
    Where that cannot be done, the width stays √L and ``refusal`` says why.

    Every rank must observe the same sequences, or each has a band of its own.

    Args:
        mini_batches: of one window; the off-policy ones of whole rollouts, as S grows within a rollout.
    """

    def __init__(
        self,
        mini_batches: int = 4,
        multiple: float = 2.0,
        exponent: float | Literal["measured"] = 0.5,
        crossover: float | Literal["measured"] | None = None,
    ) -> None:
        if mini_batches < 1:
            raise ValueError(f"mini_batches must be at least 1, got {mini_batches}")
        if not 0.0 < multiple < math.inf:
            raise ValueError(f"multiple must be finite and above 0, got {multiple}")
        if exponent != "measured" and not 0.0 <= exponent <= 1.0:
            raise ValueError(f"exponent must be from 0 to 1, got {exponent}")
        self._settings: dict[str, Any] = {
            "mini_batches": mini_batches,
            "multiple": multiple,
            "exponent": exponent,
            "crossover": crossover,
        }
        self.mini_batches = mini_batches
        self.c: float | None = None
        """Nats per token^a; ``None`` until the first window is full, constant once ``steady``."""
        self.steady = False
        """Two windows agreed: the measurement is over."""
        self.exponent = 0.5 if exponent == "measured" else exponent
        """a of the band; where it is to be measured, ½ until ``steady``."""
        self.crossover = None if crossover == "measured" else crossover
        """L* of the band; where it is to be measured, None until ``steady``."""
        self.measured: Exponent | None = None
        """The exponent of S, if one was measured."""
        self.refusal: str | None = None
        """The reason why a or L* could not be measured."""
        # |S| and L of the last full window and of the one under way; emptied once σ̂ is steady.
        self._seen: list[tuple[list[float], list[float]]] = []

    def observe(self, log_ratio_sums: Tensor, lengths: Tensor) -> None:
        """Take S [N] in nats and L [N] of one off-policy mini-batch. Does nothing once ``steady``.

        A mini-batch without any finite S does not count as one. Raises ``ValueError`` if most S are 0: that
        is the first mini-batch after a rollout, on policy, which has no noise to measure.
        """
        if self.steady:
            return
        sums, kept = usable(log_ratio_sums, lengths)
        if len(sums) == 0:
            return
        if _median(sums.abs()) == 0.0:
            raise ValueError(
                "the median |S| of this mini-batch is 0: it is on policy; observe off-policy ones only"
            )
        self._seen.append((sums.abs().tolist(), kept.tolist()))
        size = self.mini_batches
        if len(self._seen) % size:
            return
        now = self._width(self._seen[-size:])
        if len(self._seen) == 2 * size:
            before = self._width(self._seen[:size])
            if before / STEADY <= now <= before * STEADY:
                if "measured" in (self._settings["exponent"], self._settings["crossover"]):
                    self._measure_shape()
                self.c, self.steady, self._seen = self._width(self._seen), True, []
                return
            self._seen = self._seen[size:]
        self.c = now if self.c is None else min(self.c, now)

    def _width(self, batches: Sequence[tuple[list[float], list[float]]]) -> float:
        return float(self._settings["multiple"]) * sigma_hat(*_pooled(batches), self.exponent, self.crossover)

    def _measure_shape(self) -> None:
        sizes = torch.tensor([len(batch) for batch, _ in self._seen])
        pooled = _pooled(self._seen)
        try:
            self.measured = measure_exponent(*pooled, torch.arange(len(sizes)).repeat_interleave(sizes))
        except ValueError as error:
            self.refusal = str(error)
            return
        if self._settings["crossover"] == "measured":
            self.crossover = fit_crossover(*pooled)
        else:
            # Within what noise and a shift common to all tokens can give.
            self.exponent = min(max(self.measured.value, 0.5), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """All state and the settings it was measured with, in plain JSON types."""
        return {
            "settings": dict(self._settings),
            "c": self.c,
            "steady": self.steady,
            "exponent": self.exponent,
            "crossover": self.crossover,
            "measured": None if self.measured is None else asdict(self.measured),
            "refusal": self.refusal,
            "seen": [[list(column) for column in batch] for batch in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``. Raises ``ValueError`` if it was made with other settings."""
        if state["settings"] != self._settings:
            raise ValueError(
                f"this calibrator has {self._settings}, its saved state was measured with {state['settings']}"
            )
        self.c, self.steady = state["c"], state["steady"]
        self.exponent, self.crossover = state["exponent"], state["crossover"]
        self.refusal = state["refusal"]
        measured = state["measured"]
        self.measured = (
            None if measured is None else Exponent(**measured | {"interval": tuple(measured["interval"])})
        )
        self._seen = [(list(sums), list(lengths)) for sums, lengths in state["seen"]]


def _pooled(batches: Sequence[tuple[list[float], list[float]]]) -> tuple[Tensor, Tensor]:
    """|S| and L of several mini-batches together."""
    sums, lengths = (
        torch.tensor([value for batch in column for value in batch], dtype=torch.float64)
        for column in zip(*batches, strict=True)
    )
    return sums, lengths


def _median(values: Tensor) -> float:
    # torch.median takes the lower of the two middle values; this one their mean.
    ordered = values.sort().values
    return (ordered[(len(values) - 1) // 2].item() + ordered[len(values) // 2].item()) / 2.0
