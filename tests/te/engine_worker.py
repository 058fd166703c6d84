"""engine_worker.py OUT CHECKPOINT: what layers of Transformer Engine do, on 2 ranks; JSON to OUT."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformer_engine.pytorch as engine
import transformer_engine_torch as tex
from torch import Tensor

import checkpoint_checks as checks
import passes
from megatron_fspo import config as options
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.state.checkpoint import load_checkpoint, save_checkpoint
from packs import make_micro_batches, sample
from worker import step

FP32, BF16 = torch.float32, torch.bfloat16
SPLIT = options.Parallel(tensor=2, sequence=True, distributed_optimizer=True)
COPIES = options.Parallel(distributed_optimizer=True)


def build(checkpoint: Path, layers: str, parallel: options.Parallel, dtype: torch.dtype) -> Policy:
    return passes.build(checkpoint, parallel, dtype=dtype, layers=layers, optimizer=checks.OPTIMIZER)


def check_modules(checkpoint: Path) -> dict[str, Any]:
    """Layers by type; and products that went straight into ``main_grad``."""
    policy = build(checkpoint, "transformer_engine", SPLIT, BF16)
    linear = (engine.Linear, engine.LayerNormLinear)
    modules = list(policy.chunks[0].modules())
    found = {
        "linear": sum(isinstance(module, linear) for module in modules),
        "norm": sum(isinstance(module, engine.RMSNorm) for module in modules),
        "attention": sum(isinstance(module, engine.DotProductAttention) for module in modules),
    }
    fused: Counter[bool] = Counter()
    product = tex.generic_gemm

    def counted(*tensors: object, **options: object) -> object:
        out, accumulate = tensors[4], tensors[14]
        fused[isinstance(out, Tensor) and out.dtype == FP32 and accumulate is True] += 1
        return product(*tensors, **options)

    with patch.object(tex, "generic_gemm", counted):
        step(policy, 512)
    megatron = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])[0]
    optimizer = type(megatron.optimizer)
    return {**found, "fused": fused[True], "optimizer": f"{optimizer.__module__}.{optimizer.__name__}"}


def check_decode(checkpoint: Path) -> float:
    """Under context parallel: how far logits are from those of local layers, nats."""
    found = []
    for layers in ("local", "transformer_engine"):
        policy = build(checkpoint, layers, options.Parallel(context=2), FP32)
        decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
        attention = policy.chunks[0].decoder.layers[0].self_attention
        outside = attention.core_attention
        with decoder.session(slots=2, max_tokens=8):
            assert not isinstance(attention.core_attention, engine.DotProductAttention)
            fed: list[list[list[int]]] = [[[1, 2, 3], [4, 5, 6]], [[7], [8]], [[9], [1]]]
            logits = [decoder.feed(tokens) for tokens in fed]
        assert attention.core_attention is outside
        found.append(torch.stack(logits))
    return (found[0] - found[1]).abs().max().item()


def check_sharing(checkpoint: Path) -> float:
    """How far log-probs with a shared prompt are from those without, nats."""
    policy = build(checkpoint, "transformer_engine", SPLIT, FP32)
    samples = [sample([1, 2, 3, 4, 5], [6 + i] * (4 + i)) for i in range(3)] + [sample([7, 8], [9, 10, 11])]
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=1.0)
    found = []
    for share in (False, True):
        micro_batches = make_micro_batches(samples, [range(4)], share_prompts=share, multiple_of=2)
        (batch,), (scores,) = micro_batches.on_host, policy.score(micro_batches, scoring)
        assert bool(batch.prefixes) == share
        found.append(torch.cat([scores[batch.loss_mask & (batch.segment == number)] for number in range(4)]))
    return (found[0] - found[1]).abs().max().item()


def check_checkpoints(checkpoint: Path, out: Path) -> dict[str, bool]:
    """Saved with one kind of layers, loaded with the other: the same state, and the same next step."""
    found = {}
    kinds = ("transformer_engine", "local")
    for origin in kinds:
        policy, folder = build(checkpoint, origin, SPLIT, BF16), out / origin
        step(policy, 512)
        save_checkpoint(policy, folder, {"step": 1})
        saved = checks.whole_state(policy)
        step(policy, 512)
        later = checks.whole_state(policy)
        for layers in kinds:
            for parallel in (SPLIT, COPIES):
                policy = build(checkpoint, layers, parallel, BF16)
                assert load_checkpoint(policy, folder)["step"] == 1
                name = f"{origin} to {layers}, tensor {parallel.tensor}"
                found[name] = checks.same(checks.whole_state(policy), saved)
                if layers == origin and parallel is SPLIT:
                    step(policy, 512)
                    found[f"{name}: goes on"] = checks.same(checks.whole_state(policy), later)
    return found


def main() -> None:
    out, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    found = {
        "modules": check_modules(checkpoint),
        "decode": check_decode(checkpoint),
        "sharing": check_sharing(checkpoint),
        "checkpoints": check_checkpoints(checkpoint, out.parent),
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
