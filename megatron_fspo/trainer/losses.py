"""The loss of a run as it stands now: its section of the configuration, with the band where it has moved to.

Only FSPO has moving parts: the scale of its widths (until it is calibrated), with it the exponent and, where
asked for, an estimate of its drift.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.losses import FSPOLoss, PolicyLossConfig
from megatron_fspo.objective.calibration import BandCalibrator, drift_from_kl, drift_from_sigma
from megatron_fspo.objective.losses import PolicyObjective
from megatron_fspo.objective.noise import Noise

WATCHED = 5
"""Steps in a row, with one width of the band and after the warm-up, whose medians judge that width."""
C_OVER_SIGMA = (1.5, 3.0)
CLIP_RATE = (0.01, 0.4)
"""Within these limits a band is neither too wide nor too narrow; ours."""


class LossState:
    """The loss of a run.

    Args:
        updates: off-policy optimizer steps of one rollout. Calibration looks at whole rollouts.
        noise: in S, where it was measured.
        longest: response of the run, in tokens. An estimated drift moves the band nowhere up to this length
            by more than its half width: S = 0 is always inside.
    """

    def __init__(
        self, loss: PolicyLossConfig, noise: Noise | None = None, *, longest: int, updates: int = 1
    ) -> None:
        self._loss = loss
        self._longest = longest
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WATCHED)  # c, σ̂, clip rate
        self._calibrator: BandCalibrator | None = None
        self._estimate = 0.0
        if isinstance(loss, FSPOLoss):
            if loss.drift == "measured" and noise is not None:
                self._loss = loss.centred(noise.drift)
            if loss.calibrate:
                window = math.ceil(loss.calibrate / updates) * updates
                self._calibrator = BandCalibrator(mini_batches=window, exponent=loss.exponent)

    def section(self, *, on_policy: bool = False) -> PolicyLossConfig:
        """The section as it stands.

        Args:
            on_policy: for an update before which no other has moved the policy. S is 0 there and has no
                drift, so an estimate of it from the last rollout does not count.
        """
        loss = self._loss
        if not isinstance(loss, FSPOLoss):
            return loss
        # c stands for both sides of a band that may have two widths.
        if self._calibrator is not None and (c := self._calibrator.c) is not None:
            scale = 2 * c / (loss.c_low + loss.c_high)
            exponent = self._calibrator.exponent
            loss = loss.moved(c_low=scale * loss.c_low, c_high=scale * loss.c_high, exponent=exponent)
        if loss.drift not in ("k3", "half_variance"):
            return loss
        # A little less than the half width: rounding must not put S = 0 outside.
        limit = 0.999 * min(loss.c_low, loss.c_high) * self._longest ** (loss.band().exponent - 1)
        return loss.centred(0.0 if on_policy else max(self._estimate, -limit))

    def objective(self, *, on_policy: bool = False) -> PolicyObjective:
        """For the next optimizer step; ``on_policy`` as :meth:`section` has it."""
        return self.section(on_policy=on_policy).objective()

    def observe(
        self, log_ratio_sums: Tensor, lengths: Tensor, *, kl_k3: float, sigma: float | None, warm: bool
    ) -> None:
        """Learn from one off-policy mini-batch, over all ranks.

        Args:
            log_ratio_sums, lengths: [N] S and L.
            kl_k3: KL per token by the k3 estimator.
            sigma: σ̂ of these sequences, if there were any.
            warm: whether this rollout began after the learning rate's warm-up. Smaller steps make smaller
                S: a width measured during the warm-up would be too narrow for the rest of the run.
        """
        loss = self._loss
        if not isinstance(loss, FSPOLoss):
            return
        # σ̂ = 0: no update has moved the policy yet (every advantage was 0, say).
        if warm and sigma and self._calibrator is not None:
            self._calibrator.observe(log_ratio_sums, lengths)
        if loss.drift == "k3" and math.isfinite(kl_k3):
            self._estimate = drift_from_kl(max(kl_k3, 0.0), loss.drift_cap)
        elif loss.drift == "half_variance" and sigma is not None:
            self._estimate = drift_from_sigma(sigma, loss.drift_cap)

    def metrics(self) -> dict[str, float]:
        """The band of off-policy updates as it stands, for FSPO."""
        loss = self.section()
        if not isinstance(loss, FSPOLoss):
            return {}
        band = loss.band()
        metrics = {"fspo/c_low": band.c_low, "fspo/c_high": band.c_high, "fspo/drift": band.drift}
        return metrics | {"fspo/exponent": band.exponent}

    def doubts(self, metrics: Mapping[str, float], *, warm: bool) -> dict[str, str]:
        """What is wrong with the width of FSPO's band, by topic, after one more step.

        Args:
            metrics: of the step, those of this loss among them.
            warm: as :meth:`observe` has it; the small S of a warm-up say nothing.
        """
        names = ("fspo/c_low", "fspo/c_high", "fspo/sigma_hat", "actor/pg_clipfrac")
        if not warm or not all(name in metrics for name in names) or not metrics["fspo/sigma_hat"] > 0:
            return {}
        c_low, c_high, sigma, clipped = (metrics[name] for name in names)
        c = (c_low + c_high) / 2
        if self._recent and self._recent[-1][0] != c:
            self._recent.clear()
        self._recent.append((c, sigma, clipped))
        if len(self._recent) < WATCHED:
            return {}
        _, sigma, clipped = (median(column) for column in zip(*self._recent, strict=True))
        ratio, (low, high), (least, most) = c / sigma, C_OVER_SIGMA, CLIP_RATE
        measured = self._calibrator is not None and self._calibrator.c is not None
        origin = f"c was measured when sigma-hat was {c / 2:.2g}" if measured else "c is the one given"
        text = (
            f"c = {c:.3g} is {ratio:.2g} sigma-hat ({sigma:.3g}) and {clipped:.1%} of the responses are "
            f"clipped, by the medians of the last {WATCHED} steps; in order are {low:g} to {high:g} and "
            f"{least:.0%} to {most:.0%}. {origin}; c = 2 sigma-hat is {2 * sigma:.2g} now: docs/choosing_c.md"
        )
        if ratio < low or clipped > most:
            return {"narrow band": text}
        if ratio > high or clipped < least:
            return {"wide band": text}
        return {}

    def calibrated(self) -> str | None:
        """What calibration measured, in words; None until it has."""
        found, loss = self._calibrator, self.section()
        if found is None or found.c is None or not isinstance(loss, FSPOLoss):
            return None
        text = f"c_low = {loss.c_low:.4g}, c_high = {loss.c_high:.4g}"
        if not found.steady:
            return f"{text}, until two windows of {found.mini_batches} mini-batches agree on sigma-hat"
        if found.measured is not None:
            low, high = found.measured.interval
            text += (
                f", exponent = {found.exponent:.3f} (measured {found.measured.value:.3f}, 95% interval "
                f"{low:.3f} to {high:.3f})"
            )
        elif found.refusal is not None:
            text += f"; the exponent stays {found.exponent:g}, it cannot be measured: {found.refusal}"
        return text

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        calibrator = None if self._calibrator is None else self._calibrator.state_dict()
        return {"drift": self._estimate, "calibrator": calibrator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the band of a checkpoint; keys of the configuration win over it."""
        if isinstance(self._loss, FSPOLoss) and self._loss.drift in ("k3", "half_variance"):
            self._estimate = state["drift"]
        if self._calibrator is not None and state["calibrator"] is not None:
            try:
                self._calibrator.load_state_dict(state["calibrator"])
            except ValueError as error:
                raise InputError(f"loss.calibrate or loss.exponent is not what it was: {error}") from None


def band_notes(config: Config) -> list[str]:
    """What to tell the user of the band before the run begins."""
    loss, updates = config.loss, config.batch.mini_batches * config.batch.epochs
    if not isinstance(loss, FSPOLoss):
        return []
    if not config.off_policy_updates:
        return [
            "every optimizer step is on policy, where S = 0: FSPO clips nothing. It acts with "
            "batch.mini_batches * batch.epochs > 1, or rollout.old_log_probs = sampled"
        ]
    notes = []
    if not loss.calibrate and max(loss.c_low, loss.c_high) >= 0.2:
        notes.append(
            f"loss.c_low = {loss.c_low:g} and loss.c_high = {loss.c_high:g} are nats per √token of S. 0.2, a "
            "usual limit of ratios, is e^6.3 for 1000 tokens; loss.calibrate measures c (docs/choosing_c.md)"
        )
    # The first rollout that begins after the warm-up.
    warm = max(config.run.steps - math.ceil(config.optimizer.warmup_steps / updates), 0)
    rollouts = math.ceil(loss.calibrate / config.off_policy_updates)
    if 2 * rollouts > warm:
        notes.append(
            f"loss.calibrate = {loss.calibrate} will not be done within run.steps = {config.run.steps}: it "
            f"needs two windows of {rollouts} steps, and {warm} begin after the warm-up"
        )
    return notes
