"""The responses of one step: what every rank knows of them, the tokens, which few ranks hold, and how the
tokens come into the packs of the ranks that train on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.backend import Backend
from megatron_fspo.mcore.sizes import shares_prompts
from megatron_fspo.packing.batch import NO_ROUTE, Packs, Sequences, as_row
from megatron_fspo.packing.pack import Pack, PackLayout, Plan, collate_packs, plan_step
from megatron_fspo.packing.plan import attention_costs
from megatron_fspo.parallel.groups import ParallelGroups, exchange, of_first_rank, pack_layout
from megatron_fspo.rewards import Grade
from megatron_fspo.types import ROW_START, WRITTEN, Completion, Prompt, Routing, VersionSpan
from megatron_fspo.weights import Architecture

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """n responses, ``samples`` to each prompt, prompt by prompt. Tensors are [n], on the CPU, and the same on
    every rank."""

    prompts: Sequence[Prompt]
    samples: int
    lengths: Tensor
    """int64, L: tokens of the response that the policy wrote, the stop token included."""
    response_lengths: Tensor
    """int64, all tokens after the prompt: more than L where an environment inserted some."""
    rewards: Tensor
    """float64: what is learned from."""
    scores: Tensor
    """float64: the grade of the first reward alone, what accuracy is made of."""
    advantages: Tensor
    """float64; NaN until they are known."""
    truncated: Tensor
    """bool: cut off at the longest length that was asked for."""
    oldest_version: Tensor
    """int64, of the weights that sampled any of it."""
    version_tokens: Tensor
    """int64, Σ over its L tokens of the version that sampled them."""
    spans: Tensor
    """int64, how many versions sampled it."""
    last_version: Tensor
    """int64, of the weights that sampled its end."""
    last_start: Tensor
    """int64, where in the response their tokens begin."""
    owner: Tensor
    """int64, the data-parallel rank that holds its tokens."""
    routed: Tensor
    """int64: 1 with the sampler's routes, -1 without, 0 where none were asked for."""
    turns: Tensor
    """int64, of the policy."""
    rows: Tensor
    """int64, of its trajectory: more than 1 where an environment wrote the context anew."""
    failures: Tensor
    """int64, replies of the environment that failed."""
    environment_seconds: Tensor
    """float64, that its replies took."""
    held: Mapping[int, Completion]
    """Responses that this rank holds, by number: on the first rank of each model copy; others hold none."""
    grades: Mapping[int, Grade]
    """Grades that this rank gave, by number; not always of what it holds."""
    route_problem: str = ""
    """Why the first response without routes that this rank held has none."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prompt_lengths(self) -> Tensor:
        """[n] int64."""
        return torch.tensor([len(prompt.token_ids) for prompt in self.prompts]).repeat_interleave(
            self.samples
        )

    @property
    def spread(self) -> Tensor:
        """[prompts] bool: the group teaches something, as not all of its advantages are 0."""
        return (self.advantages.view(-1, self.samples) != 0).any(1)

    def name(self, number: int) -> str:
        """Name a response in a message."""
        prompt = self.prompts[number // self.samples]
        return f"prompt {prompt.index}, response {number % self.samples}"

    def fresh_from(self, version: int) -> Tensor:
        """[n] position in prompt and response from which on all that follows was sampled by these weights."""
        first = torch.where(self.last_version == version, self.last_start, self.response_lengths)
        return self.prompt_lengths - 1 + first


COLUMNS = (
    *("lengths", "response_lengths", "truncated", "oldest_version", "version_tokens"),
    *("spans", "last_version", "last_start", "owner", "routed", "turns", "rows", "failures"),
    *("environment_seconds", "rewards", "scores"),
)
"""Fields of the table that ranks make together: those that :func:`describe` gives, in its order, then
:data:`GRADES`."""
GRADES = 2
"""The last columns, which the rank that grades fills in."""
_PER_RESPONSE = (*COLUMNS, "advantages")
_TYPES = {name: torch.float64 for name in ("environment_seconds", "rewards", "scores")}
_TYPES["truncated"] = torch.bool


def describe(completion: Completion, owner: int) -> tuple[float, ...]:
    """One response as numbers, without its grades; integers stay exact in float64."""
    whole = VersionSpan(version=completion.weight_version, start=0, end=len(completion.token_ids))
    spans = completion.version_spans or (whole,)
    turns = product(spans, completion.written)
    return (
        completion.length,
        len(completion.token_ids),
        completion.finish_reason == "length",
        completion.weight_version,
        sum(s.version * len(range(max(s.start, turn.start), min(s.end, turn.stop))) for s, turn in turns),
        len(spans),
        spans[-1].version,  # versions only grow
        spans[-1].start,
        owner,
        -1 if completion.route_problem else int(completion.routes is not None),
        len(completion.written),
        len(completion.row_starts) + 1,
        completion.failures,
        completion.environment_seconds,
    )


def rollout_of(
    prompts: Sequence[Prompt],
    samples: int,
    table: Tensor,
    held: Mapping[int, Completion],
    grades: Mapping[int, Grade] | None = None,
) -> Rollout:
    """Make one from a table [n, columns], the fields of :data:`COLUMNS`; advantages are still to come."""
    columns = {
        name: column.to(_TYPES.get(name, torch.long))
        for name, column in zip(COLUMNS, table.unbind(1), strict=True)
    }
    unknown = torch.full((len(table),), float("nan"), dtype=torch.float64)
    return Rollout(
        prompts=prompts,
        samples=samples,
        held=held,
        grades=grades or {},
        advantages=unknown,
        route_problem=next((one.route_problem for one in held.values() if one.route_problem), ""),
        **columns,
    )


def with_advantages(rollout: Rollout, advantages: Tensor) -> Rollout:
    """Return the rollout with these [prompts, samples] advantages."""
    return replace(rollout, advantages=advantages.flatten().double())


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """The groups of several rollouts, all of one size, one rollout after the other, each response with
    whoever holds it."""
    starts = list(accumulate(map(len, rollouts), initial=0))

    def renumbered(items: Sequence[Mapping[int, T]]) -> dict[int, T]:
        pairs = zip(starts, items, strict=False)
        return {start + number: item for start, some in pairs for number, item in some.items()}

    columns: dict[str, Any] = {
        name: torch.cat([getattr(one, name) for one in rollouts]) for name in _PER_RESPONSE
    }
    return replace(
        rollouts[0],
        prompts=[prompt for one in rollouts for prompt in one.prompts],
        held=renumbered([one.held for one in rollouts]),
        grades=renumbered([one.grades for one in rollouts]),
        **columns,
    )


def select(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Some groups of a rollout, in this order; their responses are numbered anew."""
    n = rollout.samples
    numbers = [group * n + i for group in groups for i in range(n)]
    columns: dict[str, Any] = {name: getattr(rollout, name)[numbers] for name in _PER_RESPONSE}
    return replace(
        rollout,
        prompts=[rollout.prompts[group] for group in groups],
        held={new: rollout.held[old] for new, old in enumerate(numbers) if old in rollout.held},
        grades={new: rollout.grades[old] for new, old in enumerate(numbers) if old in rollout.grades},
        **columns,
    )


def sampling_metrics(rollout: Rollout, *, environment: bool = False) -> dict[str, float]:
    """Rewards, advantages and lengths of one rollout: of all responses, in a pack or not.

    ``critic/no_spread`` is the share of groups whose advantages are all 0. With an environment: turns, rows,
    the seconds of its replies in a trajectory, the share of them that failed, and the share of the tokens
    after the prompts that it inserted.
    """
    columns = {
        "critic/score": rollout.scores,
        "critic/rewards": rollout.rewards,
        "critic/advantages": rollout.advantages,
        "response_length": rollout.lengths.double(),
        "prompt_length": rollout.prompt_lengths.double(),
    }
    metrics = {}
    for name, values in columns.items():
        metrics[f"{name}/mean"] = values.mean().item()
        metrics[f"{name}/max"] = values.max().item()
        metrics[f"{name}/min"] = values.min().item()
    metrics["response_length/clip_ratio"] = rollout.truncated.double().mean().item()
    metrics["critic/no_spread"] = (~rollout.spread).double().mean().item()
    if environment:
        columns = {"environment/turns": rollout.turns, "environment/rows": rollout.rows}
        columns["perf/environment_seconds"] = rollout.environment_seconds
        for name, values in columns.items():
            metrics |= {f"{name}/mean": values.double().mean().item(), f"{name}/max": values.max().item()}
        metrics["environment/failed"] = rollout.failures.sum().item() / rollout.turns.sum().item()
        tokens = rollout.response_lengths.sum().item()
        metrics["environment/inserted"] = 1 - rollout.lengths.sum().item() / max(tokens, 1)
    return metrics


def staleness_metrics(rollout: Rollout, step: int, *, limit: int) -> dict[str, float]:
    """Measure how many versions older than the trainer's the weights were that sampled.

    Returns:
        ``rollout/staleness/mean`` over tokens and ``/max``; ``rollout/partial``: share of responses that an
        update met half-way, so that several versions wrote them.

    Raises:
        TrainingError: a token is older than ``limit`` versions.
    """
    tokens = int(rollout.lengths.sum())
    oldest = step - int(rollout.oldest_version.min())
    if oldest > limit:
        raise TrainingError(
            f"step {step + 1}: a response is from weights {oldest} versions old, "
            f"rollout.max_staleness = {limit}"
        )
    return {
        "rollout/staleness/mean": (step * tokens - int(rollout.version_tokens.sum())) / max(tokens, 1),
        "rollout/staleness/max": float(oldest),
        "rollout/partial": (rollout.spans > 1).double().mean().item(),
    }


def layout_of(config: Config, arch: Architecture, groups: ParallelGroups, backend: Backend) -> PackLayout:
    """The layout that all packs of a run have."""
    costs = partial(attention_costs, linear_size=arch.layer_size, attention_size=arch.q_size)
    return replace(
        pack_layout(
            groups,
            backend.device,
            sequence=config.parallel.sequence,
            interleaved=config.parallel.interleaved,
            align=config.fp8.align,
        ),
        max_tokens=config.batch.max_tokens,
        costs=costs if config.batch.balance == "attention" else None,
        share_prompts=shares_prompts(config, backend.layers),
    )


def routing_of(config: Config, arch: Architecture) -> Routing | None:
    """What is asked of a sampler whose routes are replayed; None for any other."""
    if config.moe.replay != "rollout":
        return None
    assert arch.experts is not None  # prepare() refuses others
    return Routing(layers=arch.num_layers, experts=arch.num_experts, per_token=arch.experts.per_token)


def make_mini_batches(
    config: Config,
    rollout: Rollout,
    groups: ParallelGroups,
    layout: PackLayout,
    *,
    routing: Routing | None = None,
    layers: Sequence[int] = (),
) -> tuple[Packs, list[int]]:
    """This rank's micro-batches of all mini-batches, and how many each has; with ``routing`` they have the
    sampler's routes through ``layers``, those of the model that this rank has routers of. Collective.

    A mini-batch is a run of whole prompts. Every rank knows all lengths and computes the same plan, so N and
    T need no collective and do not depend on how the batch is split. Then each token goes from the rank
    that holds it to the one that trains on it.

    A response with A = 0 has no policy gradient. Unless a bonus on the entropy, a penalty on the KL or a loss
    of the routers wants it, it counts in N and T and is in no pack.
    """
    idle = left_out(config, rollout)
    prompt_lengths, response_lengths = rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist()
    lengths = rollout.lengths.tolist()
    prompts = [number // rollout.samples for number in range(len(rollout))]
    per_batch = len(rollout) // config.batch.mini_batches
    plans: list[Plan] = []
    packs: list[Pack] = []
    sizes: list[int] = []
    for first in range(0, len(rollout), per_batch):
        some = slice(first, first + per_batch)
        plan, totals = plan_step(
            prompt_lengths[some],
            response_lengths[some],
            layout,
            lengths=lengths[some],
            rows=rollout.rows[some].tolist(),
            first=first,
            left_out=idle[some].tolist(),
            prompts=prompts[some],
        )
        mine = plan[groups.dp.rank()]
        packs += [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine]
        plans.append(plan)
        sizes.append(len(mine))
    size, rank = groups.dp.size(), groups.dp.rank()
    owner = rollout.owner.tolist()
    wanted = [sorted(n for plan in plans for pack in plan[to] for n in pack) for to in range(size)]
    # In the order in which they come: owner after owner.
    numbers = sorted(wanted[rank], key=lambda number: (owner[number], number))
    here = rollout.response_lengths[numbers].tolist()
    bring = partial(_bring, rollout, wanted, groups, layout.device)
    token_ids, log_probs = (
        torch.split(bring(name, dtype, sum(here)), here)
        for name, dtype in (("token_ids", torch.int32), ("log_probs", torch.float32))
    )
    inserted = bool((rollout.lengths < rollout.response_lengths).any())
    kinds = bring("kinds", torch.uint8, sum(here)) if inserted else None
    routes = None if routing is None else _routes(rollout, numbers, bring, routing, layers)
    sequences = Sequences.of(
        prompts=[rollout.prompts[number // rollout.samples].token_ids for number in numbers],
        responses=token_ids,
        log_probs=log_probs,
        advantages=rollout.advantages[numbers],
        index=numbers,
        written=None if kinds is None else kinds == WRITTEN,
        row_starts=None if kinds is None else kinds == ROW_START,
        routes=routes,
    )
    return collate_packs(sequences, packs, layout), sizes


def _bring(
    rollout: Rollout,
    wanted: Sequence[Sequence[int]],
    groups: ParallelGroups,
    device: torch.device | str,
    name: str,
    dtype: torch.dtype,
    size: int,
) -> Tensor:
    """[size]: a field of the responses that this rank's model copy wants, of those that have it, owner after
    owner. Collective."""
    # The first ranks of the model copies exchange them; each hands its own on to those that share its model.
    if groups.first_of_copy:
        rows = [[getattr(rollout.held[n], name) for n in to if n in rollout.held] for to in wanted]
        outgoing = [[as_row(row, dtype).flatten() for row in some if row is not None] for some in rows]
        flat, _ = exchange(outgoing, dtype, group=groups.dp)
    else:
        flat = torch.zeros(size, dtype=dtype)
    return of_first_rank(flat.to(device), groups.pp, groups.cp, groups.tp).cpu()


def _routes(
    rollout: Rollout,
    numbers: Sequence[int],
    bring: Callable[[str, torch.dtype, int], Tensor],
    routing: Routing,
    layers: Sequence[int],
) -> Tensor:
    """uint8 [Σ (P + R - 1), layers, k] of these responses; those without have no route. Collective."""
    tokens = (rollout.prompt_lengths + rollout.response_lengths - 1)[numbers]
    known = (rollout.routed[numbers] > 0).repeat_interleave(tokens)
    shape = (int(known.sum()), routing.layers, routing.per_token)
    sent = bring("routes", torch.uint8, math.prod(shape)).view(shape)
    routes = sent.new_full((len(known), len(layers), routing.per_token), NO_ROUTE)
    routes[known] = sent[:, list(layers)]
    return routes


def left_out(config: Config, rollout: Rollout, dropped: Sequence[int] = ()) -> Tensor:
    """bool [responses]: which are in no pack; ``dropped`` are numbers of those that had to leave theirs."""
    loss, moe = config.loss, config.moe
    others = loss.entropy_coef or loss.kl_coef or moe.aux_loss_coef or moe.z_loss_coef
    idle = rollout.lengths < 0 if others else rollout.advantages == 0
    return idle.index_fill(0, torch.tensor(dropped, dtype=torch.long), True)
