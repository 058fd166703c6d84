"""One training step of the production path in one layout, with results in comparable form."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_fspo.config import Optimizer
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.model.model import expert_offset, layer_offset, named_weights
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.objective.surrogate import LossTerms
from megatron_fspo.packing.batch import MicroBatch, MicroBatches, Sequences
from megatron_fspo.packing.pack import pack
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first, means, pack_layout, share
from megatron_fspo.parallel.head import linear_log_probs
from megatron_fspo.parallel.segments import prefix_sums, sequence_sums
from megatron_fspo.types import Sample
from megatron_fspo.verify.cases import Case, reference_drifts, split
from megatron_fspo.verify.layouts import Layout
from megatron_fspo.weights import Architecture, Row, resolve, shard_shape, shard_slices, to_megatron_shard


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one step, equal on every rank except the gradients."""

    log_probs: Tensor
    """[n, longest response]; 0 where there is no token."""
    log_ratio_sums: Tensor
    """[n] S."""
    clipped: Tensor
    """[n] 1 if a clip removed the gradient (token level: share of the tokens)."""
    out_of_band: Tensor
    """[n] bool."""
    seen: Tensor
    """[n] number of data-parallel ranks that reported the sequence; must be 1."""
    tokens: int
    """Response tokens over all ranks."""
    metrics: dict[str, float]
    grad_norm: float | None
    """Of the optimizer; None in float64."""
    gradients: list[tuple[Row, Tensor]]
    """Row of the weight table and reduced gradient of each parameter on this rank."""
    collectives: dict[str, float]
    """Collectives of head and loss per micro-batch, in the tensor- and context-parallel groups."""


def build(
    layout: Layout,
    arch: Architecture,
    weights: Mapping[str, Tensor],
    backend: Backend,
    groups: ParallelGroups,
    dtype: torch.dtype,
) -> Policy:
    """Build a policy in this layout with the given weights."""
    policy = Policy(
        arch,
        backend,
        groups,
        parallel=layout.parallel,
        dtype=dtype,
        # The gradient is compared unclipped. The step is too small to change a weight.
        optimizer=Optimizer(lr=1e-30, clip_grad=1e30),
        recompute=layout.recompute,
    )
    with torch.no_grad():
        for row, parameter in _parameters(policy):
            parameter.copy_(cut_shard(row, weights, policy))
    policy.weights_loaded()
    return policy


def cut_shard(row: Row, tensors: Mapping[str, Tensor], policy: Policy) -> Tensor:
    """Return this rank's part of a parameter, from whole tensors by their Hugging Face names."""
    arch, tp, vocab = policy.arch, policy.groups.tp, policy.padded_vocab
    rank, size = (0, 1) if row.in_expert else (tp.rank(), tp.size())
    parts = [
        tensors[tensor.name][slices]
        for tensor, slices in zip(row.hf, shard_slices(row, arch, rank, size, vocab), strict=True)
    ]
    return to_megatron_shard(row, parts, arch, shard_shape(row, arch, size, vocab))


@dataclass(frozen=True, kw_only=True)
class Scored:
    """This rank's micro-batches of one split, with the policy's log-probs."""

    micro_batches: MicroBatches
    log_probs: list[Tensor]
    """[t] per micro-batch."""
    scoring: Scoring


def score(
    policy: Policy,
    split_name: str,
    samples: Sequence[Sample],
    temperature: float,
    *,
    routes: Sequence[Tensor] | None = None,
    share: bool = False,
) -> Scored:
    """Run the pass for old log-probs; replay ``routes`` [P + L - 1, layers, k] of each sample. Collective."""
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=temperature)
    layout = pack_layout(
        policy.groups,
        policy.backend.device,
        sequence=policy.parallel.sequence,
        interleaved=policy.parallel.interleaved,
    )
    local = policy.backend.layers == "local" and layout.context_size == 1
    if share and local and policy.arch.linear is None:
        layout = replace(layout, share_prompts=True)
    sequences = Sequences.of(
        prompts=[sample.prompt.token_ids for sample in samples],
        responses=[sample.completion.token_ids for sample in samples],
        advantages=[sample.advantage for sample in samples],
        loss_mask=[sample.completion.loss_mask for sample in samples],
        row_starts=[sample.completion.row_starts for sample in samples],
        routes=None if routes is None else torch.cat([*routes])[:, policy.layers],
    )
    micro_batches = pack(sequences, layout, plan=split(split_name, sequences, policy.arch, layout))
    routed, passes = policy.with_routers(micro_batches, replay=routes is not None)
    log_probs = policy.score(routed, scoring)
    if passes is not None:
        micro_batches = micro_batches.with_columns(routes=passes.routes())
    return Scored(micro_batches=micro_batches, log_probs=log_probs, scoring=scoring)


def run(policy: Policy, case: Case, scored: Scored, samples: Sequence[Sample]) -> Outcome:
    """Take one step with old log-probs that are the policy's minus the case's drifts. Collective."""
    micro_batches = scored.micro_batches.with_columns(
        old_log_probs=below(scored, case.drifts(samples), samples),
        reference_log_probs=below(scored, reference_drifts(samples), samples),
    )
    micro_batches, _ = policy.with_routers(
        micro_batches, replay=case.replay, aux_loss_coef=case.aux_loss_coef, z_loss_coef=case.z_loss_coef
    )
    rows = torch.zeros(4, len(samples), dtype=torch.float64, device=policy.backend.device)

    def observe(batch: MicroBatch, terms: LossTerms, log_ratio: Tensor) -> None:
        clipped = terms.clipped_low + terms.clipped_high + terms.dual_clipped
        columns = [terms.log_ratio_sum, clipped, terms.out_of_band, torch.ones_like(clipped)]
        rows[:, batch.sample_index] += torch.stack([column.double() for column in columns])

    loss = PolicyLoss(
        objective=case.loss.objective(),
        scoring=scored.scoring,
        entropy_coef=case.loss.entropy_coef,
        kl_coef=case.loss.kl_coef,
        observer=observe,
    )
    grad_norm = None
    with _counted(policy.groups) as counts:
        if policy.config.params_dtype == torch.float64:  # Megatron's optimizer has no float64
            metrics = means(policy.backward(micro_batches, loss))
        else:
            update = policy.update(micro_batches, loss)
            metrics, grad_norm = update.metrics, update.grad_norm
    policy.gather_gradients()
    return Outcome(
        **_gathered(rows, micro_batches, scored.log_probs, samples, policy),
        metrics=metrics,
        grad_norm=grad_norm,
        gradients=[
            (row, parameter.main_grad) for row, parameter in _parameters(policy) if parameter.requires_grad
        ],
        collectives=share(
            {name: counts[name] / len(micro_batches) for name in ("tp", "cp")},
            group=policy.groups.pp,
            source=-1,
        ),
    )


def _parameters(policy: Policy) -> Iterator[tuple[Row, Any]]:
    """Yield the row of the weight table and value, for each parameter and router bias on this rank."""
    for chunk in policy.chunks:
        offset = layer_offset(policy.config, chunk)
        for name, parameter in named_weights(chunk):
            yield resolve(name, policy.arch, offset, expert_offset(policy.arch, policy.groups.ep)), parameter


def _response_positions(batch: MicroBatch, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """For each of this rank's tokens inside the mask: its sample, and its index among the written tokens."""
    whole = [[*bytes(len(sample.prompt.token_ids)), *sample.completion.loss_mask] for sample in samples]
    numbers = pad_sequence([torch.tensor(row).cumsum(0) - 1 for row in whole], batch_first=True)
    sample = batch.sample_index[batch.segment[batch.loss_mask]]
    return sample, numbers.to(batch.loss_mask.device)[sample, batch.position_ids[0, batch.loss_mask] + 1]


def below(scored: Scored, drifts: Sequence[Tensor], samples: Sequence[Sample]) -> list[Tensor]:
    """Scores minus ``drifts`` [t] per micro-batch; NaN outside the mask, where values must not be used."""
    padded = pad_sequence([*drifts], batch_first=True)
    columns = []
    for batch, score in zip(scored.micro_batches, scored.log_probs, strict=True):
        sample, position = _response_positions(batch, samples)
        old = torch.full_like(score, float("nan"))
        old[batch.loss_mask] = score[batch.loss_mask] - padded.to(score)[sample, position]
        columns.append(old)
    return columns


def _gathered(
    rows: Tensor,
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Tensor],
    samples: Sequence[Sample],
    policy: Policy,
) -> dict[str, Any]:
    """Return the fields of :class:`Outcome` in sample order; ``rows`` [4, n] are this rank's. Collective."""
    groups = policy.groups
    longest = max(sample.completion.length for sample in samples)
    log_probs = rows.new_zeros(len(samples), longest)
    tokens = rows.new_zeros(())
    for batch, score in zip(micro_batches, scores, strict=True):
        sample, position = _response_positions(batch, samples)
        log_probs[sample, position] += score[batch.loss_mask].double()
        tokens += batch.loss_mask.sum()
    dist.all_reduce(log_probs, group=groups.dp_cp)
    dist.all_reduce(tokens, group=groups.dp_cp)
    # Only the last pipeline stage observes; every context-parallel rank observes all its sequences.
    dist.all_reduce(rows, group=groups.dp)
    dist.broadcast(rows, src=dist.get_process_group_ranks(groups.pp)[-1], group=groups.pp)
    sums, clipped, outside, seen = rows.cpu()
    return {
        "log_probs": log_probs.cpu(),
        "log_ratio_sums": sums,
        "clipped": clipped,
        "out_of_band": outside > 0,
        "seen": seen,
        "tokens": int(tokens.item()),
    }


# torch 2.13 renames two of them.
_COLLECTIVES = [
    name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all_single"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast"),
    )
    if hasattr(dist, name)
]
_HEAD_AND_LOSS = {function.__module__ for function in (linear_log_probs, sequence_sums, prefix_sums)}
"""Modules that, with ``broadcast_first``, make all of ``PolicyLoss``'s collectives, which are counted."""


@contextmanager
def _counted(groups: ParallelGroups) -> Iterator[Counter[str]]:
    """Count the collectives that head and loss start in this context, by group."""
    counts: Counter[str] = Counter()
    kept = {name: getattr(dist, name) for name in _COLLECTIVES}
    ranks = {
        name: dist.get_process_group_ranks(group) for name, group in (("tp", groups.tp), ("cp", groups.cp))
    }

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if caller.f_globals["__name__"] in _HEAD_AND_LOSS or caller.f_code is broadcast_first.__code__:
                members = dist.get_process_group_ranks(kwargs["group"])
                counts.update(name for name, group in ranks.items() if group == members)
            return function(*args, **kwargs)

        return call

    for name, function in kept.items():
        setattr(dist, name, counting(function))
    try:
        yield counts
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
