"""The router of a mixture of experts: its own choice or a given one, losses that no split of a batch changes,
and a report.

What routers are to do with a micro-batch, and what they report, is a :class:`RouterPass`, which the
micro-batch carries to them. So nothing is global, no list of routes has to be kept in step with the schedule,
and another model that scores the same micro-batch knows nothing of it.

Replay is that of arXiv 2507.18071 (experts of the old pass) and 2510.11370 (of the sampler): experts are
given, their weights are those of the present logits, with gradients to all that were chosen. The losses are
taken sequence by sequence, as in arXiv 2412.19437: a sequence is the same in every pack.

Shapes: t tokens of a micro-batch on this rank, of which a router sees r (t / tp under sequence parallel); k
of E experts for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.normalise import megatron_loss
from megatron_fspo.packing.batch import NO_ROUTE, MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups

REPORT = ("tokens", "entropy", "aux_loss", "z_loss", "flips", "compared")
"""What follows the load of each expert in a router's report: sums over tokens; the losses, without their
factors, over sequences; and over (token, layer) with a response token to predict."""


@dataclass(kw_only=True)
class RouterPass:
    """The routers' part in one pass over one micro-batch. Where layers are recomputed, a router runs twice
    and reports the same twice. A place is the number of a layer among those of this rank, from 0."""

    replay: bool = False
    """Take the experts of ``MicroBatch.routes``; otherwise they are only compared."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Place → [r, k] uint8 experts taken."""
    flipped: dict[int, Tensor] = field(default_factory=dict)
    """Place → [r] bool: the router's own choice is another set than ``MicroBatch.routes``."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Place → [E + 6] float64: tokens of each expert, and :data:`REPORT`."""


class PolicyRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with a routing of ours.

    Attributes:
        place: of its layer, among those of this rank.
        batch: that its layer is at work on; None where nothing is asked of routers.
    """

    place: int
    batch: MicroBatch | None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts and weigh them.

        Args:
            logits: [r, 1, E].
            padding_mask: Megatron's; padding has a route like any other token.

        Returns:
            weights [r, E], 0 for experts that are not chosen, and which are [r, E].
        """
        logits = logits.view(-1, self.config.num_moe_experts)
        chosen = logits.detach().topk(self.topk, dim=1).indices
        batch = self.batch
        if batch is not None:
            chosen, compared = self._compared(batch, chosen)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.config.moe_router_pre_softmax:
            # In fp32 as in transformers, whose order of best experts is that of the logits.
            weights = logits.softmax(-1, dtype=wide).type_as(logits).gather(1, chosen)
        else:
            weights = logits.gather(1, chosen).softmax(-1, dtype=wide).type_as(logits)
        weights = torch.zeros_like(logits).scatter(1, chosen, weights)
        routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        if batch is not None:
            weights = self._reported(batch, logits, weights, routed, compared)
        return weights, routed

    def _compared(self, batch: MicroBatch, own: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the router's own choice [r, k] with the routes of the micro-batch.

        Returns:
            the experts to take [r, k]; and which tokens [r] have a route.
        """
        chosen, work = own, batch.router
        known = torch.zeros_like(own[:, 0], dtype=torch.bool)
        flipped = known
        if batch.routes is not None:
            given = self._here(batch.routes)[:, self.place].long()
            known = given[:, 0] != NO_ROUTE
            flipped = known & (given.sort(1).values != own.sort(1).values).any(1)
            if work.replay:
                chosen = torch.where(known[:, None], given, own)
        work.flipped[self.place] = flipped
        work.chosen[self.place] = chosen.to(torch.uint8)
        return chosen, known

    def _reported(
        self, batch: MicroBatch, logits: Tensor, weights: Tensor, routed: Tensor, compared: Tensor
    ) -> Tensor:
        """Make the report, and give the losses' gradient to ``weights`` [r, E], the result."""
        work = batch.router
        segment, mask = self._here(batch.segment), self._here(batch.mask)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = wide.softmax(-1)
        entropy = -(scores.detach() * wide.detach().log_softmax(-1)).sum(1)
        uses = self._here(batch.uses)
        aux_loss = z_loss = wide.new_zeros(())
        if torch.is_grad_enabled() and (work.aux_loss_coef or work.z_loss_coef):
            aux_loss, z_loss = self._losses(batch, segment, wide, scores, routed)
            loss = work.aux_loss_coef * aux_loss + work.z_loss_coef * z_loss
            weights = MoEAuxLossAutoScaler.apply(weights, megatron_loss(-loss, batch.totals))
        sums = (
            *(uses, entropy * uses, aux_loss.detach(), z_loss.detach()),
            *(work.flipped[self.place] & mask, compared & mask),
        )
        load = (routed * uses[:, None]).sum(0)
        work.reports[self.place] = torch.cat([load, torch.stack([x.sum().double() for x in sums])])
        return weights

    def _losses(
        self, batch: MicroBatch, segment: Tensor, logits: Tensor, scores: Tensor, routed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Σ over sequences with a response, as far as they lie here, of two losses of this layer.

        Load balance is E·Σ_e f_e·P_e, with f_e the share of expert e in the choices of the whole sequence and
        P_e the mean of its score; f has no gradient. The other is the mean square of the log-sum-exp of the
        logits (arXiv 2202.08906). One all-reduce over the ranks that share a sequence.
        """
        n, (_, experts) = batch.lengths.numel(), scores.shape
        load = scores.new_zeros(n + 1, experts).index_add_(0, segment, routed.to(scores.dtype))
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(load, group=self.tp_cp_group)
        choices = load.sum(1, keepdim=True).clamp(min=1)
        counted = torch.nn.functional.pad(batch.lengths > 0, (0, 1))  # not the padding
        per_token = counted * self.topk / choices[:, 0]
        sums = torch.zeros_like(load).index_add(0, segment, scores)
        aux_loss = (per_token * experts * (load / choices * sums).sum(1)).sum()
        return aux_loss, (per_token[segment] * logits.logsumexp(-1).square()).sum()

    def _here(self, rows: Tensor) -> Tensor:
        """This router's r rows of a micro-batch's t."""
        if not self.config.sequence_parallel:
            return rows
        part: Tensor = rows.chunk(self.tp_group.size())[self.tp_group.rank()]
        return part


def install_routers(chunks: Sequence[Module]) -> None:
    """Make the routers of a rank's chunks ours; each layer tells its router of the micro-batch."""
    layers = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)
    ]
    for place, layer in enumerate(layers):
        if isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            router.__class__ = PolicyRouter
            router.place, router.batch = place, None
            layer.register_forward_pre_hook(_begin, with_kwargs=True)
            layer.register_forward_hook(_end)


def _begin(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # A layer that is computed again gets the same pack, whatever micro-batch the schedule is at.
    batch = getattr(kwargs.get("packed_seq_params"), "batch", None)
    layer.mlp.router.batch = batch if batch is not None and batch.router is not None else None


def _end(layer: Any, args: Any, output: Any) -> None:
    layer.mlp.router.batch = None


class RouterPasses(list[RouterPass]):
    """Those of all micro-batches of this rank in one pass, for the column ``router`` of its packs. Call the
    methods when the pass is over; they are collective.

    Args:
        passes: in the order of the micro-batches.
        groups: of the job's layout.
        sequence: sequence parallel.
        layers: numbers of this rank's layers in the model, from 0.
        count: layers of the model.
    """

    def __init__(
        self,
        passes: Iterable[RouterPass],
        groups: ParallelGroups,
        *,
        sequence: bool,
        layers: Sequence[int],
        count: int,
    ) -> None:
        super().__init__(passes)
        self._groups, self._sequence, self._layers, self._count = groups, sequence, [*layers], count

    def routes(self) -> list[Tensor]:
        """[t, layers, k] uint8 of each micro-batch: the experts taken in this rank's layers."""
        return self._whole([torch.stack(_by_place(one.chosen), dim=1) for one in self])

    def flipped(self) -> list[Tensor]:
        """[t] bool of each micro-batch: in some layer, of any pipeline stage, the router's own choice was
        another than its ``routes``."""
        here = [torch.stack(_by_place(one.flipped)).any(0).to(torch.uint8) for one in self]
        tokens = self._whole(here)
        flat = torch.cat(tokens)
        if self._groups.pp.size() > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._groups.pp)
        return [row.bool() for row in torch.split(flat, [len(row) for row in tokens])]

    def report(self) -> Tensor:
        """[layers of the model, E + 6] float64: the reports of all micro-batches of all ranks."""
        here = torch.stack([torch.stack(_by_place(one.reports)) for one in self]).sum(0)
        mine = dict(zip(self._layers, here, strict=True))
        nothing = torch.zeros_like(mine[self._layers[0]])
        table = torch.stack([mine.get(layer, nothing) for layer in range(self._count)])
        dist.all_reduce(table)  # ranks of a stage have other tokens, stages other layers
        return table

    def _whole(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Tensors [r, …] of the micro-batches as [t, …]."""
        if not self._sequence:
            return [*rows]
        flat = torch.cat([row.flatten() for row in rows])
        parts = flat.new_empty(self._groups.tp.size() * len(flat))
        dist.all_gather_into_tensor(parts, flat, group=self._groups.tp)
        pieces = torch.split(parts.view(-1, len(flat)), [row.numel() for row in rows], dim=1)
        return [piece.reshape(-1, *row.shape[1:]) for piece, row in zip(pieces, rows, strict=True)]


def _by_place(entries: dict[int, Tensor]) -> list[Tensor]:
    return [entries[place] for place in sorted(entries)]
