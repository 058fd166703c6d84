"""One rollout → mini-batches (optimizer steps) → this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.packing.pack import Pack, PackLayout, Packs, Plan, collate_packs, plan_step
from megatron_fspo.packing.plan import attention_costs
from megatron_fspo.packing.sequences import Sequences, as_row
from megatron_fspo.parallel.exchange import exchange
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank, pack_layout
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.sampling import is_first_of_copy
from megatron_fspo.weights import Architecture


def make_mini_batches(
    config: Config,
    arch: Architecture,
    rollout: Rollout,
    groups: ParallelGroups,
    device: torch.device,
) -> tuple[Packs, list[int]]:
    """This rank's micro-batches of all mini-batches, and how many each has. Collective.

    A mini-batch is a run of whole prompts. Every rank knows all lengths and computes the same plan, so N and
    T need no collective and do not depend on how the batch is split. Then each token goes from the rank
    that holds it to the one that trains on it.

    A response with A = 0 has no policy gradient. Unless a bonus on the entropy or a penalty on the KL wants
    it, it counts in N and T and is in no pack.
    """
    layout = _layout(config, arch, groups, device)
    idle = left_out(config, rollout)
    prompt_lengths, lengths = rollout.prompt_lengths.tolist(), rollout.lengths.tolist()
    per_batch = len(rollout) // config.batch.mini_batches
    plans: list[Plan] = []
    packs: list[Pack] = []
    sizes: list[int] = []
    for first in range(0, len(rollout), per_batch):
        part = slice(first, first + per_batch)
        plan, totals = plan_step(
            prompt_lengths[part], lengths[part], layout, first=first, left_out=idle[part].tolist()
        )
        mine = plan[groups.dp.rank()]
        packs += [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine]
        plans.append(plan)
        sizes.append(len(mine))
    return collate_packs(_spread(rollout, plans, groups, device), packs, layout), sizes


def left_out(config: Config, rollout: Rollout, dropped: Sequence[int] = ()) -> Tensor:
    """bool [responses]: which are in no pack; ``dropped`` are numbers of those that had to leave theirs."""
    only_policy_gradient = not config.loss.entropy_coef and not config.loss.kl_coef
    idle = rollout.advantages == 0 if only_policy_gradient else rollout.lengths < 0
    return idle.index_fill(0, torch.tensor(dropped, dtype=torch.long), True)


def _layout(config: Config, arch: Architecture, groups: ParallelGroups, device: torch.device) -> PackLayout:
    def costs(tokens: Sequence[int]) -> list[int]:
        return attention_costs(tokens, linear_size=arch.layer_size, attention_size=arch.q_size)

    return replace(
        pack_layout(
            groups,
            device,
            sequence=config.parallel.sequence,
            interleaved=config.parallel.interleaved,
            align=config.fp8.align,
        ),
        max_tokens=config.batch.max_tokens,
        costs=costs if config.batch.balance == "attention" else None,
    )


def split(packs: Packs, sizes: Sequence[int]) -> list[Packs]:
    """Runs of so many packs, one after the other."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [packs[start:end] for start, end in pairwise(ends)]


def _spread(
    rollout: Rollout, plans: Sequence[Plan], groups: ParallelGroups, device: torch.device
) -> Sequences:
    """The sequences that this data-parallel rank's packs need. Collective.

    The first ranks of the model copies exchange them; each hands its own on to those that share its model.
    """
    size, rank = groups.dp.size(), groups.dp.rank()
    owner = rollout.owner.tolist()
    wanted = [sorted(n for plan in plans for pack in plan[to] for n in pack) for to in range(size)]
    # In the order in which they come: owner after owner.
    numbers = sorted(wanted[rank], key=lambda number: (owner[number], number))
    lengths = rollout.lengths[numbers].tolist()
    prompts = [rollout.prompts[number // rollout.samples].token_ids for number in numbers]

    def column(name: str, dtype: torch.dtype) -> list[Tensor]:
        if is_first_of_copy(groups):
            parts = [[as_row(getattr(held[n], name), dtype) for n in to if n in held] for to in wanted]
            flat, _ = exchange(parts, dtype, group=groups.dp)
        else:
            flat = torch.zeros(sum(lengths), dtype=dtype)
        flat = of_first_rank(flat.to(device), groups.pp, groups.cp, groups.tp).cpu()
        return list(flat.split(lengths))

    held = rollout.held
    return Sequences.of(
        prompts=prompts,
        responses=column("token_ids", torch.int32),
        log_probs=column("log_probs", torch.float32),
        advantages=rollout.advantages[numbers],
        index=numbers,
    )
