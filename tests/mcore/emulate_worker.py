"""emulate_worker.py OUT CHECKPOINT: models that imitate FP8 against transformers that do; on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.lab.calibrate.emulate import emulate_fp8
from megatron_fspo.lab.calibrate.fp8_values import through_fp8
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.parallel.groups import gather_lists
from megatron_fspo.weights import read_architecture
from passes import new_groups, scoring_of

# A scale belongs to 32 values of a row: the same ones, however rows are put together or cut.
MXFP8 = FP8(recipe="mxfp8")
SEQUENCES = [[5, 9, 30, 2, 17, 17, 4, 8], [3, 1], [7, *range(20)]]
LAYOUTS = {"tp2.sp": Parallel(tensor=2, sequence=True), "pp2": Parallel(pipeline=2)}


def scores(checkpoint: Path, parallel: Parallel, fp8: FP8 | None) -> tuple[list[Tensor] | None, int]:
    """Log-probs, on the first rank, and the matrices of all ranks' layers that were quantized."""
    backend, groups = new_groups(parallel)
    arch = read_architecture(checkpoint)
    model = Model(arch, backend, groups, parallel=parallel, dtype=torch.float32)
    load_hf(model, checkpoint)
    count = 0 if fp8 is None else emulate_fp8(model, fp8)
    found = score_sequences(
        lambda batches: model.score(batches, scoring_of(model, 1.0)),
        SEQUENCES,
        arch=arch,
        groups=groups,
        parallel=parallel,
        device=backend.device,
    )
    counts = gather_lists([count], group=groups.pp)
    stop()
    return found, sum(counts)


@torch.no_grad()
def oracle(checkpoint: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, module in model.model.layers.named_modules():
        if name.endswith("_proj"):
            module.weight.copy_(through_fp8(module.weight, "mxfp8", weight=True))
            module.register_forward_pre_hook(lambda _, inputs: (through_fp8(inputs[0], "mxfp8"),))
    found = []
    for ids in SEQUENCES:
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return found


def apart(one: list[Tensor] | None, other: list[Tensor] | None) -> float:
    assert one is not None and other is not None
    return (torch.cat(one) - torch.cat(other)).abs().max().item()


def main() -> None:
    out, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    found = {}
    for name, parallel in LAYOUTS.items():
        plain, _ = scores(checkpoint, parallel, None)
        quantized, count = scores(checkpoint, parallel, MXFP8)
        partly, some = scores(checkpoint, parallel, FP8(recipe="mxfp8", first_last_layers_bf16=1))
        if plain is not None:
            found[name] = {
                "matrices": count,
                "against transformers": apart(quantized, oracle(checkpoint)),
                "against no FP8": apart(quantized, plain),
                "matrices, ends in bf16": some,
                "ends in bf16": apart(partly, plain),
            }
    if found:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
