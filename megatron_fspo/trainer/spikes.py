"""Gradient spikes: an optimizer step whose gradient is far larger than those before it moves nothing.

Clipping bounds the size of such a step, not its direction, and Adam remembers it. The measure is the global
norm before clipping over the median of the last ones, which a few spikes do not move.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from megatron_fspo.config import Optimizer

FEWEST = 8
"""Norms that must be known before one is judged."""


class GradientSpikes:
    """What is remembered of the gradient norms of a run."""

    def __init__(self, options: Optimizer) -> None:
        self._ratio = options.skip_norm_ratio
        self._norms: deque[float] = deque(maxlen=options.skip_window)
        self.in_a_row = 0
        """Optimizer steps skipped since the last that was taken."""

    @property
    def on(self) -> bool:
        """Whether the run asks for it."""
        return self._ratio is not None

    @property
    def median(self) -> float:
        """Of the last norms; 0 while there are too few."""
        return median(self._norms) if len(self._norms) >= FEWEST else 0.0

    def is_spike(self, norm: float) -> bool:
        """Whether a step with this norm is to be skipped."""
        usual = self.median
        return self._ratio is not None and usual > 0 and norm > self._ratio * usual

    def taken(self, norm: float) -> None:
        """Remember the norm of an optimizer step that was taken; not 0, which a mini-batch without any
        advantage has."""
        self.in_a_row = 0
        if norm > 0:
            self._norms.append(norm)

    def skipped(self) -> None:
        """Count one that was not. Its norm is not remembered: spikes do not become usual."""
        self.in_a_row += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {"norms": list(self._norms), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; of more norms than ``optimizer.skip_window`` the last are kept."""
        self._norms.extend(state["norms"])
        self.in_a_row = state["in_a_row"]
