"""Mistakes, planted into the traced process one at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.config.fp8 import FP8
from megatron_fspo.mcore.machine import startup
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


def not_connected() -> Any:
    return _replaced(startup, "connect_groups", lambda *_: None)


def short_rows() -> Any:
    return _replaced(FP8, "align", property(lambda self: 16))


def nonzero() -> Any:
    return _in_loss(lambda batch, terms: batch.loss_mask.nonzero())


# Mistakes of one rank of a job, which the others do not make.


def _in_call(name: str, number: int, change: Callable[..., Any]) -> Any:
    """Another call in place of one to ``torch.distributed``, counted from 0 after those that connect groups;
    ``change`` is given that and its arguments."""
    before, seen = getattr(dist, name), count()

    def call(*args: Any, **kwargs: Any) -> Any:
        connects = sys._getframe(1).f_code is startup.connect_groups.__code__
        return (
            change(before, *args, **kwargs)
            if not connects and next(seen) == number
            else before(*args, **kwargs)
        )

    return _replaced(dist, name, call)


def skipped() -> Any:
    return _replaced(policy, "any_rank", lambda flag, *, device: flag)


def other_dtype() -> Any:
    return _in_call(
        "all_reduce", 5, lambda call, tensor, *args, **kwargs: call(tensor.half(), *args, **kwargs)
    )


def other_count() -> Any:
    return _in_call(
        "all_reduce", 5, lambda call, tensor, *args, **kwargs: call(tensor.repeat(2), *args, **kwargs)
    )


def one_more() -> Any:
    def twice(call: Any, *args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return call(*args, **kwargs)

    return _in_call("all_reduce", 5, twice)


def other_root() -> Any:
    def last(call: Any, tensor: Any, src: int, group: Any) -> Any:
        return call(tensor, src=dist.get_process_group_ranks(group)[-1], group=group)

    return _in_call("broadcast", 2, last)


def fewer_batches() -> Any:
    run = policy.run_schedule

    def short(models: Any, batches: Any, step: Any, **kwargs: Any) -> Any:
        return run(models, batches if kwargs["forward_only"] else batches[:-1], step, **kwargs)

    return _replaced(policy, "run_schedule", short)


def other_order() -> Any:
    """A reduction of all ranks after the next one of some."""
    before, held = dist.all_reduce, []

    def later(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is None and not held:
            return held.append((tensor, args, kwargs))
        out = before(tensor, *args, group=group, **kwargs)
        if group is not None and group.size() > 1 and held and held[0] is not None:
            before(held[0][0], *held[0][1], **held[0][2])
            held[0] = None
        return out

    return _replaced(dist, "all_reduce", later)


def both_send() -> Any:
    """Sending to the stage before it what it should receive from there: the last hidden states."""

    def send(call: Any, messages: Any) -> Any:
        return call([dist.P2POp(dist.isend, one.tensor, one.peer, one.group) for one in messages])

    # In the old pass four messages and their shapes are received; in an update two, and two are sent.
    return _in_call("batch_isend_irecv", 8 + 6 + 3, send)


def uneven_pieces() -> Any:
    def other(call: Any, out: Any, given: Any, takes: Any = None, gives: Any = None, **kwargs: Any) -> Any:
        gives = [gives[0] + 1, gives[1] - 1, *gives[2:]]
        return call(out, given, output_split_sizes=takes, input_split_sizes=gives, **kwargs)

    def named(call: Any, out: Any, given: Any, **kwargs: Any) -> Any:
        takes, gives = kwargs.pop("output_split_sizes"), kwargs.pop("input_split_sizes")
        return other(call, out, given, takes, gives, **kwargs)

    return _in_call("all_to_all_single", 6, named)
