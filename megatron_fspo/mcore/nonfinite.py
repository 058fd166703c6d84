"""Identify responses that cause NaN or infinite values, and remove them from the packs.

A loss weight of 0 does not help: a NaN or an infinity inside the network still reaches the gradient of every
weight, because 0·NaN is NaN. So such a response must be removed from its pack. Attention separates the
sequences of a pack, but a kernel with one scale for the whole pack may spread the NaN, so each suspect is
scored in a pack of its own before it is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_fspo.mcore.policy import Policy
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.packing.batch import NO_ROUTE, MicroBatch, Packs
from megatron_fspo.packing.pack import Pack, PackLayout, collate_packs
from megatron_fspo.parallel.groups import ParallelGroups, agreed, gather_lists, share


def suspects_of(packs: Packs, scores: Sequence[Tensor], groups: ParallelGroups) -> list[int]:
    """Return the numbers of this data-parallel rank's responses that have a non-finite log-prob, given the
    log-probs [t] of each of its packs. Collective."""
    suspects: list[int] = []
    finite = torch.stack([score.isfinite().all() for score in scores]).tolist()  # one copy for all packs
    for batch, score, fine in zip(packs.on_host, scores, finite, strict=True):
        if not fine:
            rows = torch.unique(batch.segment[batch.mask & ~score.cpu().isfinite()])
            suspects += batch.sample_index[rows].tolist()
    suspects = sorted(set(gather_lists(suspects, group=groups.cp)))
    return share(share(suspects, group=groups.tp), group=groups.pp)


def culprits(
    packs: Packs,
    suspects: Sequence[int],
    *,
    score: Callable[[Sequence[MicroBatch]], list[Tensor]],
    layout: PackLayout,
    groups: ParallelGroups,
) -> dict[int, int]:
    """Return the responses to remove from the packs: number → data-parallel rank, on every rank. Collective.

    These are the suspects with non-finite log-probs in a pack of their own, by ``score``, which returns the
    log-probs [t] of micro-batches. If none of a pack's suspects has any there, for example after a transient
    fault, all of them are removed. ``suspects`` are the result of :func:`suspects_of`.
    """
    most = max(gather_lists([len(suspects)], group=groups.dp))
    if not most:
        return {}
    # Every rank needs as many packs as the one with the most suspects; the additional ones are empty.
    count = most + -most % layout.count_multiple_of
    wanted = [Pack(numbers=(n,), totals=packs.totals) for n in suspects]
    wanted += [Pack(numbers=(), totals=packs.totals)] * (count - len(wanted))
    alone = collate_packs(packs.sequences, wanted, layout)
    guilty = {
        pack.numbers[0]
        for pack, batch, values in zip(wanted, alone, score(alone), strict=True)
        if pack.numbers and not values[batch.mask].isfinite().all()
    }
    guilty = set(gather_lists(sorted(guilty), group=groups.dp_cp))
    mine: set[int] = set()
    for batch in packs.on_host:
        here = set(batch.sample_index.tolist()) & set(suspects)
        mine |= here & guilty or here
    rank = groups.dp.rank()
    return agreed(dict(sorted(gather_lists([(n, rank) for n in mine], group=groups.dp))), groups)


def without(packs: Packs, numbers: Collection[int], tokens: Sequence[int], layout: PackLayout) -> Packs:
    """Return this rank's packs and their columns without some responses; N and T of the step do not change.
    ``numbers`` may include responses of other ranks; ``tokens`` is, for each pack, the number of response
    tokens removed from its optimizer step over all ranks."""
    kept = [
        Pack(
            numbers=tuple(n for n in batch.sample_index.tolist() if n not in numbers),
            totals=replace(batch.totals, packed_tokens=batch.totals.packed_tokens - gone),
        )
        for batch, gone in zip(packs.on_host, tokens, strict=True)
    ]
    new = collate_packs(packs.sequences, kept, layout)
    columns = {
        name: [
            _carried(column, before, after, numbers)
            for column, before, after in zip(tensors, packs.on_host, new.on_host, strict=True)
        ]
        for name, tensors in packs.columns.items()
    }
    return new.with_columns(**columns)


def _carried(column: Tensor, before: MicroBatch, after: MicroBatch, gone: Collection[int]) -> Tensor:
    """Restrict a column [t, …] of a pack to the tokens of the sequences that stay, in the same order. A
    prefix with only one sequence left becomes the beginning of that sequence, at the same place."""
    stays = torch.tensor([*(n not in gone for n in before.sample_index.tolist()), False])
    kept = stays[before.segment]
    for prefix in before.prefixes:
        kept[prefix.start : prefix.end] = stays[list(prefix.sequences)].any()
    rows = kept.nonzero()[:, 0]
    carried = column.new_full((len(after.mask), *column.shape[1:]), NO_ROUTE if column.ndim > 1 else 0)
    carried[after.uses.nonzero()[:, 0].to(column.device)] = column[rows.to(column.device)]
    return carried


def packs_to_blame(
    policy: Policy, packs: Packs, loss: PolicyLoss, *, layout: PackLayout
) -> list[tuple[range, list[int]]]:
    """Return (indices, numbers of responses) of packs with a non-finite gradient, for an error message.

    Collective. Runs forward and backward once more, and leaves no gradient. A gradient includes the packs at
    one index (with the interleaved schedule, several) on all data-parallel ranks.
    """
    blamed = []
    for first in range(0, len(packs), layout.count_multiple_of):
        together = packs[first : first + layout.count_multiple_of]
        policy.backward(together, loss)
        if not math.isfinite(policy.grad_norm()):
            mine = [n for batch in together.on_host for n in batch.sample_index.tolist()]
            blamed.append(
                (range(first, first + len(together)), sorted(gather_lists(mine, group=policy.groups.dp)))
            )
    policy.zero_gradients()
    return blamed
