"""Sequences, and the packed tensors of micro-batches (THD: all sequences in one row, end to end).

How context-parallel ranks share them: :mod:`.zigzag`.
"""

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

NO_ROUTE = 255
"""In place of an expert's number where a token has no route: its router chooses."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """m sequences, each a prompt with its response, laid end to end on the CPU, 8 bytes per token.

    They may be a part of those of the step: what a rank of a data-parallel job holds.

    Example::

        Sequences.of(prompts=[[9], [1, 2]], responses=[[8], [3, 0, 5]], advantages=[1.0, -1.0])
    """

    index: Tensor
    """[m] number of each in the step (or the whole rollout): what packs name it by."""
    tokens: Tensor
    """[Σ (P + R)] int32 ids, prompt and response of the first, of the second, …"""
    log_probs: Tensor
    """[Σ R] fp32 the sampler's log-probs of the response tokens, in nats; 0 where there was no sampler."""
    prompt_lengths: Tensor
    """[m] P ≥ 1."""
    response_lengths: Tensor
    """[m] R ≥ 0, tokens after the prompt."""
    lengths: Tensor
    """[m] L ≤ R: tokens of them that the policy wrote."""
    advantages: Tensor
    """[m] fp32."""
    written: Tensor | None = None
    """[Σ R] bool: the policy wrote the token; None: all of them."""
    row_starts: Tensor | None = None
    """[s] entries of [Σ R] that begin a row: what follows there attends to its row alone, from position 0
    on. None: every sequence is one row."""
    routes: Tensor | None = None
    """[Σ (P + R - 1) + 1, layers, k] uint8: the sampler's experts of all tokens but each sequence's last;
    :data:`NO_ROUTE` where it did not tell, and in the last row."""

    @cached_property
    def places(self) -> Tensor:
        """[m, 4] P, R, and where tokens and log-probs of each begin."""
        prompts, responses = self.prompt_lengths, self.response_lengths
        whole = prompts + responses
        begins = (whole.cumsum(0) - whole, responses.cumsum(0) - responses)
        return torch.stack([prompts, responses, *begins], dim=1)

    @cached_property
    def borders(self) -> list[list[int]]:
        """Of each, positions in prompt and response: 0, where further rows begin, P + R."""
        borders = [[0, prompt + response] for prompt, response, *_ in self.places.tolist()]
        if self.row_starts is not None:
            begins = self.places[:, 3].contiguous()
            owners = torch.searchsorted(begins, self.row_starts, right=True) - 1
            inside = self.row_starts - begins[owners] + self.prompt_lengths[owners]
            for owner, position in zip(owners.tolist(), inside.tolist(), strict=True):
                borders[owner].insert(-1, position)
        return borders

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor, Tensor]:
        """[Σ R] int32 number of the turn in its sequence, from 1, that the token is of, 0 for what the policy
        did not write; [m] turns of each sequence; and the turns' lengths, of one sequence after the other."""
        assert self.written is not None
        begins = self.places[:, 3]
        starts = self.written.clone()
        starts[1:] &= ~self.written[:-1]
        first = begins[self.response_lengths > 0]
        starts[first] = self.written[first]
        count = starts.cumsum(0)
        before = pad(count, (1, 0))[begins]
        ends = pad(count, (1, 0))[begins + self.response_lengths]
        number = torch.where(self.written, count - before.repeat_interleave(self.response_lengths), 0)
        return number.int(), ends - before, (count[self.written] - 1).bincount(minlength=int(starts.sum()))

    @cached_property
    def prompts(self) -> Tensor:
        """[m] sequences with the same number have the same prompt."""
        starts = self.places[:, 2].tolist()
        rows = zip(starts, self.prompt_lengths.tolist(), strict=True)
        numbers: dict[bytes, int] = {}
        texts = (self.tokens[start : start + length].numpy().tobytes() for start, length in rows)
        return torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts], dtype=torch.long)

    def routes_at(self, chosen: Tensor, segment: Tensor, positions: Tensor) -> Tensor:
        """[t, layers, k] routes of the tokens at ``positions`` [t] of the sequences ``chosen`` [n], each of
        them in ``segment`` [t]: n for tokens of none."""
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
        written: Tensor | None = None,
        row_starts: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Sequences:
        """Make them from one row of ids per prompt and per response.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each response.
            advantages: A [N].
            log_probs: one row per response; none for responses that no sampler wrote.
            index: numbers of the sequences in the step; by default they are all of it.
            written: [Σ R] bool, which tokens of the responses the policy wrote; by default all.
            row_starts: [Σ R] bool, which of the others begin a row.
            routes: [Σ (P + R - 1), layers, k] uint8 of all of them, one after the other.

        Raises:
            ValueError: an empty prompt, or rows that do not fit each other.
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
        if log_probs is not None and [len(row) for row in log_probs] != whole.tolist():
            raise ValueError("a response and its log-probs differ in length")
        lengths = whole
        if written is not None:
            lengths = torch.repeat_interleave(whole)[written].bincount(minlength=len(whole))
        if routes is not None:
            if len(routes) != (prompt_lengths + whole - 1).sum():
                raise ValueError(f"routes of {len(routes)} tokens, but other sequences")
            routes = torch.cat([routes, routes.new_full((1, *routes.shape[1:]), NO_ROUTE)])
        pairs = [row for pair in zip(prompts, responses, strict=True) for row in pair]
        return cls(
            index=torch.arange(len(prompts)) if index is None else torch.tensor(index, dtype=torch.long),
            tokens=_flat(pairs, torch.int32),
            log_probs=sampled,
            prompt_lengths=prompt_lengths,
            response_lengths=whole,
            lengths=lengths,
            advantages=torch.as_tensor(advantages, dtype=torch.float32),
            written=written,
            row_starts=None if row_starts is None else row_starts.nonzero()[:, 0],
            routes=routes,
        )


def as_row(row: Row, dtype: torch.dtype) -> Tensor:
    """A row as a tensor; an ``array`` or tensor of that type is not copied."""
    if isinstance(row, Tensor):
        return row.to("cpu", dtype)
    if isinstance(row, array) and len(row):
        return torch.frombuffer(row, dtype=_ARRAYS[row.typecode]).to(dtype)
    return torch.tensor(row, dtype=dtype)


_ARRAYS: dict[str, Any] = {"b": torch.int8, "i": torch.int32, "f": torch.float32}


def _flat(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=dtype), *(as_row(row, dtype) for row in rows)])


class Prefix(NamedTuple):
    """A prompt without its last token, once in a pack for several sequences, which follow it there: each from
    the prompt's last token on."""

    start: int
    """Its first row."""
    end: int
    """Of its rows: where those of the first sequence begin."""
    sequences: range
    """Which share it, at least two."""


class Turns(NamedTuple):
    """The m turns of a micro-batch: what the policy wrote in one go, between what an environment inserted."""

    segment: Tensor
    """[t] turn of each token, in [0, m]; m for what is in none."""
    owner: Tensor
    """[m] the sequence of each."""
    lengths: Tensor
    """[m] tokens of each, over all context ranks."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """n sequences packed into one row, of which this rank holds t tokens: all, or 1 / cp of them.

    Position i of a sequence predicts its token i + 1, so ``labels`` is ``tokens`` shifted left within each
    sequence (before the row is split), and the mask is true where the label is a token of a response that the
    policy wrote; what an environment inserted is read and not learned. Under context parallel every sequence
    is padded at its end to a multiple of 2·cp. A tail that pads the row is one more sequence for the
    attention, outside every mask. So is a prefix that sequences share; to them all of it is visible.
    """

    tokens: Tensor
    """[1, t] ids."""
    position_ids: Tensor
    """[1, t] position in the sequence, from 0: all rows of a trajectory count."""
    restarted: Tensor | None
    """[t] position in the sequence where the token's row begins; None: 0 everywhere."""
    labels: Tensor
    """[t] next token; 0 where there is none."""
    mask: Tensor
    """[t] bool: the policy wrote the label. From places, not ids: it may sample the pad id."""
    rows: Tensor
    """[k] where the mask is true."""
    label_range: tuple[int, int]
    """Smallest and largest label inside the mask; (0, 0) without any."""
    segment: Tensor
    """[t] sequence of each token, in [0, n); n in padding and in shared prefixes."""
    borders: Tensor
    """[blocks + 1] int32: cumulative padded lengths from 0, over all context ranks. A block is a row of a
    sequence (each has one, but for trajectories whose context an environment wrote anew), a prefix, or a
    tail."""
    owner: Tensor
    """[blocks] the sequence of each; n for a tail."""
    longest: int
    """Longest padded row, its prefix included, or tail, in tokens, over all context ranks."""
    lengths: Tensor
    """[n] L, tokens that the policy wrote, over all context ranks."""
    advantages: Tensor
    """[n] fp32."""
    sample_index: Tensor
    """[n] which sample of the rollout."""
    sampled_log_probs: Tensor
    """[t] the sampler's log-probs of the labels, 0 outside the mask."""
    old_log_probs: Tensor | None = None
    """[t] log-probs of the labels before this rollout's first update; None: the same as the new ones."""
    reference_log_probs: Tensor | None = None
    """[t] log-probs of the labels under the reference policy, for a KL penalty."""
    rollout_weights: Tensor | None = None
    """[t] finite factors on each token's policy gradient, from a rollout correction; None: all 1."""
    routes: Tensor | None = None
    """[t, layers, k] uint8: experts of this rank's layers that a pass before has sent each token to, or the
    sampler; :data:`NO_ROUTE` where there is none."""
    router: Any = None
    """The :class:`~megatron_fspo.mcore.router.RouterPass` of a pass in which routers do more than route."""
    totals: StepTotals
    """Totals of its optimizer step."""
    turns: Turns | None = None
    """None: every sequence is one turn."""
    prefixes: tuple[Prefix, ...] = ()
    """In their order; none under context parallel."""
    source: MicroBatch | None = None
    """What it was copied from, on the CPU, for whoever wants numbers: a GPU would have to be waited for."""

    @property
    def on_host(self) -> MicroBatch:
        """What it was copied from, or itself."""
        return self.source or self

    @property
    def uses(self) -> Tensor:
        """[t] int64: how many sequences a token is part of; 0 in padding."""
        uses = (self.segment < self.lengths.numel()).long()
        for prefix in self.prefixes:
            uses[prefix.start : prefix.end] = len(prefix.sequences)
        return uses

    @property
    def row_positions(self) -> Tensor:
        """[t] position of the token in its row."""
        return self.position_ids[0] if self.restarted is None else self.position_ids[0] - self.restarted

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy it from the CPU to a device. The copy is queued behind what the device has to do."""
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
    """N: sequences in which the policy wrote."""
    num_tokens: int
    """T: the tokens that it wrote."""
    packed_tokens: int
    """Tokens that are in a pack: what Megatron counts and divides by. Less than T where sequences without a
    gradient are left out."""


class Packs(Sequence[MicroBatch]):
    """Micro-batches of one rank, collated once on the CPU, 37 bytes per token that the rank holds and 8 per
    response token; each is on the device only while it is at work.

    Args:
        sequences: that the micro-batches are made of.
        batches: in the order of their turns; those of several optimizer steps may follow each other.
        columns: fields of :class:`MicroBatch` to add, one tensor [t, …] for each micro-batch.
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
    def __getitem__(self, index: slice) -> Packs: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Packs:
        if isinstance(index, slice):
            some = {name: tensors[index] for name, tensors in self.columns.items()}
            return Packs(self.sequences, self.on_host[index], self._device, some)
        columns: dict[str, Any] = {name: tensors[index] for name, tensors in self.columns.items()}
        return replace(self.on_host[index].to(self._device), **columns)

    @property
    def tokens(self) -> int:
        """Count the tokens of all of them on this rank, padding included."""
        return sum(batch.mask.numel() for batch in self.on_host)

    @property
    def totals(self) -> StepTotals:
        """The totals of the optimizer step of the first of them."""
        return self.on_host[0].totals

    def with_columns(self, **columns: Sequence[Any]) -> Packs:
        """Return them with more fields, one entry for each micro-batch, such as a tensor [t]."""
        return Packs(self.sequences, self.on_host, self._device, {**self.columns, **columns})
