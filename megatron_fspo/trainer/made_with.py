"""What old log-probs depend on besides weights and tokens: the precision, and with some recipes the packs.

A step under way that is read back from a checkpoint has the old log-probs of the run that was stopped, and
new packs. Old and new log-probs must come from the same products, or S is noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fspo.config import Config
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.errors import InputError
from megatron_fspo.trainer.batches import no_term_but_the_policy_gradient

_PRECISION = ("model.dtype", *(f"fp8.{name}" for name in FP8.model_fields))
_PACKS = (
    *("batch.mini_batches", "batch.max_tokens", "batch.balance"),
    *(f"parallel.{name}" for name in ("tensor", "sequence", "pipeline", "virtual_pipeline", "context")),
)
_RANKS = "the number of ranks"
_ALL_PACKED = "loss.entropy_coef > 0 or loss.kl_coef > 0"


def made_with(config: Config, ranks: int) -> dict[str, Any]:
    """By key, as JSON types; ``ranks`` of the whole job."""
    values = {
        "model": {"dtype": config.model.dtype},
        "fp8": (config.fp8 if config.fp8.on else BF16).model_dump(mode="json"),
        "batch": config.batch.model_dump(mode="json"),
        "parallel": config.parallel.model_dump(mode="json"),
    }
    found = {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}
    found |= {_RANKS: ranks, _ALL_PACKED: not no_term_but_the_policy_gradient(config)}
    return {key: found[key] for key in (*_PRECISION, *_PACKS, _RANKS, _ALL_PACKED)}


def check_made_with(config: Config, ranks: int, before: Mapping[str, Any] | None) -> None:
    """``InputError`` where this run's log-probs are not comparable with those of a step under way.

    Without FP8, and with a scale for every few values, packs change the last digits only. One scale per
    tensor is that of the largest value in the pack, and changes all.

    Args:
        before: what :func:`made_with` gave; None in a checkpoint that was written before there was FP8.
    """
    if config.rollout.old_log_probs == "sampled":
        return
    now = made_with(config, ranks)
    # Checkpoints were without a dtype once: it was the same then, or nobody can tell.
    was = {"model.dtype": config.model.dtype} | dict(
        before or made_with(config.model_copy(update={"fp8": BF16}), ranks)
    )
    for key in now if config.fp8.scales_span_packs else _PRECISION:
        if was[key] != now[key]:
            why = "were computed in another precision" if key in _PRECISION else "depend on the packs"
            raise InputError(
                f"{key}: {was[key]} -> {now[key]} within a step: with model.dtype = {config.model.dtype} and "
                f"fp8.recipe = {config.fp8.recipe} the old log-probs of the step under way {why}. Set it "
                "back, and change it between two steps"
            )
