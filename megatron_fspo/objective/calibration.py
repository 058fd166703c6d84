"""Measure what the band should be: the noise of S, its growth with length, and the drift.

Growth is the exponent a in spread(S) ∝ L^a. Independent tokens (noise) give a = ½. What an update shifts in
all tokens of a response adds up faster, up to a = 1, and a √L band then clips long responses more often. So a
run may measure a.

The spread is the 70% quantile of |S| in each length bin. S has heavy tails, so a few sequences would decide a
variance; the median says little about the band's edge; a few mini-batches have too few values beyond 85%.

Avoid two obvious methods:

* **Adjusting c to hold a clip rate** is a positive feedback loop: larger updates, larger S, wider band.
  ``BandCalibrator`` measures until σ̂ is steady, only lowers c meanwhile, and then keeps it, or follows σ̂
  slowly and not far.
* **The batch mean of S/L as drift** is mostly the learning signal, so the band would follow the policy.
  The drift comes from the spread instead: see :func:`expected_drift`.

Shapes: N sequences. Units: S in nats, L in response tokens; σ in nats per token^a; a has none. Source: all of
this file is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_fspo.objective.fairness import length_bins

QUANTILE = 0.7
"""Quantile of |S| in a length bin that measures its spread."""
LEAST_SPAN = 3.0
"""Smallest ratio of the lengths of longest and shortest bin for which an exponent is measured."""
_LEAST_BINS = 4
_LEAST_IN_BIN = 16


@dataclass(frozen=True, kw_only=True)
class Exponent:
    """Growth of S with length, measured from some sequences."""

    value: float
    """a in spread(S) ∝ L^a."""
    interval: tuple[float, float]
    """95% interval, by leaving out one block at a time."""
    span: float
    """Mean length of the longest bin over that of the shortest."""


def usable(log_ratio_sums: Tensor, lengths: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Return S and L in float64, and ``more`` columns, on the CPU without empty or non-finite sequences."""
    sums, lengths = log_ratio_sums.detach().cpu().double(), lengths.detach().cpu().double()
    keep = sums.isfinite() & (lengths > 0)
    return sums[keep], lengths[keep], *(column.cpu()[keep] for column in more)


def fit_exponent(log_ratio_sums: Tensor, lengths: Tensor, num_bins: int = 8) -> float:
    """Return a of spread(S) ∝ L^a: the least-squares slope of log spread against log L over length bins.

    Takes S [N] in nats and L [N], ignoring empty and non-finite sequences. Independent tokens give ½. NaN if
    fewer than two bins have a spread above 0.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    points = _points(sums, kept, length_bins(kept, num_bins))
    return _slope(points) if len(points) > 1 else math.nan


def measure_exponent(log_ratio_sums: Tensor, lengths: Tensor, blocks: Tensor, num_bins: int = 8) -> Exponent:
    """Return the exponent of S with a 95% interval, from sequences of several optimizer steps.

    One update moves all sequences of its step together, so the interval comes from leaving out one step at a
    time (a delete-a-group jackknife), with Student's t for the number of steps.

    Args:
        log_ratio_sums: S [N] in nats.
        lengths: L [N].
        blocks: int64 [N], the step of each sequence, or another group of dependent sequences; at least 3.
        num_bins: length bins, with equal numbers of sequences.

    Raises:
        ValueError: fewer than 3 blocks, too few sequences with S ≠ 0, or lengths that differ too little.
    """
    numbers = sorted(set(blocks.tolist()))
    if len(numbers) < 3:
        raise ValueError(f"{len(numbers)} independent groups of sequences; an interval needs at least 3")
    sums, kept, steps = usable(log_ratio_sums, lengths, blocks)
    if (count := int((sums != 0).sum())) < _LEAST_BINS * _LEAST_IN_BIN:
        raise ValueError(f"{count} sequences have S ≠ 0; at least {_LEAST_BINS * _LEAST_IN_BIN} are needed")
    bins = length_bins(kept, num_bins)
    points = _points(sums, kept, bins)
    span = math.exp(points[-1][0] - points[0][0]) if points else 1.0
    if len(points) < _LEAST_BINS or span < LEAST_SPAN:
        raise ValueError(
            f"the lengths span too little: {len(points)} length bins, the longest {span:.2g} times the "
            f"shortest; at least {_LEAST_BINS} bins and {LEAST_SPAN:g} times are needed"
        )
    # Keep the bins: edges that jump to another length would count as noise.
    left = [_slope(_points(*(part[steps != number] for part in (sums, kept, bins)))) for number in numbers]
    half = student_t(len(numbers) - 1) * jackknife(left)
    value = _slope(points)
    return Exponent(value=value, interval=(value - half, value + half), span=span)


def _points(sums: Tensor, lengths: Tensor, bins: Tensor) -> list[tuple[float, float]]:
    """Return (log L, log spread) of every bin with a spread above 0, shortest first."""
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
    """Return the standard error of an estimate, from its values with one block left out at a time."""
    values = torch.tensor(left, dtype=torch.float64)
    return ((len(left) - 1) * values.var(correction=0)).sqrt().item()


def student_t(degrees: float) -> float:
    """Return the 97.5% quantile of Student's t: within 1% above 2 degrees of freedom (Abramowitz and Stegun
    26.7.5), exact at 2, and that of 1 below 2."""
    if degrees <= 2:
        return math.tan(math.pi * 0.475) if degrees < 2 else 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(z + sum(term / degrees**power for power, term in enumerate(terms, start=1)))


FASTEST, FARTHEST = 1.2, 2.0
"""Largest factors by which c follows σ̂, in a window and in all."""
LEAST_DRIFT = 0.1
"""The drift counts if it exceeds this share of a band's half width at the longest response."""
STEADY = 1.5
"""Largest ratio of σ̂ in two windows that counts as steady. c = 2σ̂ is then 1.3 to 3 times σ̂ of either."""

# Median of |Z| for a standard normal Z.
_NORMAL_MAD = 0.6744897501960817


def sigma_hat(log_ratio_sums: Tensor, lengths: Tensor, exponent: float = 0.5) -> float:
    """Return σ̂ = median_i(|S_i|/L_i^a) / 0.6745, the robust noise of S per unit of the band's width.

    For S ~ Normal(0, σ²L) and a = ½, this estimates σ. A median, because S/√L has very heavy tails: in one
    of our runs its kurtosis was 147 and its rms 3–4 times as large.

    Args:
        log_ratio_sums: S [N] in nats. Non-finite values are ignored.
        lengths: L [N], response tokens. Sequences with L = 0 are ignored.
        exponent: a of the band.

    Raises ``ValueError`` if no sequence remains.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    if len(sums) == 0:
        raise ValueError(f"no finite S with L > 0 among {len(log_ratio_sums)} sequences")
    return _median(sums.abs() / kept**exponent) / _NORMAL_MAD


def expected_drift(sigma: float) -> float:
    """Return −σ²/2, nats per token: the mean of S per token for responses that the old policy sampled.

    E_old[e^S] = 1, so a normal S of variance σ²L has the mean −σ²L/2, which is −KL(old‖new).
    """
    return 0.0 - sigma * sigma / 2.0


def centred_sigma(log_ratio_sums: Tensor, lengths: Tensor) -> float:
    """Return σ̂ of S − d·L, the spread of S [N] around its own drift d for L [N]; nats per √token.

    d, the median of S/L weighted by √L, minimises Σ|S − d·L|/√L. It contains the learning signal, so it
    centres the spread only, never a band. Raises ``ValueError`` as :func:`sigma_hat`.
    """
    sums, kept = usable(log_ratio_sums, lengths)
    slopes, order = (sums / kept).sort()
    weights = kept.sqrt()[order].cumsum(0)
    middle = slopes[(weights < weights[-1] / 2).sum()].item() if len(sums) else 0.0
    return sigma_hat(sums - middle * kept, kept)


class BandCalibrator:
    """Measures c = multiple·σ̂ over windows of off-policy mini-batches until two consecutive windows agree.

    The first updates of a run are not typical: Adam's can be ten times as large as later ones. So c is the
    smallest of the windows until σ̂ is steady, within a factor of :data:`STEADY`, and then that of the two
    steady windows for good. ``multiple`` = 2 puts about 5% of a normal S outside.

    Example::

        calibrator = BandCalibrator(mini_batches=6)      # two rollouts of three off-policy mini-batches
        ...
        calibrator.observe(log_ratio_sums, lengths)      # the whole mini-batch, from all ranks
        if calibrator.c is not None:
            band = FSPOBand(c_low=calibrator.c, c_high=calibrator.c, exponent=calibrator.exponent)

    ``exponent="measured"`` also measures a in the steady windows, limited to [½, 1]; c is then that of S/L^a.
    If this is impossible, the width stays √L and ``refusal`` says why. All ranks must observe the same
    sequences, or their bands differ.

    Args:
        mini_batches: per window: the off-policy ones of whole rollouts, as S grows within a rollout.
        follow: once steady, measure c again in each further window; it changes by at most a factor of
            :data:`FASTEST` each time, and of :data:`FARTHEST` in all.
    """

    def __init__(
        self,
        mini_batches: int = 4,
        multiple: float = 2.0,
        exponent: float | Literal["measured"] = 0.5,
        follow: bool = False,
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
            "follow": follow,
        }
        self.mini_batches = mini_batches
        self.c: float | None = None
        """Nats per token^a; None until the first window is full, constant once ``steady`` unless it is to
        follow σ̂."""
        self.steady_c: float | None = None
        """The c of the two windows that agreed; None until then."""
        self.exponent = 0.5 if exponent == "measured" else exponent
        """a of the band; if it is to be measured, ½ until ``steady``."""
        self.measured: Exponent | None = None
        """The exponent of S, if it was measured."""
        self.refusal: str | None = None
        """Why a could not be measured."""
        # |S| and L of the last full window and of the current one; emptied once σ̂ is steady.
        self._seen: list[tuple[list[float], list[float]]] = []

    @property
    def steady(self) -> bool:
        """True once two windows agreed."""
        return self.steady_c is not None

    def observe(self, log_ratio_sums: Tensor, lengths: Tensor) -> None:
        """Add S [N] in nats and L [N] of one off-policy mini-batch. Does nothing once ``steady`` unless c is
        to follow σ̂.

        A mini-batch without a finite S is ignored. Raises ``ValueError`` if the median |S| is 0, as in the
        first mini-batch after a rollout: on-policy S has no noise to measure.
        """
        if self.steady and not self._settings["follow"]:
            return
        sums, kept = usable(log_ratio_sums, lengths)
        if len(sums) == 0:
            return
        if _median(sums.abs()) == 0.0:
            raise ValueError(
                "the median |S| of this mini-batch is 0: it is on-policy, and only off-policy mini-batches "
                "can calibrate c"
            )
        self._seen.append((sums.abs().tolist(), kept.tolist()))
        size = self.mini_batches
        if len(self._seen) % size:
            return
        now = self._width(self._seen[-size:])
        if self.c is not None and self.steady_c is not None:
            now = min(max(now, self.c / FASTEST), self.c * FASTEST)
            self.c = min(max(now, self.steady_c / FARTHEST), self.steady_c * FARTHEST)
            self._seen = []
            return
        if len(self._seen) == 2 * size:
            before = self._width(self._seen[:size])
            if before / STEADY <= now <= before * STEADY:
                if self._settings["exponent"] == "measured":
                    self._measure_exponent()
                self.c = self.steady_c = self._width(self._seen)
                self._seen = []
                return
            self._seen = self._seen[size:]
        self.c = now if self.c is None else min(self.c, now)

    def _width(self, batches: Sequence[tuple[list[float], list[float]]]) -> float:
        return float(self._settings["multiple"]) * sigma_hat(*_pooled(batches), self.exponent)

    def _measure_exponent(self) -> None:
        sizes = torch.tensor([len(batch) for batch, _ in self._seen])
        try:
            blocks = torch.arange(len(sizes)).repeat_interleave(sizes)
            self.measured = measure_exponent(*_pooled(self._seen), blocks)
        except ValueError as error:
            self.refusal = str(error)
            return
        # ½ is pure noise, 1 a pure shift common to all tokens.
        self.exponent = min(max(self.measured.value, 0.5), 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and the settings it was measured with, as JSON types."""
        return {
            "settings": dict(self._settings),
            "c": self.c,
            "steady_c": self.steady_c,
            "exponent": self.exponent,
            "measured": None if self.measured is None else asdict(self.measured),
            "refusal": self.refusal,
            "seen": [[list(column) for column in batch] for batch in self._seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``. Raises ``ValueError`` if its settings differ."""
        if state["settings"] != self._settings:
            raise ValueError(
                f"this calibrator has {self._settings}, but its saved state was measured with "
                f"{state['settings']}"
            )
        self.c, self.steady_c = state["c"], state["steady_c"]
        self.exponent, self.refusal = state["exponent"], state["refusal"]
        measured = state["measured"]
        self.measured = (
            None if measured is None else Exponent(**measured | {"interval": tuple(measured["interval"])})
        )
        self._seen = [(list(sums), list(lengths)) for sums, lengths in state["seen"]]


def _pooled(batches: Sequence[tuple[list[float], list[float]]]) -> tuple[Tensor, Tensor]:
    """Return |S| and L of several mini-batches, concatenated."""
    sums, lengths = (
        torch.tensor([value for batch in column for value in batch], dtype=torch.float64)
        for column in zip(*batches, strict=True)
    )
    return sums, lengths


def _median(values: Tensor) -> float:
    # torch.median returns the lower of two middle values; this returns their mean.
    ordered = values.sort().values
    return (ordered[(len(values) - 1) // 2].item() + ordered[len(values) // 2].item()) / 2.0
