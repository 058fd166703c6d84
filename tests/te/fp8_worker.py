"""fp8_worker.py OUT CHECKPOINT: the policy in FP8, by Transformer Engine's reference quantisers; 2 ranks."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformer_engine.pytorch import autocast

import checkpoint_checks as checks
from cases import TEMPERATURE, samples
from megatron_fspo import config as options
from megatron_fspo.config_fp8 import BF16, FP8
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.checkpoint import load_checkpoint, save_checkpoint
from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.fp8 import probe_fp8
from megatron_fspo.mcore.hf_weights import load_hf
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.mcore.policy_loss import PolicyLoss, Scoring
from megatron_fspo.mcore.startup import start
from megatron_fspo.objective import FSPOBand, LengthFairDualClip
from megatron_fspo.objective.policy import SequenceLevel
from megatron_fspo.packing.pack import pack
from megatron_fspo.parallel.groups import pack_layout
from megatron_fspo.parallel.metrics import gather_lists
from megatron_fspo.weights import read_architecture
from packs import sequences_of

TENSORWISE = FP8(recipe="tensorwise")
PARALLEL = options.Parallel(distributed_optimizer=True)


def build(checkpoint: Path, fp8: FP8 = TENSORWISE) -> Policy:
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    backend = choose_backend("cuda", "transformer_engine")
    groups = start(backend, parallel=PARALLEL, seed=1)
    policy = Policy(
        read_architecture(checkpoint),
        backend,
        groups,
        parallel=PARALLEL,
        dtype=torch.bfloat16,
        optimizer=options.Optimizer(lr=1e-2, warmup_steps=0),
        fp8=fp8,
    )
    load_hf(policy, checkpoint)
    return policy


def scores(policy: Policy, max_tokens: int) -> Tensor:
    """Log-probs of all response tokens, by sample; on every rank."""
    layout = pack_layout(policy.groups, PARALLEL, policy.backend.device, align=policy.fp8.align)
    batches = pack(sequences_of(samples()), replace(layout, max_tokens=max_tokens))
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=TEMPERATURE)
    found = [
        (index, score[batch.mask & (batch.segment == row)].tolist())
        for batch, score in zip(batches, policy.score(batches, scoring), strict=True)
        for row, index in enumerate(batch.sample_index.tolist())
    ]
    every = dict(gather_lists(found, group=policy.groups.dp))
    return torch.tensor([value for index in sorted(every) for value in every[index]])


def step(policy: Policy) -> float:
    """One optimizer step; the largest |S| of its sequences."""
    layout = pack_layout(policy.groups, PARALLEL, policy.backend.device, align=policy.fp8.align)
    batches = pack(sequences_of(samples()), replace(layout, max_tokens=512))
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=TEMPERATURE)
    sums: list[float] = []
    loss = PolicyLoss(
        objective=SequenceLevel(band=FSPOBand(c_low=0.05, c_high=0.05), dual_clip=LengthFairDualClip(c=0.1)),
        scoring=scoring,
        observer=lambda batch, terms: sums.extend(terms.log_ratio_sum.abs().tolist()),
    )
    policy.update(batches.with_columns(old_log_probs=policy.score(batches, scoring)), loss)
    return max(gather_lists([max(sums)], group=policy.groups.dp))


def directions(one: Policy, other: Policy) -> float:
    """The least cosine between gradients of a matrix in two models of the same weights."""
    found = []
    for policy in (one, other):
        policy.gather_gradients()
        named = {
            n: p.main_grad for n, p in policy.chunks[0].named_parameters() if "linear" in n and p.ndim == 2
        }
        found.append(named)
    return min(cosine_similarity(found[0][n].flatten(), found[1][n].flatten(), 0).item() for n in found[0])


def decoded(policy: Policy) -> Tensor:
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
    with decoder.session(rows=3, max_tokens=8):
        return torch.stack([decoder.feed([[1], [2], [3]]), decoder.feed([[4], [5], [6]])])


def check(checkpoint: Path, folder: Path) -> dict[str, Any]:
    policy = build(checkpoint)
    found: dict[str, Any] = {"modules": probe_fp8(policy)}
    plain = build(checkpoint, BF16)
    found["bf16 modules"] = probe_fp8(plain)
    found["noise"] = (scores(policy, 512) - scores(plain, 512)).std().item()
    found["decode is in bf16"] = torch.equal(decoded(policy), decoded(plain))
    found["other packs"] = (scores(policy, 512) - scores(policy, 70)).abs().max().item()
    before = scores(policy, 512)
    found["S"] = [step(policy)]
    step(plain)
    found["gradient"] = directions(policy, plain)
    found["S"].append(step(policy))
    after, tokens = scores(policy, 512), decoded(policy)
    found["moved"] = (after - before).abs().max().item()
    save_checkpoint(policy, folder, {"step": 2})
    state = checks.whole_state(policy)
    found["weights are the masters' cast"] = checks.same(checks.as_dtype(state, torch.bfloat16), state)
    fresh = build(checkpoint)
    load_checkpoint(fresh, folder)
    found["fresh"] = torch.equal(scores(fresh, 512), after) and torch.equal(decoded(fresh), tokens)
    found["later S"] = step(policy), step(fresh)
    found["goes on"] = torch.equal(scores(fresh, 512), scores(policy, 512))
    # Without the refresh of FP8 copies of the weights before each pass, the last optimizer step is not seen.
    with patch.object(MegatronModule, "set_is_first_microbatch", lambda self: None):
        step(fresh)
        stale = scores(fresh, 512)
    found["stale"] = (scores(fresh, 512) - stale).abs().max().item()
    found["refused"] = refused(policy)
    return found


def refused(policy: Policy) -> str:
    """What is said where a layer's matrices are left in bf16."""
    layer = policy.chunks[0].decoder.layers[1]
    run = type(layer).forward

    def high_precision(self: Any, *args: Any, **kwargs: Any) -> Any:
        with autocast(enabled=False) if self is layer else nullcontext():
            return run(self, *args, **kwargs)

    with patch.object(type(layer), "forward", high_precision):
        try:
            probe_fp8(policy)
        except TrainingError as error:
            return str(error)
    return ""


def main() -> None:
    out, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    found = check(checkpoint, out.parent / "saved")
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
