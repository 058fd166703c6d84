"""Router of a mixture of experts, with replay of given experts, losses independent of packs, and reports.

A micro-batch carries a :class:`RouterPass` with instructions for the routers and, after the pass, their
reports. So there is no global state to synchronize with the schedule, and other models that score the
micro-batch are not affected.

Replay follows arXiv 2507.18071 (experts of the old pass) and 2510.11370 (experts of the sampler): experts are
given, and their weights come from the current logits, with gradients. The losses are computed per sequence,
as in arXiv 2412.19437, because packs differ between layouts and sequences do not.

Shapes: t tokens of a micro-batch on this rank, of which a router sees r (t / tp under sequence parallelism);
k of E experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.normalise import megatron_loss
from megatron_fspo.packing.batch import MicroBatch, no_route, route_dtype
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.weights import Experts

REPORT = ("tokens", "entropy", "aux_loss", "z_loss", "flips", "compared")
"""Columns of a router's report after the E loads: sums over tokens; losses without coefficients, over
sequences; flips and compared routes over tokens whose label is a response token."""


@dataclass(kw_only=True)
class RouterPass:
    """Instructions for the routers in one pass over one micro-batch, and their reports. A place is the index
    of a layer on this rank. If layers are recomputed, routers write the same entries twice."""

    replay: bool = False
    """Use the experts in ``MicroBatch.routes``; otherwise only compare them with the router's choice."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Place → [r, k] experts used, of ``route_dtype``."""
    flipped: dict[int, Tensor] = field(default_factory=dict)
    """Place → [r] bool: the router's choice differs, as a set, from ``MicroBatch.routes``."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Place → [E + 6] float64: tokens per expert, then the columns of :data:`REPORT`."""


class PolicyRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with our ``routing``."""

    place: int
    """Index of its layer among those of this rank."""
    experts: Experts
    batch: MicroBatch | None
    """Micro-batch in its layer's forward; None outside, or without a :class:`RouterPass`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PolicyRouter:
        """Convert to another dtype or device, except the bias, which stays float32. Megatron converts it back
        in the first pass, when its loaded values are already rounded."""
        super()._apply(fn, recurse)
        self._maintain_float32_expert_bias()
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts: logits [r, 1, E] → weights [r, E], 0 for experts not chosen, and the
        choice [r, E], bool. Ignores ``padding_mask``: padding is routed, too."""
        logits = logits.view(-1, self.config.num_moe_experts)
        choice = self._choice(logits.detach()) if self.experts.sigmoid else logits.detach()
        chosen = choice.topk(self.topk, dim=1).indices
        batch = self.batch
        if batch is not None:
            chosen, compared = self._compared(batch, chosen)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.experts.sigmoid:
            weights = logits.sigmoid().gather(1, chosen)
            if self.experts.normalize_top_k:
                weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
            weights = weights * self.experts.scale
        elif self.config.moe_router_pre_softmax:
            # Softmax in fp32 as in transformers; it has the same top k as the logits.
            weights = logits.softmax(-1, dtype=wide).type_as(logits).gather(1, chosen)
        else:
            weights = logits.gather(1, chosen).softmax(-1, dtype=wide).type_as(logits)
        weights = torch.zeros_like(logits).scatter(1, chosen, weights)
        routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
        if batch is not None:
            weights = self._reported(batch, logits, weights, routed, compared)
        return weights, routed

    def _choice(self, logits: Tensor) -> Tensor:
        """Return what a sigmoid router chooses by [r, E]: score and bias, -inf outside of the best groups."""
        choice: Tensor = logits.sigmoid() + self.expert_bias
        if self.experts.groups > 1:
            groups = choice.view(len(choice), self.experts.groups, -1)
            best = groups.topk(2, dim=2).values.sum(2).topk(self.experts.group_top_k, dim=1).indices
            outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
            choice = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
        return choice

    def _compared(self, batch: MicroBatch, own: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the router's choice [r, k] with the micro-batch's routes; return the experts to use [r, k],
        and which tokens have a route [r]."""
        chosen, work = own, batch.router
        known = torch.zeros_like(own[:, 0], dtype=torch.bool)
        flipped = known
        if batch.routes is not None:
            given = self._here(batch.routes)[:, self.place].long()
            known = given[:, 0] != no_route(batch.routes.dtype)
            flipped = known & (given.sort(1).values != own.sort(1).values).any(1)
            if work.replay:
                chosen = torch.where(known[:, None], given, own)
        work.flipped[self.place] = flipped
        work.chosen[self.place] = chosen.to(route_dtype(self.config.num_moe_experts))
        return chosen, known

    def _reported(
        self, batch: MicroBatch, logits: Tensor, weights: Tensor, routed: Tensor, compared: Tensor
    ) -> Tensor:
        """Write the report; return ``weights`` [r, E] with the gradient of the losses attached."""
        work = batch.router
        segment, mask = self._here(batch.segment), self._here(batch.loss_mask)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logs = wide.log_softmax(-1)
        if self.experts.sigmoid:  # normalised as in arXiv 2412.19437
            logs = F.logsigmoid(wide)
            logs = logs - logs.logsumexp(-1, keepdim=True)
        scores = logs.exp() if self.experts.sigmoid else wide.softmax(-1)
        entropy = -(scores * logs).detach().sum(1)
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
        """Return this rank's share of the layer's two losses, summed over sequences with a response.

        Load balance: E·Σ_e f_e·P_e, with f_e the share of expert e in the choices of the whole sequence (no
        gradient) and P_e its mean score. z-loss: mean of logsumexp(logits)² (arXiv 2202.08906). Collective:
        one all-reduce over the ranks that share a sequence.
        """
        n, (_, experts) = batch.lengths.numel(), scores.shape
        load = scores.new_zeros(n + 1, experts).index_add_(0, segment, routed.to(scores.dtype))
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(load, group=self.tp_cp_group)
        choices = load.sum(1, keepdim=True).clamp(min=1)
        counted = torch.nn.functional.pad(batch.lengths > 0, (0, 1))  # 0 for padding
        per_token = counted * self.topk / choices[:, 0]
        sums = torch.zeros_like(load).index_add(0, segment, scores)
        aux_loss = (per_token * experts * (load / choices * sums).sum(1)).sum()
        return aux_loss, (per_token[segment] * logits.logsumexp(-1).square()).sum()

    def _here(self, rows: Tensor) -> Tensor:
        """Select this router's r rows from the t of a micro-batch."""
        if not self.config.sequence_parallel:
            return rows
        part: Tensor = rows.chunk(self.tp_group.size())[self.tp_group.rank()]
        return part


def install_routers(chunks: Sequence[Module], experts: Experts | None) -> None:
    """Replace the routers of a rank's chunks, and hook layers to pass the micro-batch to their routers. The
    biases of sigmoid routers are not trained, so that a server's choice has the same; Megatron would update
    them by the experts' loads."""
    layers = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)
    ]
    for place, layer in enumerate(layers):
        if isinstance(layer.mlp, MoELayer):
            router = layer.mlp.router
            router.__class__ = PolicyRouter
            router.place, router.batch, router.experts = place, None, experts
            if experts is not None and experts.sigmoid:
                del router.expert_bias
                bias = torch.full((experts.count,), torch.nan, device=router.weight.device)
                router.register_buffer("expert_bias", bias)
            layer.register_forward_pre_hook(_begin, with_kwargs=True)
            layer.register_forward_hook(_end)


def _begin(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # A recomputed layer gets its own pack again, whichever micro-batch the schedule has reached.
    batch = getattr(kwargs.get("packed_seq_params"), "batch", None)
    layer.mlp.router.batch = batch if batch is not None and batch.router is not None else None


def _end(layer: Any, args: Any, output: Any) -> None:
    layer.mlp.router.batch = None


class RouterPasses(list[RouterPass]):
    """Router passes of this rank's micro-batches, in order, for the column ``router`` of its packs. Call the
    methods after the pass; they are collective. ``sequence``: sequence parallelism is on; ``layers``: indices
    of this rank's layers among the model's ``count``."""

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
        """Return [t, layers, k] for each micro-batch: the experts used in this rank's layers,
        ``no_route`` in those with an MLP."""
        missing = no_route(next(iter(self[0].chosen.values())).dtype)
        return self._whole([self._every_layer(router_pass.chosen, missing, dim=1) for router_pass in self])

    def flipped(self) -> list[Tensor]:
        """Return [t] bool for each micro-batch: in some layer of any pipeline stage, the router's choice
        differs from ``routes``."""
        here = [self._every_layer(router_pass.flipped, 0).any(0).to(torch.uint8) for router_pass in self]
        tokens = self._whole(here)
        flat = torch.cat(tokens)
        if self._groups.pp.size() > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self._groups.pp)
        return [row.bool() for row in torch.split(flat, [len(row) for row in tokens])]

    def report(self) -> Tensor:
        """Return [layers of the model, E + 6] float64: sum of the reports over micro-batches and ranks; 0 for
        layers with an MLP."""
        here = torch.stack([self._every_layer(router_pass.reports, 0) for router_pass in self]).sum(0)
        mine = dict(zip(self._layers, here, strict=True))
        nothing = torch.zeros_like(mine[self._layers[0]])
        table = torch.stack([mine.get(layer, nothing) for layer in range(self._count)])
        dist.all_reduce(table)  # ranks of a stage have different tokens, stages different layers
        return table

    def _every_layer(self, entries: dict[int, Tensor], missing: int, dim: int = 0) -> Tensor:
        """Stack the entries of this rank's layers; those without a router have the value ``missing``."""
        absent = torch.full_like(next(iter(entries.values())), missing)
        return torch.stack([entries.get(place, absent) for place in range(len(self._layers))], dim)

    def _whole(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Gather [r, …] of each micro-batch to [t, …]."""
        if not self._sequence:
            return [*rows]
        flat = torch.cat([row.flatten() for row in rows]).view(torch.uint8)  # NCCL has no int16
        parts = flat.new_empty(self._groups.tp.size() * len(flat))
        dist.all_gather_into_tensor(parts, flat, group=self._groups.tp)
        whole = parts.view(-1, len(flat)).view(rows[0].dtype)
        pieces = torch.split(whole, [row.numel() for row in rows], dim=1)
        return [piece.reshape(-1, *row.shape[1:]) for piece, row in zip(pieces, rows, strict=True)]
