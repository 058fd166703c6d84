"""FSPO: one importance ratio per response, clipped to a band that grows as √L."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, median_low
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, model_validator
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.losses.common import Definition, Loss, LossState, pessimistic_minimum
from megatron_fspo.objective import ConstantDualClip, DualClip, FSPOBand, LengthFairDualClip, SequenceLevel
from megatron_fspo.objective.band import DEFAULT_C, WIDE_C
from megatron_fspo.objective.calibration import (
    FASTEST,
    LEAST_DRIFT,
    BandCalibrator,
    centred_sigma,
    fit_exponent,
    usable,
)
from megatron_fspo.objective.noise import Noise
from megatron_fspo.section import Share

WATCHED = 5
"""Number of consecutive steps, after the warm-up and with the same c, whose medians judge c."""
C_OVER_SIGMA = (1.5, 3.0)
CLIP_RATE = (0.01, 0.4)
"""A band within both ranges is neither too wide nor too narrow; ours."""
LEAST_ESS = 0.25
"""Effective sample size of the longest responses, as a share, below which a run warns; ours."""

Width = Annotated[float, Field(gt=0, le=3)]  # a single token's ratio of e^3 = 20


class FSPOLoss(Loss):
    """FSPO (arXiv 2509.09177): clip S to a band that grows as √L; mean over sequences.

    `J = min(e^S A, e^clip(S) A)`, where clip limits S to [-c_low w + d L, c_high w + d L]; w is L^exponent,
    and d is the drift. The paper's abstract has the √L band; S as a sum, the minimum and two widths are
    second-hand; the dual clip, other exponents, `temper`, `calibrate`, `noise` and the forms of the drift are
    ours.
    """

    VERIFIED: ClassVar = {
        "fspo": {"c_low": 0.05, "c_high": 0.05},
        "fspo-drift": dict(c_low=0.04, c_high=0.06, drift="given", drift_value=-0.002, dual_clip="off"),
        "fspo-dual": {"c_low": 0.05, "c_high": 0.02, "c_dual": 0.02},
        "fspo-temper": {"c_low": 0.05, "c_high": 0.04, "c_dual": 0.05, "temper": 0.4},
        "fspo-turn": {"c_low": 0.05, "c_high": 0.04, "c_dual": 0.06, "unit": "turn"},
        "fspo-entropy-kl": dict(
            c_low=0.05, c_high=0.05, dual_clip="constant", dual_clip_ratio=1.2, entropy_coef=0.3, kl_coef=0.2
        ),
    }
    RUN_KEYS: ClassVar = frozenset(
        {"unit", "calibrate", "recalibrate", "drift", "drift_value", "noise", "max_noise_clip_rate"}
    )
    LIMITS: ClassVar = ("c_low", "c_high")

    name: Literal["fspo"] = "fspo"
    unit: Literal["trajectory", "turn"] = Field(
        "trajectory",
        description="what has one S and one clip decision: the whole response, or each turn (ours)",
    )
    c_low: Width = Field(DEFAULT_C, description="lower edge: -c_low * L^exponent + drift * L, in nats")
    c_high: Width = Field(DEFAULT_C, description="upper edge: c_high * L^exponent + drift * L, in nats")
    exponent: Annotated[float, Field(ge=0, le=1)] | Literal["measured"] = Field(
        0.5,
        description="0.5 in the paper; measured: `calibrate` measures it with the width, from 0.5 to 1",
    )
    temper: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="b of the importance weight exp(S / L^b); 0 is FSPO. Clip decisions do not depend on it",
    )
    calibrate: NonNegativeInt | None = Field(
        None,
        description="after the warm-up, set the mean of c_low and c_high to 2 sigma-hat until two windows of "
        "this many off-policy mini-batches agree. 0: off; none: two rollouts if c_low = c_high = 0.03",
    )
    recalibrate: bool = Field(
        False,
        description="measure c again in each further window; it changes by at most a factor of 1.2 a window, "
        "and of 2 in all",
    )
    drift: Literal["auto", "none", "given"] = Field(
        "auto",
        description="centre of the band per token, off-policy. auto: -sigma-hat^2/2 of S, with the sampler's "
        "log-probs that of `noise`, where it exceeds a tenth of the half width; given: `drift_value`",
    )
    drift_value: float = Field(0.0, description="nats per token, for drift = given")
    dual_clip: Literal["off", "length_fair", "constant"] = Field(
        "length_fair",
        description="upper limit of S for A < 0. length_fair: c_dual * L^exponent + drift * L; constant: "
        "log(dual_clip_ratio)",
    )
    noise: Path | None = Field(None, description="file from `megatron-fspo calibrate`: the noise in S")
    max_noise_clip_rate: Share = Field(
        0.05,
        description="refuse a run if `noise` alone puts a larger share of any length's responses out of band",
    )
    c_dual: Annotated[float, Field(gt=0)] | None = Field(
        None, description="for dual_clip = length_fair; at least c_high; default: 2 * c_high"
    )
    dual_clip_ratio: Annotated[float, Field(gt=1)] = Field(3.0, description="for dual_clip = constant")

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> FSPOLoss:
        if self.c_dual is not None and self.c_dual < self.c_high:
            raise ValueError(
                f"loss.c_dual = {self.c_dual:g} is less than loss.c_high = {self.c_high:g}: the dual clip "
                "would lie inside the band"
            )
        if self.exponent == "measured" and (self.calibrate or 0) < 3:
            raise ValueError(
                f"loss.exponent = measured needs loss.calibrate of 3 or more, not {self.calibrate}"
            )
        return self

    def with_band(
        self,
        *,
        c_low: float | None = None,
        c_high: float | None = None,
        drift: float | None = None,
        exponent: float | None = None,
    ) -> FSPOLoss:
        """Return the loss with another band; ``c_dual`` scales with ``c_high``, and None leaves a key
        unchanged."""
        changes: dict[str, Any] = {"c_low": c_low, "c_high": c_high, "exponent": exponent}
        changes |= {} if drift is None else {"drift": "given", "drift_value": drift}
        if self.c_dual is not None and c_high is not None:
            changes["c_dual"] = self.c_dual * c_high / self.c_high
        return self.model_copy(update={key: value for key, value in changes.items() if value is not None})

    def band(self) -> FSPOBand:
        """Return the band of these keys: without drift if it is to be estimated, and of width √L if the
        exponent is still to be measured; see :meth:`with_band`."""
        drift = self.drift_value if self.drift == "given" else 0.0
        power = 0.5 if self.exponent == "measured" else self.exponent
        return FSPOBand(c_low=self.c_low, c_high=self.c_high, drift=drift, exponent=power)

    def objective(self) -> SequenceLevel:
        band = self.band()
        clip: DualClip | None = None
        if self.dual_clip == "length_fair":
            c = self.c_dual or 2 * self.c_high
            clip = LengthFairDualClip(c=c, exponent=band.exponent, drift=band.drift)
        elif self.dual_clip == "constant":
            clip = ConstantDualClip(ratio=self.dual_clip_ratio)
        return SequenceLevel(band=band, dual_clip=clip, temper=self.temper, unit=self.unit)

    def definition(self, log_ratio: Tensor, advantage: float, log_probs: Tensor) -> Definition:
        # The reference for `verify` and tests; training uses objective().
        length, s = len(log_ratio), log_ratio.sum()[None]
        width = length ** (0.5 if self.exponent == "measured" else self.exponent)
        centre = self.drift_value * length if self.drift == "given" else 0.0
        inside = s.clamp(centre - self.c_low * width, centre + self.c_high * width)
        limit = None
        if self.dual_clip == "length_fair":
            edge = (self.c_dual or 2 * self.c_high) * width + centre
            limit = _growth(s.new_tensor([edge]), length, self.temper)
        elif self.dual_clip == "constant":
            limit = _growth(s.new_tensor([self.dual_clip_ratio]).log(), length, self.temper)
        growth, held = (_growth(value, length, self.temper) for value in (s, inside))
        objective, clipped = pessimistic_minimum(s, advantage, growth, held, limit)
        return Definition(objective=objective, clipped=clipped, out_of_band=bool(s != inside))

    def scaled(self, factor: float) -> FSPOLoss:
        wider = self.with_band(c_low=factor * self.c_low, c_high=factor * self.c_high)
        return wider.model_copy(update={"calibrate": 0})

    def fitted(self, log_ratio_sums: Tensor, lengths: Tensor) -> FSPOLoss:
        if self.exponent != "measured":
            return self
        exponent = fit_exponent(log_ratio_sums, lengths)
        return self.model_copy(update={"exponent": min(max(0.5, exponent), 1.0)})  # NaN becomes 0.5

    def start(
        self, noise: Noise | None = None, *, longest: int, updates: int = 1, rollouts: int = 0
    ) -> FSPOState:
        return FSPOState(self, noise, longest=longest, window=self._window(updates, rollouts))

    def _window(self, updates: int, rollouts: int) -> int:
        """Return the off-policy mini-batches of a calibration window, of whole rollouts with ``updates`` of
        them each; 0: c is fixed. ``rollouts`` are those after the warm-up."""
        if self.calibrate is None:
            default = self.c_low == self.c_high == DEFAULT_C
            return 2 * updates if default and rollouts >= 4 else 0
        return math.ceil(self.calibrate / updates) * updates if self.calibrate else 0

    def check(self, *, off_policy_updates: int, sampled: bool) -> None:
        """Raise ``ValueError`` if there is nothing to measure the width from."""
        if self.calibrate and not off_policy_updates:
            raise ValueError(
                f"loss.calibrate = {self.calibrate} has nothing to measure: with one optimizer step per "
                "rollout, S is always 0. Set batch.mini_batches * batch.epochs > 1, or "
                "rollout.old_log_probs = sampled"
            )

    def notes(self, *, rollouts: int, off_policy_updates: int) -> list[str]:
        if not off_policy_updates:
            return [
                "every optimizer step is on-policy, so S = 0 and FSPO clips nothing. Set "
                "batch.mini_batches * batch.epochs > 1, or rollout.old_log_probs = sampled"
            ]
        notes = []
        if not self.calibrate and max(self.c_low, self.c_high) >= WIDE_C:
            notes.append(
                f"loss.c_low = {self.c_low:g} and loss.c_high = {self.c_high:g} limit S in nats per √token, "
                "not a ratio: 0.2 allows a ratio of e^6.3 at 1000 tokens. loss.calibrate measures c "
                "(docs/choosing_c.md)"
            )
        needed = self._window(off_policy_updates, rollouts) // off_policy_updates
        if 2 * needed > rollouts:
            notes.append(
                f"loss.calibrate = {self.calibrate} will not finish within run.steps: it needs "
                f"two windows of {needed} steps after the warm-up, which leaves {rollouts}"
            )
        return notes

    def noise_file(self) -> Path | None:
        return self.noise

    def check_noise(self, noise: Noise, lengths: Sequence[int], origin: str) -> None:
        band = self.start(noise, longest=max(lengths)).section().band()
        rates = noise.clip_rates(torch.tensor(lengths), band)
        if (worst := rates.max().item()) > self.max_noise_clip_rate:
            raise InputError(
                f"the band lies inside the noise: {origin} alone puts {worst:.1%} of the responses of "
                f"{lengths[int(rates.argmax())]} tokens outside c_low = {self.c_low:g}, c_high = "
                f"{self.c_high:g}; loss.max_noise_clip_rate allows {self.max_noise_clip_rate:.1%}. "
                f"{self.noise} has the smallest c"
            )

    def without_noise(self) -> FSPOLoss:
        return self.model_copy(update={"noise": None})

    def from_metrics(self, last: Callable[[str], float]) -> FSPOLoss | None:
        c_low, c_high, drift = map(last, ("fspo/c_low", "fspo/c_high", "fspo/drift"))
        if math.isnan(c_low + c_high + drift):
            return None
        known = None if math.isnan(exponent := last("fspo/exponent")) else exponent
        return self.with_band(c_low=c_low, c_high=c_high, drift=drift, exponent=known)


class FSPOState(LossState):
    """The band of FSPO during a run: its width, from calibration on whole rollouts, and its centre.

    S has the mean −σ²L/2 (``calibration.expected_drift``), and σ grows with each update on a rollout. So σ̂ is
    the median of the last rollouts at the same optimizer step, or at the last of the first epoch: later, S is
    of responses that were trained on, whose spread is learning. Its limit is c·L^(a − ½), twice as large:
    beyond, a centre that follows would let a policy that runs away run further.
    """

    def __init__(self, loss: FSPOLoss, noise: Noise | None, *, longest: int, window: int) -> None:
        self._loss: FSPOLoss = loss
        self._noise, self._longest = noise, longest
        self._recent: deque[tuple[float, ...]] = deque(maxlen=WATCHED)  # c, σ̂, clip rate, ESS of long ones
        self._calibrator: BandCalibrator | None = None
        self._spreads: dict[int, list[float]] = {}
        """Optimizer step of a rollout → σ̂ of the last :data:`WATCHED` rollouts."""
        self._seen = 0
        """Longest response observed."""
        if window:
            self._calibrator = BandCalibrator(window, exponent=loss.exponent, follow=loss.recalibrate)

    def section(self, *, on_policy: bool = False, update: int = 2**31) -> FSPOLoss:
        """Return the loss with the band of an optimizer step of a rollout; by default, of the last."""
        loss = self._loss
        # c is the mean of c_low and c_high, which keep their ratio.
        if self._calibrator is not None and (c := self._calibrator.c) is not None:
            scale = 2 * c / (loss.c_low + loss.c_high)
            exponent = self._calibrator.exponent
            loss = loss.with_band(c_low=scale * loss.c_low, c_high=scale * loss.c_high, exponent=exponent)
        if loss.drift != "auto":
            return loss
        loss = loss.with_band(drift=0.0)
        if on_policy:
            return loss
        noise = self._noise if self._noise is not None and self._noise.of_sampler else None
        drift, variance = (0.0, 0.0) if noise is None else (noise.drift, noise.spread**2)
        length, a = float(self._seen or self._longest), loss.band().exponent
        # Not one rollout: Adam's first updates can be ten times as large as later ones.
        if known := [step for step, spreads in self._spreads.items() if step <= update and len(spreads) > 1]:
            most = (loss.c_low + loss.c_high) / 2 * length ** max(a - 0.5, 0.0)  # in nats / sqrt(token)
            sigma = min(median_low(self._spreads[max(known)]), most)
            drift -= max(sigma**2 - variance, 0.0) / 2
        low, high = loss.band().bounds(torch.tensor([length], dtype=torch.float64))
        matters = abs(drift) * length > LEAST_DRIFT * min(-low.item(), high.item())
        return loss.with_band(drift=drift) if matters else loss

    def objective(self, *, on_policy: bool = False, update: int = 2**31) -> SequenceLevel:
        return self.section(on_policy=on_policy, update=update).objective()

    def observe(
        self, log_ratio_sums: Tensor, lengths: Tensor, *, update: int, warm: bool, fresh: bool = True
    ) -> None:
        log_ratio_sums, lengths = usable(log_ratio_sums, lengths)
        if not len(lengths) or not log_ratio_sums.abs().median():  # the policy has not moved
            return
        if self._loss.drift == "auto" and fresh:
            self._seen = max(self._seen, int(lengths.max()))
            spread = centred_sigma(log_ratio_sums, lengths)
            self._spreads[update] = [*self._spreads.get(update, []), spread][-WATCHED:]
        if warm and self._calibrator is not None:
            drift = self.section(update=update).band().drift
            self._calibrator.observe(log_ratio_sums - drift * lengths if drift else log_ratio_sums, lengths)

    def calibrated(self) -> str | None:
        calibrator, loss = self._calibrator, self._loss
        if calibrator is None or calibrator.c is None:
            return None
        # Where c follows σ̂, its first value: a line of the log for every change would be too many.
        scale = 2 * (calibrator.steady_c or calibrator.c) / (loss.c_low + loss.c_high)
        text = f"c_low = {scale * loss.c_low:.4g}, c_high = {scale * loss.c_high:.4g}"
        if not calibrator.steady:
            return f"{text}; provisional: the next {calibrator.mini_batches} mini-batches check it"
        if calibrator.measured is not None:
            low, high = calibrator.measured.interval
            text += (
                f", exponent = {calibrator.exponent:.3f} (S grows as L^{calibrator.measured.value:.3f}, 95% "
                f"interval {low:.3f} to {high:.3f})"
            )
        elif calibrator.refusal is not None:
            text += f"; the band keeps its exponent, which cannot be measured: {calibrator.refusal}"
        return text

    def metrics(self) -> dict[str, float]:
        band = self.section().band()
        return {f"fspo/{name}": getattr(band, name) for name in ("c_low", "c_high", "drift", "exponent")}

    def noise_metrics(self, lengths: Tensor, out_of_band: float) -> dict[str, float]:
        """Return the share that noise alone is expected to put out of band, and its part of that outside."""
        if self._noise is None or not len(lengths):
            return {}
        rate = self._noise.clip_rates(lengths, self.section().band()).mean().item()
        share = min(1.0, rate / out_of_band) if out_of_band else math.nan
        return {"fspo/noise_clip_rate": rate, "fspo/noise_clip_share": share}

    def width_warnings(self, metrics: Mapping[str, float], *, warm: bool) -> dict[str, str]:
        names = ("fspo/c_low", "fspo/c_high", "fspo/sigma_hat", "actor/pg_clipfrac")
        c_low, c_high, sigma, clipped = (metrics.get(name, math.nan) for name in names)
        if not (warm and c_low + c_high > 0 and sigma > 0 and clipped >= 0):
            return {}
        c = (c_low + c_high) / 2
        if self._recent and abs(math.log(c / self._recent[-1][0])) > math.log(FASTEST) + 1e-6:
            self._recent.clear()  # not c that follows, but another one
        ess = [metrics[name] for n in range(8) if (name := f"fspo/ess/bin_{n}") in metrics]
        self._recent.append((c, sigma, clipped, ess[-1] if ess else math.nan))
        if len(self._recent) < WATCHED:
            return {}
        _, sigma, clipped, carry = (median(column) for column in zip(*self._recent, strict=True))
        ratio, (low, high), (least, most) = c / sigma, C_OVER_SIGMA, CLIP_RATE
        measured = self._calibrator is not None and self._calibrator.c is not None
        origin = f"c was measured when sigma-hat was {c / 2:.2g}" if measured else "c was configured"
        text = (
            f"c = {c:.3g} is {ratio:.2g} times sigma-hat ({sigma:.3g}), and {clipped:.1%} of the responses "
            f"are clipped (medians of the last {WATCHED} steps); expected are {low:g} to {high:g} times and "
            f"{least:.0%} to {most:.0%}. {origin}; 2 sigma-hat is now {2 * sigma:.2g}. See docs/choosing_c.md"
        )
        doubts = {}
        if ratio < low or clipped > most:
            doubts["narrow band"] = text
        elif ratio > high or clipped < least:
            doubts["wide band"] = text
        if carry < LEAST_ESS:
            doubts["weights"] = (
                f"the longest responses count like {carry:.0%} of their number (fspo/ess of the last bin). "
                "Take fewer optimizer steps per rollout, or set loss.temper = 0.5"
            )
        return doubts

    def state_dict(self) -> dict[str, Any]:
        calibrator = None if self._calibrator is None else self._calibrator.state_dict()
        spreads = {str(update): list(spreads) for update, spreads in self._spreads.items()}
        return {"spreads": spreads, "longest": self._seen, "calibrator": calibrator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the band of a checkpoint. Raises ``InputError`` if it was measured otherwise."""
        self._spreads = {int(update): list(spreads) for update, spreads in state.get("spreads", {}).items()}
        self._seen = state.get("longest", 0)
        measured = state.get("calibrator")
        if self._calibrator is not None and measured is not None:
            try:
                self._calibrator.load_state_dict(measured)
            except ValueError as error:
                raise InputError(f"loss.calibrate or loss.exponent has changed: {error}") from None


def _growth(s: Tensor, length: int, temper: float) -> Tensor:
    """Return the integral of exp(S / L^b) over S that is 1 at S = 0: exp(S) for b = 0."""
    scale: float = length**temper
    growth: Tensor = 1 + scale * torch.special.expm1(s / scale)
    return growth
