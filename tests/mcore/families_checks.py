"""On every rank: scores checkpoints of all families in all layouts of this many ranks; on 4, distributed
checkpoints as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file

from backend import BACKEND, LAYERS
from families import CHECKPOINT_LAYOUTS, CONVERTED, FAMILIES, LAYOUTS, fits, sequences
from megatron_fspo.config import Parallel
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.passes.score import score_checkpoint
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.weights import HFReader, MegatronReader, read_architecture

CPU = choose_backend(BACKEND, LAYERS)


def score_all(checkpoints: Path, out: Path, world: int) -> None:
    for layout, parallel in LAYOUTS[world].items():
        for family in FAMILIES:
            if not fits(family, parallel):
                continue
            for folder in (family, f"{family}-megatron") if layout in CONVERTED else (family,):
                found = score_checkpoint(
                    checkpoints / folder, sequences(), parallel=parallel, backend=CPU, dtype=torch.float32
                )
                if found is not None:
                    save_file({"scores": torch.cat(found)}, str(out / f"{layout}-{folder}.safetensors"))


def build(folder: Path, parallel: Parallel) -> GPTModel:
    """This rank's chunk, with the weights of the checkpoint."""
    arch = read_architecture(folder)
    groups = start(CPU, parallel=parallel, seed=1)
    model = Model(arch, CPU, groups, parallel=parallel, dtype=torch.float32)
    load_hf(model, folder)
    return model.chunks[0]


def check_distributed_checkpoints(
    folder: Path, saved: Path, parallel: Parallel, to_load: Sequence[Path]
) -> None:
    """Megatron loads what we converted, or another layout saved; we read what this one saves: bit for bit."""
    chunk = build(folder, parallel)
    if dist.get_rank() == 0:
        saved.mkdir()
    dist.barrier()
    dist_checkpointing.save(chunk.sharded_state_dict(), str(saved))
    wanted = {name: parameter.clone() for name, parameter in chunk.named_parameters()}
    for data in to_load:
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.zero_()  # as load_into pads the vocabulary
        chunk.load_state_dict(dist_checkpointing.load(chunk.sharded_state_dict(), str(data)))
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, wanted[name]), (data, name)
    if dist.get_rank() == 0:
        arch = read_architecture(folder)
        ours, theirs = HFReader(folder), MegatronReader(saved, arch)
        assert ours.names() == theirs.names()
        for name in ours.names():
            assert torch.equal(ours.read(name), theirs.read(name)), name
    dist.barrier()
    stop()


def run(checkpoints: Path, out: Path, world: int) -> None:
    """``checkpoints`` has folders FAMILY and FAMILY-megatron of every family; scores go to ``out``."""
    score_all(checkpoints, out, world)
    if world == max(LAYOUTS):
        for number, (layout, parallel) in enumerate(CHECKPOINT_LAYOUTS.items()):
            fitting = [family for family in FAMILIES if fits(family, parallel)]
            # The first layout saves every family; each other one takes every fourth, turn by turn.
            for family in fitting if number == 0 else fitting[number % 4 :: 4]:
                first = out / f"saved-{next(iter(CHECKPOINT_LAYOUTS))}-{family}"
                saved = out / f"saved-{layout}-{family}"
                to_load = checkpoints / f"{family}-megatron/torch_dist", first
                check_distributed_checkpoints(checkpoints / family, saved, parallel, to_load)
