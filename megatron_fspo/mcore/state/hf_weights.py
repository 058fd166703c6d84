"""Loading and exporting Hugging Face weights of a running model, in any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import filterfalse, groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.model.lora import first_values, is_adapter, merged_parameters
from megatron_fspo.mcore.model.model import expert_offset, is_expert, layer_offset, named_weights
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.parallel.buckets import from_bytes, in_buckets, num_bytes, to_bytes
from megatron_fspo.parallel.groups import gather_lists, share
from megatron_fspo.weights import (
    Reader,
    Stacks,
    check_coverage,
    iterate_hf_tensors,
    load_into,
    open_checkpoint,
    resolve,
    shard_slices,
    write_adapters,
    write_hf_checkpoint,
)


def load_hf(model: Model, checkpoint: Path, *, seed: int = 0) -> None:
    """Fill every parameter from a checkpoint, and adapters from ``seed``. Each rank reads only its slices.
    Collective.

    Raises:
        InputError: the checkpoint is of another architecture than the model, or damaged.
    """
    loaded, groups = fill(model, open_checkpoint(checkpoint, model.arch)), model.groups
    groups.control.barrier(f"all ranks to read {checkpoint}")
    stage = gather_lists(loaded, group=groups.ep)
    check_coverage(gather_lists(stage, group=groups.pp), model.arch)
    fill_adapters(model, partial(first_values, seed=seed))
    model.weights_loaded()


def fill(model: Model, reader: Reader) -> list[str]:
    """Copy this rank's slices of a checkpoint into the model; return the names of the tensors used."""
    loaded: list[str] = []
    for chunk in model.chunks:
        loaded += load_into(
            ((name, parameter) for name, parameter in named_weights(chunk) if not is_adapter(name)),
            reader,
            model.arch,
            tp_rank=model.groups.tp.rank(),
            tp_size=model.groups.tp.size(),
            padded_vocab=model.padded_vocab,
            layer_offset=layer_offset(model.config, chunk),
            expert_offset=expert_offset(model.arch, model.groups.ep),
        )
    return loaded


@torch.no_grad()
def fill_adapters(model: Model, values: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Set every adapter factor to this rank's slice of ``values(name, shape)``; names and shapes are those of
    :func:`~megatron_fspo.weights.table.adapter_shapes`."""
    size, rank = model.groups.tp.size(), model.groups.tp.rank()
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if is_adapter(name):
                row = resolve(name, model.arch, layer_offset(model.config, chunk))
                (tensor,) = row.hf
                (part,) = shard_slices(row, model.arch, rank, size, model.padded_vocab)
                parameter.copy_(values(tensor.name, tensor.shape(model.arch))[part])


def export_hf(model: Model, out: Path, *, source: Path) -> None:
    """Write the model as a Hugging Face checkpoint; config and tokenizer come from ``source``. Collective.
    Rank 0 writes, with one tensor in memory at a time; ``out`` appears only when complete."""
    tensors = ((name, tensor.cpu()) for name, tensor in hf_tensors(model))
    if dist.get_rank() == 0:
        names = {"tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "data": "dp"}
        sizes = {name: getattr(model.groups, group).size() for name, group in names.items()}
        write_hf_checkpoint(out, tensors, source, layout=sizes)
    else:
        for _ in tensors:
            pass
    model.groups.control.barrier(f"the first rank to write {out}")


def export_adapters(model: Model, out: Path, *, base: Path) -> None:
    """Write the adapters as a folder that PEFT loads onto the model in ``base``. Collective."""
    adapters = model.arch.adapters
    assert adapters is not None
    tensors = [(name, tensor.cpu()) for name, tensor in adapter_tensors(model)]
    if dist.get_rank() == 0:
        write_adapters(out, tensors, adapters, base)
    model.groups.control.barrier(f"the first rank to write {out}")


def adapter_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of the model's adapters, like :func:`hf_tensors`."""
    return hf_tensors(
        model, [filter(lambda pair: is_adapter(pair[0]), chunk.named_parameters()) for chunk in model.chunks]
    )


def scaled_adapter_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield :func:`adapter_tensors` with B multiplied by the scale, for a server that applies no scale."""
    assert model.arch.adapters is not None
    for name, tensor in adapter_tensors(model):
        yield name, tensor * model.arch.adapters.scale if ".lora_B." in name else tensor


def base_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights without adapters, like :func:`hf_tensors`."""
    return hf_tensors(
        model,
        [filterfalse(lambda pair: is_adapter(pair[0]), named_weights(chunk)) for chunk in model.chunks],
    )


def hf_tensors(
    model: Model, named: Sequence[Iterable[tuple[str, Tensor]]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors under their Hugging Face names, on the first rank of the job.

    Exports the (Megatron name, tensor) pairs of ``named``, one iterable per chunk; by default the parameters,
    with adapters merged.

    Collective: every rank must exhaust the iterator; it is empty on all but the first. Tensors are on the
    model's device, so that NCCL can send them.
    """
    groups = model.groups
    if named is None:
        named = [merged_parameters(chunk, model.arch) for chunk in model.chunks]
    # One copy of the model suffices. In Megatron's order a pipeline stage is a range of ranks, the first of
    # which hold all tensor-parallel shards, and all experts.
    stage_size = dist.get_world_size() // groups.pp.size()
    place, places = dist.get_rank() % stage_size, max(groups.tp.size(), groups.ep.size())
    if place >= places:
        return
    mine = _stage_tensors(model, named, place)
    copy = [stage * stage_size + at for stage in range(groups.pp.size()) for at in range(places)]
    for stage in range(groups.pp.size()):
        # The consumer may be slow, such as a disk. Meet, so that a collective waits for one bucket at most.
        groups.control.barrier(f"the first rank to request the weights of pipeline stage {stage}", copy)
        if place == 0:
            yield from _from_stage(mine, stage, groups.pp, model.backend.device)
        elif stage == groups.pp.rank():
            for _ in mine:
                pass


def _stage_tensors(
    model: Model, named: Sequence[Iterable[tuple[str, Tensor]]], place: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield this pipeline stage's tensors, on its first rank; ``place`` is this rank's index in the stage."""
    group, experts, device = model.groups.tp, model.groups.ep, model.backend.device
    first = dist.get_process_group_ranks(group)[0]

    def gather(shard: Tensor) -> list[Tensor] | None:
        shard = shard.contiguous()
        if group.size() == 1:
            return [shard]
        shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
        dist.gather(shard, shards, dst=first, group=group)
        return shards

    def fetch(source: int, mine: Sequence[Tensor]) -> Iterable[Tensor]:
        if source == 0:
            return mine
        rank = dist.get_process_group_ranks(experts)[source]
        kinds, shapes = [tensor.dtype for tensor in mine], [tensor.shape for tensor in mine]
        return _broadcast(mine if experts.rank() == source else None, kinds, shapes, rank, experts, device)

    def keep(expert: Tensor) -> list[Tensor] | None:
        return [expert] if experts.rank() == 0 else None

    stacks: Stacks = {}
    for chunk, parameters in zip(model.chunks, named, strict=True):
        offset = layer_offset(model.config, chunk)
        for of_experts, together in groupby(parameters, key=lambda pair: is_expert(pair[0])):
            if not of_experts and place < group.size():
                yield from iterate_hf_tensors(together, model.arch, gather, offset)
            elif of_experts and place < experts.size():
                for bucket in in_buckets(together):  # to limit memory
                    names = [name for name, _ in bucket]
                    mine = [parameter.detach() for _, parameter in bucket]
                    for source in range(experts.size()):
                        before = source * model.arch.num_experts // experts.size()
                        theirs = zip(names, fetch(source, mine), strict=True)
                        yield from iterate_hf_tensors(theirs, model.arch, keep, offset, before, stacks)


def _from_stage(
    mine: Iterator[tuple[str, Tensor]], stage: int, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Send the tensors of one pipeline stage to the first stage, a bucket at a time: header, then values."""
    source = dist.get_process_group_ranks(group)[stage]
    owner, writer = group.rank() == stage, group.rank() == 0
    if stage == 0:
        if writer:
            yield from mine
        return
    buckets = in_buckets(mine if owner else ())
    while True:
        own = next(buckets, None)
        header = None if own is None else [(name, value.dtype, value.shape) for name, value in own]
        header = share(header, group=group, source=stage)
        if header is None:
            return
        names, kinds, shapes = zip(*header, strict=True)
        values = None if own is None else [value for _, value in own]
        received = _broadcast(values, kinds, shapes, source, group, device)
        if writer:
            yield from zip(names, received, strict=True)


def _broadcast(
    values: Sequence[Tensor] | None,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[torch.Size],
    source: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[Tensor]:
    """Send tensors, None on all ranks but ``source``, to every rank of the group in one message."""
    size = num_bytes(dtypes, shapes)
    packed = (
        torch.empty(size, dtype=torch.uint8, device=device) if values is None else to_bytes(values, device)
    )
    dist.broadcast(packed, src=source, group=group)
    return from_bytes(packed, dtypes, shapes)
