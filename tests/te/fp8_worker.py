"""fp8_worker.py OUT CHECKPOINT: the policy in FP8, by recipe, without kernels (fake_recipes.py); 2 ranks."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformer_engine.pytorch import autocast
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingTensorRef

import checkpoint_checks as checks
import passes
from cases import RESPONSES, samples
from megatron_fspo import config as options
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.passes.fp8 import probe_fp8
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.mcore.state.checkpoint import load_checkpoint, save_checkpoint
from megatron_fspo.mcore.state.offload import Offload
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.parallel.groups import gather_lists, share
from megatron_fspo.trainer import build as build_module
from megatron_fspo.trainer.build import canary_scores

PARALLEL = options.Parallel(distributed_optimizer=True)
LENGTHS = torch.tensor(RESPONSES)
C = 0.03
"""Half the band's width at one token."""
CANARY = [tuple(range(1, 25)), tuple(range(30, 10, -1))]


def build(checkpoint: Path, recipe: str, *, recompute: bool = False) -> Policy:
    return passes.build(
        checkpoint,
        PARALLEL,
        dtype=torch.bfloat16,
        optimizer=options.Optimizer(lr=1e-2, warmup_steps=0),
        recompute=recompute,
        fp8=FP8(recipe=recipe),  # type: ignore[arg-type]
    )


def scores(policy: Policy, max_tokens: int = 512) -> Tensor:
    """Log-probs of all response tokens, by sample; on every rank."""
    batches = passes.make_micro_batches(policy, samples(), max_tokens)
    return passes.by_token(batches, policy.score(batches, passes.scoring_of(policy)), policy.groups)


def other_packs(policy: Policy) -> dict[str, float]:
    """S between packs of 512 and of 70 tokens, same weights: the largest, and as a share of the band."""
    delta = (scores(policy, 512) - scores(policy, 70)).double()
    sums = torch.stack([part.sum() for part in delta.split(LENGTHS.tolist())]).abs()
    return {"S": sums.max().item(), "of the band": (sums / (C * LENGTHS.sqrt())).max().item()}


def loss_of(policy: Policy, sums: list[float]) -> tuple[MicroBatches, PolicyLoss]:
    """With old log-probs of the present weights; ``sums`` gets |S|."""
    batches = passes.make_micro_batches(policy, samples(), 512)
    loss = passes.loss_of(policy, lambda batch, terms, _: sums.extend(terms.log_ratio_sum.abs().tolist()))
    return batches.with_columns(old_log_probs=policy.score(batches, loss.scoring)), loss


def step(policy: Policy) -> float:
    """One optimizer step; the largest |S| of its sequences."""
    sums: list[float] = []
    policy.update(*loss_of(policy, sums))
    return max(gather_lists([max(sums)], group=policy.groups.dp))


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Gradients of the last backward pass, of all matrices in the layers."""
    policy.gather_gradients()
    named = policy.chunks[0].named_parameters()
    return {name: p.main_grad.clone() for name, p in named if "linear" in name and p.ndim == 2}


def least_cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return min(cosine_similarity(one[n].flatten(), other[n].flatten(), 0).item() for n in one)


def recomputed(checkpoint: Path, recipe: str) -> dict[str, Any]:
    """Gradients with and without recompute, bit by bit; and the largest |S| with it."""
    sums: list[float] = []
    found = []
    for recompute in (False, True):
        policy = build(checkpoint, recipe, recompute=recompute)
        policy.backward(*loss_of(policy, sums))
        found.append(gradients(policy))
    return {"same": checks.same(*found), "S": max(gather_lists([max(sums)], group=policy.groups.dp))}


def decoded(policy: Policy) -> Tensor:
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
    with decoder.session(slots=3, max_tokens=8):
        return torch.stack([decoder.feed([[1], [2], [3]]), decoder.feed([[4], [5], [6]])])


def canary(policy: Policy) -> Tensor:
    """The canary's log-probs as the engine for vLLM has them scored; the same on every rank."""
    assert dist.group.WORLD is not None
    mine = canary_scores(policy, CANARY)
    found: Tensor = share(None if mine is None else torch.cat(mine), group=dist.group.WORLD)
    return found


def canary_in_fp8(policy: Policy) -> Tensor:
    """The same without the care that it takes."""
    with (
        patch.object(build_module, "without_fp8", nullcontext),
        patch.object(build_module, "score_sequences", partial(score_sequences, align=policy.fp8.align)),
    ):
        return canary(policy)


def check(checkpoint: Path, folder: Path, recipe: str) -> dict[str, Any]:
    policy = build(checkpoint, recipe)
    found: dict[str, Any] = {"modules": probe_fp8(policy), "lent": lent(policy)}
    plain = build(checkpoint, "none")
    found["bf16 modules"] = probe_fp8(plain)
    found["noise"] = (scores(policy) - scores(plain)).std().item()
    found["in bf16"] = {
        "decode": torch.equal(decoded(policy), decoded(plain)),
        "canary": torch.equal(canary(policy), canary(plain)),
    }
    found["other packs"] = other_packs(policy)
    before = scores(policy)
    found["S"] = [step(policy)]
    step(plain)
    found["gradient"] = least_cosine(gradients(policy), gradients(plain))
    canary(policy)
    found["S"].append(step(policy))
    after, tokens = scores(policy), decoded(policy)
    found["moved"] = (after - before).abs().max().item()
    save_checkpoint(policy, folder, {"step": 2})
    state = checks.whole_state(policy)
    found["weights are the masters' cast"] = checks.same(checks.as_dtype(state, torch.bfloat16), state)
    fresh = build(checkpoint, recipe)
    load_checkpoint(fresh, folder)
    found["fresh"] = torch.equal(scores(fresh), after) and torch.equal(decoded(fresh), tokens)
    found["later S"] = step(policy), step(fresh)
    found["goes on"] = torch.equal(scores(fresh), scores(policy))
    found |= stale(fresh)
    found["refused"] = refused(policy)
    return found


def stale(policy: Policy) -> dict[str, Any]:
    """Find who does not see the last step without the refresh of FP8 copies of the weights before a pass."""
    with patch.object(MegatronModule, "set_is_first_microbatch", lambda self: None):
        step(policy)
        old = {"score": scores(policy), "canary in FP8": canary_in_fp8(policy)}
        bf16 = canary(policy)
    new = {"score": scores(policy), "canary in FP8": canary_in_fp8(policy)}
    return {
        "stale": {name: (new[name] - old[name]).abs().max().item() for name in new},
        "canary is fresh": torch.equal(canary(policy), bf16),
    }


def lent(policy: Policy) -> dict[str, Any]:
    """FP8 tensors in this process, whoever holds them, before and while the weights' memory is lent; and
    whether log-probs are what they were."""
    before, offload, counts = scores(policy), Offload(policy), []
    for there in (True, False):
        offload.hold(weights=there, rest=there)
        gc.collect()
        counts.append(sum(isinstance(one, CurrentScalingTensorRef) for one in gc.get_objects()))
    offload.hold(weights=True, rest=True)
    return {"FP8 tensors": counts, "same": torch.equal(scores(policy), before)}


def short_check(checkpoint: Path, recipe: str) -> dict[str, Any]:
    policy, plain = build(checkpoint, recipe), build(checkpoint, "none")
    found = {"modules": probe_fp8(policy), "other packs": other_packs(policy)}
    return found | {
        "noise": (scores(policy) - scores(plain)).std().item(),
        "S": [step(policy), step(policy)],
    }


def refused(policy: Policy) -> str:
    """The error where a layer's matrices are left in bf16."""
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
    found: dict[str, Any] = {}
    for recipe in ("tensorwise", "blockwise"):
        found[recipe] = check(checkpoint, out.parent / recipe, recipe)
        found[recipe]["recompute"] = recomputed(checkpoint, recipe)
    found["mxfp8"] = short_check(checkpoint, "mxfp8")
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
