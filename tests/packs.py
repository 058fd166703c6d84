"""Micro-batches of given samples, without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_fspo.packing import pack as packing
from megatron_fspo.packing.batch import MicroBatch, MicroBatches, Sequences, StepTotals
from megatron_fspo.packing.pack import Pack, PackLayout, collate_packs
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.types import Completion, Prompt, Sample


def sample(
    prompt: Sequence[int],
    response: Sequence[int],
    advantage: float = 1.0,
    loss_mask: Sequence[int] = (),
    row_starts: Sequence[int] = (),
) -> Sample:
    """One of these tokens; the sampler's log-probs are all different."""
    completion = Completion(
        token_ids=tuple(response),
        log_probs=tuple(-0.5 - i for i in range(len(response))),
        loss_mask=loss_mask,
        row_starts=tuple(row_starts),
        finish_reason="stop",
        weight_version=0,
    )
    question = Prompt(index=0, token_ids=tuple(prompt), text="", answer="")
    return Sample(prompt=question, number=0, completion=completion, reward=0.0, advantage=advantage)


def sequences_of(samples: Sequence[Sample]) -> Sequences:
    """All samples as the trainer's sequences."""
    return Sequences.of(
        prompts=[s.prompt.token_ids for s in samples],
        responses=[s.completion.token_ids for s in samples],
        log_probs=[s.completion.log_probs for s in samples],
        advantages=[s.advantage for s in samples],
        loss_mask=[s.completion.loss_mask for s in samples],
        row_starts=[s.completion.row_starts for s in samples],
    )


def collate(samples: Sequence[Sample], indices: Sequence[int], **options: Any) -> MicroBatch:
    """One micro-batch; ``num_sequences`` and ``num_tokens`` are those of the step."""
    count, tokens = options.pop("num_sequences"), options.pop("num_tokens")
    totals = StepTotals(num_sequences=count, num_tokens=tokens, packed_tokens=tokens)
    return packing.collate(sequences_of(samples), indices, totals, PackLayout(**options))


def make_micro_batches(
    samples: Sequence[Sample], packs: Sequence[Sequence[int]], **layout: Any
) -> MicroBatches:
    """Given packs of all samples, on one data-parallel rank."""
    lengths = [s.completion.length for s in samples]
    totals = StepTotals(
        num_sequences=sum(n > 0 for n in lengths), num_tokens=sum(lengths), packed_tokens=sum(lengths)
    )
    wanted = [Pack(numbers=tuple(pack), totals=totals) for pack in packs]
    return collate_packs(sequences_of(samples), wanted, PackLayout(**layout))


def sample_length(sample: Sample, *, context: int = 1) -> int:
    """Tokens a sample takes in a pack."""
    return padded_length(len(sample.prompt.token_ids) + len(sample.completion.token_ids), context)
