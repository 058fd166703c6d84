"""Sequences, and the tensors of packed micro-batches (THD: all sequences end to end in one row). See
:mod:`.zigzag` for how context-parallel ranks share them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

Row = Tensor | Sequence[int] | Sequence[float]


def route_dtype(experts: int) -> torch.dtype:
    """Return the dtype of routes: one that holds the numbers of a layer's experts, and :func:`no_route`."""
    return torch.uint8 if experts <= 255 else torch.int16


def no_route(dtype: torch.dtype) -> int:
    """Return what stands for an expert where a token has no route, so that its router chooses."""
    return torch.iinfo(dtype).max


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """m sequences, each a prompt and its response, end to end on the CPU: a step, or a part of one.

    Example::

        Sequences.of(prompts=[[9], [1, 2]], responses=[[8], [3, 0, 5]], advantages=[1.0, -1.0])
    """

    index: Tensor
    """[m] number of each sequence in the step or rollout; packs refer to it."""
    tokens: Tensor
    """[Σ (P + R)] int32 ids: prompt and response of the first sequence, of the second, …"""
    log_probs: Tensor
    """[Σ R] fp32 log-probs of the response tokens from the sampler, in nats; 0 without a sampler."""
    prompt_lengths: Tensor
    """[m] P ≥ 1."""
    response_lengths: Tensor
    """[m] R ≥ 0, all tokens after the prompt."""
    lengths: Tensor
    """[m] L ≤ R, the tokens of these that the policy wrote."""
    advantages: Tensor
    """[m] fp32."""
    loss_mask: Tensor | None = None
    """[Σ R] bool: the policy wrote the token. None: it wrote all."""
    reference: Tensor | None = None
    """[Σ R] fp32 log-probs of the response tokens from servers of a teacher; None without them."""
    row_starts: Sequence[Row] | None = None
    """[m] positions in the response where its further rows begin: their tokens attend to them alone, at
    positions from 0. None: every sequence is one row."""
    routes: Tensor | None = None
    """[Σ (P + R − 1) + 1, layers, k] of :func:`route_dtype`: the sampler's experts for all tokens except the
    last of each sequence; :func:`no_route` where unknown, and in the last entry."""

    @cached_property
    def places(self) -> Tensor:
        """[m, 4] P, R, and the offsets of the sequence in ``tokens`` and ``log_probs``."""
        prompts, responses = self.prompt_lengths, self.response_lengths
        whole = prompts + responses
        begins = (whole.cumsum(0) - whole, responses.cumsum(0) - responses)
        return torch.stack([prompts, responses, *begins], dim=1)

    @cached_property
    def borders(self) -> list[list[int]]:
        """For each sequence, positions in prompt and response: 0, where further rows begin, and P + R."""
        each = zip(self.places.tolist(), self.row_starts or [()] * len(self.places), strict=True)
        return [
            [0, *(prompt + start for start in as_row(starts, torch.long).tolist()), prompt + response]
            for (prompt, response, *_), starts in each
        ]

    @cached_property
    def prompts(self) -> Tensor:
        """[m] equal numbers for sequences with equal prompts."""
        starts = self.places[:, 2].tolist()
        rows = zip(starts, self.prompt_lengths.tolist(), strict=True)
        numbers: dict[bytes, int] = {}
        texts = (self.tokens[start : start + length].numpy().tobytes() for start, length in rows)
        return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts], dtype=torch.long)

    def routes_at(self, chosen: Tensor, segment: Tensor, positions: Tensor) -> Tensor:
        """Return the routes [t, layers, k] of the tokens at ``positions`` [t]. ``segment`` [t] indexes the
        token's sequence in ``chosen`` [n]; n for tokens of none."""
        assert self.routes is not None
        rows = self.prompt_lengths + self.response_lengths - 1
        known, begins = (pad(x[chosen], (0, 1)) for x in (rows, rows.cumsum(0) - rows))
        index = torch.where(positions < known[segment], begins[segment] + positions, len(self.routes) - 1)
        return self.routes.index_select(0, index)

    @classmethod
    def of(
        cls,
        *,
        prompts: Sequence[Row],
        responses: Sequence[Row],
        advantages: Sequence[float] | Tensor,
        log_probs: Sequence[Row] | None = None,
        index: Sequence[int] | None = None,
        loss_mask: Sequence[Row] | None = None,
        reference: Sequence[Row] | None = None,
        row_starts: Sequence[Row] | None = None,
        routes: Tensor | None = None,
    ) -> Sequences:
        """Build sequences from one row of ids per prompt and per response.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each response.
            advantages: A [N].
            log_probs: one row per response; None if no sampler wrote them.
            index: numbers of the sequences in the step; by default 0, 1, …
            loss_mask: one row per response, 1 where the policy wrote the token; by default everywhere.
            reference: one row per response; None without a teacher's servers.
            row_starts: one row per response, positions of other tokens that begin a row.
            routes: [Σ (P + R − 1), layers, k], sequence by sequence.

        Raises:
            ValueError: an empty prompt, or inconsistent sizes.
        """
        prompt_lengths = torch.tensor([len(row) for row in prompts], dtype=torch.long)
        whole = torch.tensor([len(row) for row in responses], dtype=torch.long)
        if not len(prompts) == len(responses) == len(advantages):
            raise ValueError(
                f"{len(prompts)} prompts, {len(responses)} responses, {len(advantages)} advantages"
            )
        if (prompt_lengths == 0).any():
            raise ValueError(f"prompt {int((prompt_lengths == 0).nonzero()[0])} has no token")
        sampled = torch.zeros(int(whole.sum())) if log_probs is None else _flat(log_probs, torch.float32)
        given = {"log_probs": log_probs, "loss_mask": loss_mask, "reference": reference}
        for name, column in given.items():
            if column is not None and [len(row) for row in column] != whole.tolist():
                raise ValueError(f"a response and its {name} differ in length")
        mask = None if loss_mask is None else _flat(loss_mask, torch.bool)
        lengths = whole
        if mask is not None:
            lengths = torch.repeat_interleave(whole)[mask].bincount(minlength=len(whole))
        if routes is not None:
            if len(routes) != (prompt_lengths + whole - 1).sum():
                raise ValueError(f"routes has {len(routes)} tokens, which does not match the sequences")
            routes = torch.cat([routes, routes.new_full((1, *routes.shape[1:]), no_route(routes.dtype))])
        pairs = [row for pair in zip(prompts, responses, strict=True) for row in pair]
        return cls(
            index=torch.arange(len(prompts)) if index is None else torch.tensor(index, dtype=torch.long),
            tokens=_flat(pairs, torch.int32),
            log_probs=sampled,
            prompt_lengths=prompt_lengths,
            response_lengths=whole,
            lengths=lengths,
            advantages=torch.as_tensor(advantages, dtype=torch.float32),
            loss_mask=mask,
            reference=None if reference is None else _flat(reference, torch.float32),
            row_starts=row_starts,
            routes=routes,
        )


def as_row(row: Row, dtype: torch.dtype) -> Tensor:
    """Return a row as a tensor, without a copy if it is an ``array`` or tensor of that type."""
    if isinstance(row, Tensor):
        return row.to("cpu", dtype)
    if isinstance(row, array) and len(row):
        return torch.frombuffer(row, dtype=_ARRAYS[row.typecode]).to(dtype)
    return torch.tensor(row, dtype=dtype)


_ARRAYS: dict[str, Any] = {"b": torch.int8, "i": torch.int32, "f": torch.float32}


def _flat(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *(as_row(row, dtype) for row in rows)])


class Prefix(NamedTuple):
    """A prompt without its last token, packed once for several sequences. They follow it in the pack, each
    from the prompt's last token on."""

    start: int
    """Its first index in the pack."""
    end: int
    """Its end, where the first of the sequences begins."""
    sequences: range
    """The sequences that share it, at least two."""


class Turns(NamedTuple):
    """The m turns of a micro-batch. A turn is what the policy wrote between insertions of an environment."""

    segment: Tensor
    """[t] turn of each token, in [0, m]; m: in no turn."""
    owner: Tensor
    """[m] sequence of each turn."""
    lengths: Tensor
    """[m] tokens of each turn, over all context-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """n sequences packed into one row, of which this rank holds t tokens: all, or 1/cp of them.

    Position i of a sequence predicts its token i + 1: ``labels`` is ``tokens`` shifted left within each
    sequence, before the row is split. The loss mask is true where the policy wrote the label; what an
    environment inserted is context only. Under context parallelism, every sequence is padded at its end to a
    multiple of 2·cp. A tail that pads the row is one more sequence for the attention, outside every mask. So
    is a prefix that sequences share; all of it is visible to them.
    """

    tokens: Tensor
    """[1, t] ids."""
    position_ids: Tensor
    """[1, t] position in the sequence from 0, counted over all rows of a trajectory."""
    restarted: Tensor | None
    """[t] position in the sequence where the token's row begins; None: 0 everywhere."""
    labels: Tensor
    """[t] next token; 0 if there is none."""
    loss_mask: Tensor
    """[t] bool: the policy wrote the label. From positions, not ids: the policy may sample the pad id."""
    rows: Tensor
    """[k] indices where the mask is true."""
    label_range: tuple[int, int]
    """Smallest and largest label inside the mask; (0, 0) if it is empty."""
    segment: Tensor
    """[t] sequence of each token, in [0, n); n in padding and shared prefixes."""
    borders: Tensor
    """[blocks + 1] int32: cumulative padded lengths from 0, over all context-parallel ranks. A block is a row
    of a sequence, a prefix or a tail; only trajectories with a rewritten context have several rows."""
    owner: Tensor
    """[blocks] sequence of each block; n for a tail."""
    longest: int
    """Tokens of the longest padded row, including its prefix, or tail, over all context-parallel ranks."""
    lengths: Tensor
    """[n] L, tokens that the policy wrote, over all context-parallel ranks."""
    advantages: Tensor
    """[n] fp32."""
    sample_index: Tensor
    """[n] number of the sample in the rollout."""
    sampled_log_probs: Tensor
    """[t] log-probs of the labels from the sampler, 0 outside the mask."""
    old_log_probs: Tensor | None = None
    """[t] log-probs of the labels before the first update on this rollout; None: equal to the new ones."""
    reference_log_probs: Tensor | None = None
    """[t] log-probs of the labels under the reference policy, for a KL penalty."""
    rollout_weights: Tensor | None = None
    """[t] finite factors on each token's policy gradient, from a rollout correction; None: all 1."""
    routes: Tensor | None = None
    """[t, layers, k]: experts of this rank's layers that an earlier pass or the sampler sent each token
    to; :func:`no_route` where unknown."""
    router: Any = None
    """The :class:`~megatron_fspo.mcore.model.router.RouterPass` of the pass; None: routers only route."""
    totals: StepTotals
    """Totals of its optimizer step."""
    turns: Turns | None = None
    """None: every sequence is one turn."""
    prefixes: tuple[Prefix, ...] = ()
    """In the order of the pack; none under context parallelism."""
    source: MicroBatch | None = None
    """The original on the CPU that this is a copy of. Reading numbers there does not wait for the GPU."""

    @property
    def on_host(self) -> MicroBatch:
        """The original on the CPU, or itself."""
        return self.source or self

    @property
    def uses(self) -> Tensor:
        """[t] int64: number of sequences that a token belongs to; 0 in padding."""
        uses = (self.segment < self.lengths.numel()).long()
        for prefix in self.prefixes:
            uses[prefix.start : prefix.end] = len(prefix.sequences)
        return uses

    @property
    def row_positions(self) -> Tensor:
        """[t] position of the token in its row."""
        return self.position_ids[0] if self.restarted is None else self.position_ids[0] - self.restarted

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy it from the CPU to a device, asynchronously."""
        if torch.device(device).type == "cpu":
            return self
        tensors: dict[str, Any] = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        if self.turns is not None:
            tensors["turns"] = Turns(*(x.pin_memory().to(device, non_blocking=True) for x in self.turns))
        return replace(self, **tensors, source=self)


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sizes of one optimizer step over all ranks, known before it starts."""

    num_sequences: int
    """N: sequences with at least one token that the policy wrote."""
    num_tokens: int
    """T: tokens that the policy wrote."""
    packed_tokens: int
    """Tokens of T that are in a pack, which Megatron counts and divides by. Less than T if sequences without
    a gradient are left out."""


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of one rank, collated once on the CPU; each is copied to the device when it is read.

    They take 37 bytes per token that the rank holds, and 8 per response token.

    Args:
        sequences: the sequences that the micro-batches are made of.
        batches: in order; micro-batches of several optimizer steps may follow each other.
        device: device that they are copied to.
        columns: fields of :class:`MicroBatch` to add, one tensor [t, …] per micro-batch.
    """

    def __init__(
        self,
        sequences: Sequences,
        batches: Sequence[MicroBatch],
        device: torch.device | str,
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.sequences, self.on_host, self._device = sequences, list(batches), device
        self.columns = {name: list(tensors) for name, tensors in (columns or {}).items()}

    def __len__(self) -> int:
        return len(self.on_host)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | MicroBatches:
        if isinstance(index, slice):
            sliced = {name: tensors[index] for name, tensors in self.columns.items()}
            return MicroBatches(self.sequences, self.on_host[index], self._device, sliced)
        columns: dict[str, Any] = {name: tensors[index] for name, tensors in self.columns.items()}
        return replace(self.on_host[index].to(self._device), **columns)

    @property
    def tokens(self) -> int:
        """Tokens of all micro-batches on this rank, padding included."""
        return sum(batch.loss_mask.numel() for batch in self.on_host)

    @property
    def totals(self) -> StepTotals:
        """The totals of the optimizer step of the first micro-batch."""
        return self.on_host[0].totals

    def with_columns(self, **columns: Sequence[Any]) -> MicroBatches:
        """Return the micro-batches with more fields, one entry per micro-batch, such as a tensor [t]."""
        return MicroBatches(self.sequences, self.on_host, self._device, {**self.columns, **columns})
