"""Find the responses that make a pass not finite, and take them out of the packs.

A NaN or an infinity that is born inside the network reaches the gradient of every weight: backward multiplies
it by the weight 0 that the loss gives its sequence, and 0·NaN is NaN. So such a response has to leave the
packs. Attention keeps the sequences of a pack apart, but a kernel with one scale for a whole pack may not.
Therefore nobody is taken for the culprit because of the pack that it is in: each suspect is scored alone.
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
    """Numbers of the responses of this data-parallel rank with a log-prob that is not finite, by the scores
    [t] of the labels of each of its packs. Collective."""
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
    """Responses that have to leave the packs, each with its data-parallel rank. Collective.

    They are the suspects that are not finite in a pack of their own. Where that is none of a pack's suspects,
    as after a fault that does not come again, all of them have to leave. So there are some if there are
    suspects.

    Args:
        packs: of this rank.
        suspects: numbers of this data-parallel rank's responses that were not finite in these packs.
        score: gives log-probs [t] of micro-batches; forward only.
        layout: that the packs have.
        groups: of the job's layout.

    Returns:
        the same on every rank, in the order of the numbers; empty if no rank has suspects.
    """
    most = max(gather_lists([len(suspects)], group=groups.dp))
    if not most:
        return {}
    # As many packs on every rank as on the one with the most suspects; the others' last ones are empty.
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
    """The packs of this rank with their columns, less some responses, whose numbers are those of all ranks. N
    and T of the step stay as they are; ``tokens`` of each pack are how many response tokens leave its
    optimizer step, over all ranks."""
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
    """A column [t, …] of a pack at the tokens of the sequences that stay, which keep their order. A prefix
    that only one of its sequences is left of lies before it, as its own tokens do."""
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
    """Places of the packs whose own gradient is not finite, and the numbers of the responses that all ranks
    have there. For an error: one more pass forward and backward. Leaves no gradient. Collective.

    A gradient comes from the packs at one place of all data-parallel ranks together. The interleaved schedule
    takes several places at a time.
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
