"""Log-probs of given sequences under a checkpoint, in any layout, without an optimizer.

Uses the code path of training: packed micro-batches, Megatron's schedule, log-probs from hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.sizes import check_parallel, check_world
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.packing.batch import MicroBatch, Sequences
from megatron_fspo.packing.pack import pack
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.parallel.groups import ParallelGroups, gather_lists, pack_layout
from megatron_fspo.weights import Architecture, read_architecture

# Per micro-batch, over all context-parallel ranks; a longer sequence raises it.
_MAX_TOKENS = 16384


def score_checkpoint(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    *,
    parallel: Parallel,
    backend: Backend,
    dtype: torch.dtype,
) -> list[Tensor] | None:
    """Return the log-prob of every token but the first, given those before it. Collective over the job.

    ``folder`` is a Hugging Face checkpoint, or a Megatron checkpoint with its ``config.json``. ``sequences``
    must be the same on every rank. Joins the job, and leaves it at the end, so several checkpoints can be
    scored in different layouts.

    Returns:
        for each sequence of n tokens, fp32 [n - 1] on the CPU; None on all ranks but the first.

    Raises:
        InputError: on every rank, if a sequence, the layout or the checkpoint does not fit.
    """
    arch = read_architecture(folder)
    check_parallel(arch, parallel)
    _as_sequences(sequences, arch)  # check them before long work
    join(backend, parallel=parallel)
    try:
        check_world(parallel, dist.get_world_size())
        groups = start(backend, parallel=parallel, seed=1)
        model = Model(arch, backend, groups, parallel=parallel, dtype=dtype)
        load_hf(model, folder)
        scoring = Scoring(groups=groups, vocab_size=arch.vocab_size, temperature=1.0)
        return score_sequences(
            lambda batches: model.score(batches, scoring),
            sequences,
            arch=arch,
            groups=groups,
            parallel=parallel,
            device=backend.device,
        )
    finally:
        stop()


def score_sequences(
    score_batches: Callable[[Sequence[MicroBatch]], list[Tensor]],
    sequences: Sequence[Sequence[int]],
    *,
    arch: Architecture,
    groups: ParallelGroups,
    parallel: Parallel,
    device: torch.device,
    align: int = 1,
) -> list[Tensor] | None:
    """Do :func:`score_checkpoint` for a running model, in the layout of ``parallel`` and ``groups``:
    ``score_batches`` returns the log-probs [t] of each of this rank's micro-batches, which are on ``device``;
    their numbers of tokens are multiples of ``align``."""
    packed = _as_sequences(sequences, arch)
    layout = pack_layout(
        groups, device, sequence=parallel.sequence, interleaved=parallel.interleaved, align=align
    )
    longest = max((padded_length(len(ids), layout.context_size) for ids in sequences), default=0)
    batches = pack(packed, replace(layout, max_tokens=max(_MAX_TOKENS, longest)))
    # (sequence, positions [k] from 0, fp32 log-probs [k] of their next tokens)
    mine = [
        (index, batch.position_ids[0, here], values[here])
        for batch, on_device in zip(batches.on_host, score_batches(batches), strict=True)
        for values in [on_device.float().cpu()]
        for number, index in enumerate(batch.sample_index.tolist())
        for here in [batch.loss_mask & (batch.segment == number)]
    ]
    everyone = gather_lists(mine, group=groups.dp_cp)
    if dist.get_rank() != 0:
        return None
    log_probs = [torch.full((len(ids) - 1,), float("nan")) for ids in sequences]
    for index, positions, values in everyone:
        log_probs[index][positions] = values
    return log_probs


def _as_sequences(sequences: Sequence[Sequence[int]], arch: Architecture) -> Sequences:
    """Make sequences whose prompt is the first token, and whose response is the rest."""
    for index, ids in enumerate(sequences):
        if not ids or not 0 <= min(ids) <= max(ids) < arch.vocab_size:
            raise InputError(f"sequence {index} must have tokens, with ids from 0 to {arch.vocab_size - 1}")
    return Sequences.of(
        prompts=[ids[:1] for ids in sequences],
        responses=[ids[1:] for ids in sequences],
        advantages=[0.0] * len(sequences),
    )
