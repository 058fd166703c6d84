"""The responses of one step: a table that all ranks have, tokens that only some ranks hold, and the exchange
of tokens for the packs of the ranks that train on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.evaluation.intervals import t_half_width
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.sizes import shares_prompts
from megatron_fspo.packing.batch import MicroBatches, Sequences, as_row, no_route, route_dtype
from megatron_fspo.packing.pack import Pack, PackLayout, Plan, collate_packs, plan_step
from megatron_fspo.packing.plan import attention_costs
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first, exchange, pack_layout
from megatron_fspo.rewards import Grade
from megatron_fspo.types import Completion, Prompt, Routing
from megatron_fspo.weights import Architecture

T = TypeVar("T")


def _column(
    value: Callable[[Completion, int], float] | None, dtype: torch.dtype = torch.long
) -> dict[str, Any]:
    """Make a field of :class:`Rollout` a column of the table that ranks fill together. ``value`` takes a
    response and the data-parallel rank that holds it; None: the rank that grades fills the column."""
    return {"value": value, "dtype": dtype}


def _version_tokens(completion: Completion) -> int:
    return sum(span.version * sum(completion.loss_mask[span.start : span.end]) for span in completion.spans)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The n responses of a step, ordered by prompt, with ``samples`` per prompt. Tensors are [n], on the CPU,
    and the same on every rank."""

    prompts: Sequence[Prompt]
    samples: int
    lengths: Tensor = field(metadata=_column(lambda one, _: one.length))
    """int64 L: response tokens that the policy wrote, including the stop token."""
    response_lengths: Tensor = field(metadata=_column(lambda one, _: len(one.token_ids)))
    """int64: all tokens after the prompt; more than L if an environment inserted some."""
    rewards: Tensor = field(metadata=_column(None, torch.float64))
    """float64: the rewards used for learning."""
    scores: Tensor = field(metadata=_column(None, torch.float64))
    """float64: the scores of the first reward alone, used for accuracy."""
    advantages: Tensor
    """float64; NaN until they are computed."""
    truncated: Tensor = field(metadata=_column(lambda one, _: one.finish_reason == "length", torch.bool))
    """bool: True if the response reached a length limit."""
    oldest_version: Tensor = field(metadata=_column(lambda one, _: one.weight_version))
    """int64: oldest weight version that sampled any of its tokens."""
    version_tokens: Tensor = field(metadata=_column(lambda one, _: _version_tokens(one)))
    """int64: sum over its L tokens of the weight versions that sampled them."""
    spans: Tensor = field(metadata=_column(lambda one, _: len(one.spans)))
    """int64: number of weight versions that sampled it."""
    last_version: Tensor = field(metadata=_column(lambda one, _: one.spans[-1].version))
    """int64: weight version that sampled its end, the newest."""
    last_start: Tensor = field(metadata=_column(lambda one, _: one.spans[-1].start))
    """int64: position in the response at which the tokens of ``last_version`` begin."""
    owner: Tensor = field(metadata=_column(lambda _, owner: owner))
    """int64: data-parallel rank that holds its tokens."""
    routed: Tensor = field(
        metadata=_column(lambda one, _: -1 if one.route_problem else int(one.routes is not None))
    )
    """int64: 1 with the sampler's routes, -1 without, 0 if none were requested."""
    turns: Tensor = field(metadata=_column(lambda one, _: len(one.turns)))
    """int64: turns of the policy."""
    rows: Tensor = field(metadata=_column(lambda one, _: len(one.row_starts) + 1))
    """int64: rows of its trajectory; more than 1 if an environment rewrote the context."""
    failures: Tensor = field(metadata=_column(lambda one, _: one.failures))
    """int64: environment replies that failed."""
    environment_seconds: Tensor = field(
        metadata=_column(lambda one, _: one.environment_seconds, torch.float64)
    )
    """float64: total time of the environment's replies."""
    held: Mapping[int, Completion]
    """Responses that this rank holds, by number; only the first rank of each model replica holds any."""
    grades: Mapping[int, Grade]
    """Grades that this rank computed, by number; not always of responses that it holds."""
    route_problem: str = ""
    """Why the first response held by this rank without routes has none."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prompt_lengths(self) -> Tensor:
        """int64 [n]: number of prompt tokens."""
        lengths = torch.tensor([len(prompt.token_ids) for prompt in self.prompts])
        return lengths.repeat_interleave(self.samples)

    @property
    def has_variance(self) -> Tensor:
        """bool [prompts]: True if not all advantages of the group are 0."""
        return (self.advantages.view(-1, self.samples) != 0).any(1)

    def name(self, number: int) -> str:
        """Name a response, for messages."""
        prompt = self.prompts[number // self.samples]
        return f"prompt {prompt.index}, response {number % self.samples}"

    def fresh_from(self, version: int) -> Tensor:
        """Return int64 [n]: position in prompt and response after which ``version`` sampled all tokens."""
        first = torch.where(self.last_version == version, self.last_start, self.response_lengths)
        return self.prompt_lengths - 1 + first


_COLUMNS = tuple(column for column in fields(Rollout) if column.metadata)
COLUMNS = tuple(column.name for column in _COLUMNS)
"""Columns of the table that ranks fill together."""
GRADES = [COLUMNS.index("rewards"), COLUMNS.index("scores")]
_PER_RESPONSE = (*COLUMNS, "advantages")


def describe(completion: Completion, owner: int, reward: float = 0.0, score: float = 0.0) -> list[float]:
    """Return the table row of a response that data-parallel rank ``owner`` holds; integers stay exact in
    float64."""
    grades = {"rewards": reward, "scores": score}
    values = ((column.name, column.metadata["value"]) for column in _COLUMNS)
    return [float(grades[name] if value is None else value(completion, owner)) for name, value in values]


def make_rollout(
    prompts: Sequence[Prompt],
    samples: int,
    table: Tensor,
    held: Mapping[int, Completion],
    grades: Mapping[int, Grade] | None = None,
) -> Rollout:
    """Create a rollout, without advantages, from a table [n, columns] with :data:`COLUMNS`."""
    columns = {
        spec.name: column.to(spec.metadata["dtype"])
        for spec, column in zip(_COLUMNS, table.unbind(1), strict=True)
    }
    unknown = torch.full((len(table),), float("nan"), dtype=torch.float64)
    return Rollout(
        prompts=prompts,
        samples=samples,
        held=held,
        grades=grades or {},
        advantages=unknown,
        route_problem=next(
            (completion.route_problem for completion in held.values() if completion.route_problem), ""
        ),
        **columns,
    )


def with_advantages(rollout: Rollout, advantages: Tensor) -> Rollout:
    """Return the rollout with these advantages [prompts, samples]."""
    return replace(rollout, advantages=advantages.flatten().double())


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate the groups of several rollouts with the same number of samples; responses stay on the ranks
    that hold them."""
    starts = list(accumulate(map(len, rollouts), initial=0))

    def renumbered(items: Sequence[Mapping[int, T]]) -> dict[int, T]:
        pairs = zip(starts, items, strict=False)
        return {start + number: item for start, items in pairs for number, item in items.items()}

    columns: dict[str, Any] = {
        name: torch.cat([getattr(rollout, name) for rollout in rollouts]) for name in _PER_RESPONSE
    }
    return replace(
        rollouts[0],
        prompts=[prompt for rollout in rollouts for prompt in rollout.prompts],
        held=renumbered([rollout.held for rollout in rollouts]),
        grades=renumbered([rollout.grades for rollout in rollouts]),
        **columns,
    )


def select(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Return a rollout of some groups, in this order; responses are renumbered."""
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


def sampling_metrics(rollout: Rollout, *, environment: bool = False, graded: bool = True) -> dict[str, float]:
    """Return metrics of lengths, and if ``graded`` of rewards (the mean with its 95% interval) and
    advantages, over all responses.

    ``critic/zero_variance_groups`` is the share of groups whose advantages are all 0. With an environment:
    turns, rows, seconds of replies per trajectory, failures per turn, inserted share of tokens after prompts.
    """
    columns = {"response_length": rollout.lengths.double(), "prompt_length": rollout.prompt_lengths.double()}
    if graded:
        columns["critic/score"] = rollout.scores
        columns["critic/rewards"] = rollout.rewards
        columns["critic/advantages"] = rollout.advantages
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics[f"{name}/mean"] = values.mean().item()
        metrics[f"{name}/max"] = values.max().item()
        metrics[f"{name}/min"] = values.min().item()
    if not graded:
        return metrics
    half = t_half_width(rollout.rewards.view(-1, rollout.samples).mean(1).tolist())
    mean = metrics["critic/rewards/mean"]
    metrics |= {"critic/rewards/mean/low": mean - half, "critic/rewards/mean/high": mean + half}
    metrics["response_length/clip_ratio"] = rollout.truncated.double().mean().item()
    metrics["critic/zero_variance_groups"] = (~rollout.has_variance).double().mean().item()
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
    """Return ``rollout/staleness/mean`` (over tokens) and ``/max``, the number of versions by which sampling
    weights are behind the trainer's, ``step``; and ``rollout/partial``, the share of responses sampled by
    several versions. Raises ``TrainingError`` if a token is more than ``limit`` versions old."""
    tokens = int(rollout.lengths.sum())
    oldest = step - int(rollout.oldest_version.min())
    if oldest > limit:
        raise TrainingError(
            f"step {step + 1}: a response is from weights {oldest} versions old, "
            f"but rollout.max_staleness = {limit}"
        )
    return {
        "rollout/staleness/mean": (step * tokens - int(rollout.version_tokens.sum())) / max(tokens, 1),
        "rollout/staleness/max": float(oldest),
        "rollout/partial": (rollout.spans > 1).double().mean().item(),
    }


def make_layout(config: Config, arch: Architecture, groups: ParallelGroups, backend: Backend) -> PackLayout:
    """Return the layout of all packs of a run."""
    pairs = arch.q_size * arch.softmax_layers // arch.num_layers
    costs = partial(attention_costs, linear_size=arch.layer_size, attention_size=pairs)
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
        share_prompts=shares_prompts(config, backend.layers, arch),
    )


def make_routing(config: Config, arch: Architecture) -> Routing | None:
    """Return the sizes of the sampler's routes if the run replays them, else None."""
    if config.moe.replay != "rollout":
        return None
    assert arch.experts is not None  # prepare() checks this
    sizes = {"layers": arch.num_layers, "experts": arch.num_experts, "per_token": arch.experts.per_token}
    return Routing(**sizes, dense=arch.dense_layers)


def make_mini_batches(
    config: Config,
    rollout: Rollout,
    groups: ParallelGroups,
    layout: PackLayout,
    *,
    routing: Routing | None = None,
    layers: Sequence[int] = (),
) -> tuple[MicroBatches, list[int]]:
    """Return this rank's micro-batches of all mini-batches, and their number in each. With ``routing`` they
    have the sampler's routes through ``layers``, the layers with routers on this rank. Collective.

    A mini-batch has consecutive prompts. Every rank knows all lengths and computes the same plan, so N and T
    need no collective and do not depend on how the batch is split. Tokens are then sent from the ranks that
    hold them to the ranks that train on them.

    A response with A = 0 has no policy gradient: it counts in N and T but is in no pack, unless an entropy
    bonus, a KL penalty or a router loss needs it.
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
        span = slice(first, first + per_batch)
        plan, totals = plan_step(
            prompt_lengths[span],
            response_lengths[span],
            layout,
            lengths=lengths[span],
            rows=rollout.rows[span].tolist(),
            first=first,
            left_out=idle[span].tolist(),
            prompts=prompts[span],
        )
        mine = plan[groups.dp.rank()]
        packs += [Pack(numbers=tuple(numbers), totals=totals) for numbers in mine]
        plans.append(plan)
        sizes.append(len(mine))
    size, rank = groups.dp.size(), groups.dp.rank()
    owner = rollout.owner.tolist()
    wanted = [sorted(n for plan in plans for pack in plan[to] for n in pack) for to in range(size)]
    # In the order in which they arrive: by owner.
    numbers = sorted(wanted[rank], key=lambda number: (owner[number], number))
    here, starts = rollout.response_lengths[numbers].tolist(), (rollout.rows[numbers] - 1).tolist()
    bring = partial(_bring, rollout, wanted, groups, layout.device)
    inserted = bool((rollout.lengths < rollout.response_lengths).any())
    sequences = Sequences.of(
        prompts=[rollout.prompts[number // rollout.samples].token_ids for number in numbers],
        responses=bring("token_ids", torch.int32, here),
        log_probs=bring("log_probs", torch.float32, here),
        advantages=rollout.advantages[numbers],
        index=numbers,
        loss_mask=bring("loss_mask", torch.uint8, here) if inserted else None,
        reference=bring("reference", torch.float32, here) if config.teacher.urls else None,
        row_starts=bring("row_starts", torch.int32, starts) if inserted else None,
        routes=None if routing is None else _routes(rollout, numbers, bring, routing, layers),
    )
    return collate_packs(sequences, packs, layout), sizes


def _bring(
    rollout: Rollout,
    wanted: Sequence[Sequence[int]],
    groups: ParallelGroups,
    device: torch.device | str,
    name: str,
    dtype: torch.dtype,
    sizes: list[int],
) -> tuple[Tensor, ...]:
    """Return pieces of these sizes of a field of all responses that this rank's replica trains on and that
    have it, ordered by owner. Collective."""
    # The first ranks of the model replicas exchange values and broadcast them within their copies.
    if groups.is_replica_leader:
        values = [[getattr(rollout.held[n], name) for n in to if n in rollout.held] for to in wanted]
        rows = [[as_row(x, dtype).flatten() for x in part if x is not None] for part in values]
        # As bytes: NCCL has no int16.
        outgoing = [[row.view(torch.uint8) for row in part] for part in rows]
        flat, _ = exchange(outgoing, torch.uint8, group=groups.dp)
    else:
        flat = torch.zeros(sum(sizes) * dtype.itemsize, dtype=torch.uint8)
    whole = broadcast_first(flat.to(device), groups.pp, groups.cp, groups.tp).cpu().view(dtype)
    return torch.split(whole, sizes)


def _routes(
    rollout: Rollout,
    numbers: Sequence[int],
    bring: Callable[[str, torch.dtype, list[int]], tuple[Tensor, ...]],
    routing: Routing,
    layers: Sequence[int],
) -> Tensor:
    """Return the responses' routes [Σ (P + R − 1), layers, k], ``no_route`` if unknown. Collective."""
    tokens = (rollout.prompt_lengths + rollout.response_lengths - 1)[numbers]
    known = (rollout.routed[numbers] > 0).repeat_interleave(tokens)
    shape = (int(known.sum()), routing.layers, routing.per_token)
    dtype = route_dtype(routing.experts)
    (sent,) = bring("routes", dtype, [math.prod(shape)])
    routes = sent.new_full((len(known), len(layers), routing.per_token), no_route(dtype))
    routes[known] = sent.view(shape)[:, list(layers)]
    return routes


def left_out(config: Config, rollout: Rollout) -> Tensor:
    """Return bool [responses]: True for responses in no pack."""
    loss, moe = config.loss, config.moe
    others = loss.entropy_coef or loss.kl_coef or moe.aux_loss_coef or moe.z_loss_coef
    return rollout.lengths < 0 if others else rollout.advantages == 0
