"""On every rank: one production step per layout and checkpoint; writes log-probs and gradients to compare.

worker.py OUT TIED UNTIED MOE WORLD
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from cases import KINDS, LAYOUTS, PROMPTS_TO_DECODE, TEMPERATURE, drift, fits, samples
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.state.hf_weights import export_hf, hf_tensors, load_hf
from megatron_fspo.parallel.groups import gather_lists, share
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.types import Prompt, SamplingParams
from packs import collate
from passes import build, by_token, loss_of, make_micro_batches, scoring_of


def step(policy: Policy, max_tokens: int) -> dict[str, torch.Tensor]:
    """Score, then one optimizer step on drifted old log-probs; returns everything on rank 0."""
    groups, rows = policy.groups, samples()
    batches = make_micro_batches(policy, rows, max_tokens)
    scores = policy.score(batches, scoring_of(policy))
    old = []
    for batch, score in zip(batches, scores, strict=True):
        shifted = torch.full_like(score, float("nan"))  # what is outside the mask must not matter
        for n, i in enumerate(batch.sample_index.tolist()):
            here = batch.loss_mask & (batch.segment == n)
            prompt = len(rows[i].prompt.token_ids)
            moved = drift(i).to(score.device)
            shifted[here] = score[here] - moved[batch.position_ids[0, here] - prompt + 1]
        old.append(shifted)
    sums: list[tuple[int, float, bool]] = []
    loss = loss_of(
        policy,
        lambda batch, terms, _: sums.extend(
            zip(
                batch.sample_index.tolist(),
                terms.log_ratio_sum.tolist(),
                (terms.clipped_low + terms.clipped_high + terms.dual_clipped > 0).tolist(),
                strict=True,
            )
        ),
    )
    update = policy.update(batches.with_columns(old_log_probs=old), loss)
    flags = sorted(gather_lists(share(sums, group=groups.pp, source=-1), group=groups.dp))
    return {
        "log_probs": by_token(batches, scores, groups),
        "sums": torch.tensor([s for _, s, _ in flags]),
        "clipped": torch.tensor([c for _, _, c in flags]),
        "objective": torch.tensor(-update.metrics["actor/pg_loss"], dtype=torch.float64),
        "grad_norm": torch.tensor(update.grad_norm, dtype=torch.float64),
    }


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Under Hugging Face names, merged over tensor and pipeline ranks, by the export's own code."""
    policy.gather_gradients()
    named = [[(name, p.main_grad) for name, p in chunk.named_parameters()] for chunk in policy.chunks]
    return {f"grad.{name}": value.clone() for name, value in hf_tensors(policy, named)}


def decode(policy: Policy) -> dict[str, torch.Tensor]:
    """Completions of prompts of different lengths, in one batch and in many, scored by the training pass;
    each data-parallel rank has its own."""
    data = policy.groups.dp
    prompts = [Prompt(index=i, token_ids=ids, text="", answer="") for i, ids in enumerate(PROMPTS_TO_DECODE)]
    params = SamplingParams(n=3, max_tokens=20, temperature=TEMPERATURE, stop_token_ids=(5, 6), seed=7)
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
    mine = range(data.rank(), len(prompts), data.size())
    wide = EmbeddedEngine(decoder, max_batch=12).submit(prompts, params, mine)()
    narrow = EmbeddedEngine(decoder, max_batch=5).submit(prompts, params, mine)()
    assert [[c.token_ids for c in row] for row in wide] == [[c.token_ids for c in row] for row in narrow]
    likeliest = replace(params, n=1, temperature=0, stop_token_ids=())
    greedy = EmbeddedEngine(decoder, max_batch=12).submit(prompts, likeliest, mine)()
    assert all(chunk.training for chunk in policy.chunks)
    worst = 0.0
    base = samples()[0]
    # The interleaved schedule wants as many micro-batches as stages.
    chunks = policy.parallel.pipeline
    for prompt, row in zip((prompts[i] for i in mine), wide, strict=True):
        for completion in row:
            batch = collate(
                [replace(base, prompt=prompt, completion=completion)],
                [0],
                num_sequences=1,
                num_tokens=len(completion.token_ids),
                context_rank=policy.groups.cp.rank(),
                context_size=policy.groups.cp.size(),
                multiple_of=policy.groups.tp.size(),
            ).to(policy.backend.device)
            scores = policy.score([batch] * chunks, scoring_of(policy))
            gap = (scores[0] - batch.sampled_log_probs)[batch.loss_mask]
            worst = max([worst, *gap.abs().tolist()])
    rows = sorted(gather_lists([*zip(mine, wide, greedy, [worst] * len(mine), strict=True)], group=data))
    tokens = [t for _, row, _, _ in rows for completion in row for t in completion.token_ids]
    return {
        "decode_error": torch.tensor(max(each for *_, each in rows)),
        "decoded": torch.tensor(tokens),
        "greedy": torch.tensor([row[0].token_ids for _, _, row, _ in rows]),
    }


def main() -> None:
    out, world = Path(sys.argv[1]), int(sys.argv[-1])
    checkpoints = dict(zip(KINDS, map(Path, sys.argv[2:-1]), strict=True))
    for name, parallel in LAYOUTS[world].items():
        for kind, checkpoint in checkpoints.items():
            if not fits(kind, name):
                continue
            for max_tokens in (512, 70):  # all in one micro-batch, and many
                policy = build(checkpoint, parallel)
                result = decode(policy) if max_tokens == 512 else {}
                result |= step(policy, max_tokens) | gradients(policy)
                if dist.get_rank() == 0:
                    save_file(result, str(out / f"{name}-{kind}-{max_tokens}.safetensors"))
                if max_tokens == 70:
                    load_hf(policy, checkpoint)  # fresh weights: the step above moved the others
                    export_hf(policy, out / f"export-{name}-{kind}", source=checkpoint)
                model = weakref.ref(policy)
                del policy
                stop()
                assert model() is None, "its groups and their threads stay, too"


if __name__ == "__main__":
    main()
