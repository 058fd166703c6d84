"""Mistakes, planted into the traced process one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.config.fp8 import FP8
from megatron_fspo.mcore.model import policy, policy_loss
from megatron_fspo.mcore.state import offload
from megatron_fspo.packing.batch import MicroBatch


@contextmanager
def _replaced(holder: Any, name: str, new: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, new)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _in_loss(extra: Callable[[MicroBatch, Any], object]) -> Any:
    """Something more, where the metrics of a micro-batch are made."""
    before = policy_loss._metrics

    def metrics(batch: MicroBatch, log_ratio: Any, entropy: Any, kl_gap: Any, terms: Any) -> Any:
        extra(batch, terms)
        return before(batch, log_ratio, entropy, kl_gap, terms)

    return _replaced(policy_loss, "_metrics", metrics)


def _in_head(extra: Callable[[Any, Any], object]) -> Any:
    """Something more, before the head."""
    before = policy_loss.Scoring.__call__

    def call(self: Any, batch: MicroBatch, hidden: Any, model: Any) -> Any:
        held = extra(hidden[0], policy_loss._gpt(model).output_layer.weight)
        out = before(self, batch, hidden, model)
        del held
        return out

    return _replaced(policy_loss.Scoring, "__call__", call)


def _read_early(batch: MicroBatch, terms: Any) -> object:
    host = torch.empty(terms.log_ratio_sum.shape, dtype=terms.log_ratio_sum.dtype, pin_memory=True)
    host.copy_(terms.log_ratio_sum, non_blocking=True)
    return host.sum()


def host_mask() -> Any:
    return _in_loss(
        lambda batch, terms: batch.loss_mask & torch.ones(batch.loss_mask.shape, dtype=torch.bool)
    )


def item() -> Any:
    return _in_loss(lambda batch, terms: terms.objective.item())


def row_by_row() -> Any:
    return _in_loss(lambda batch, terms: [row.tolist() for row in terms.log_ratio_sum])


def pageable_copy() -> Any:
    return _in_loss(lambda batch, terms: torch.zeros(64).to(batch.loss_mask.device))


def all_reduce() -> Any:
    return _in_loss(lambda batch, terms: dist.all_reduce(terms.objective.clone()))


def logits() -> Any:
    return _in_head(lambda hidden, weight: hidden.repeat(7, 1) @ weight.t())


def wrong_group() -> Any:
    before = policy.sum_metrics

    def sum_metrics(parts: Any, *, group: Any) -> Any:
        return before(parts, group=dist.group.WORLD)

    return _replaced(policy, "sum_metrics", sum_metrics)


def float64() -> Any:
    return _in_head(lambda hidden, weight: hidden.double())


def read_early() -> Any:
    return _in_loss(_read_early)


def not_lent() -> Any:
    lend = offload.Offloadable.lend
    return _replaced(offload.Offloadable, "lend", lambda self: lend(self) if self._kept else None)


def short_rows() -> Any:
    return _replaced(FP8, "align", property(lambda self: 16))


def nonzero() -> Any:
    return _in_loss(lambda batch, terms: batch.loss_mask.nonzero())
