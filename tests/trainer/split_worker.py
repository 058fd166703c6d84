"""On two ranks: what one optimizer step reports, for every split of one batch in several layouts; also with
corrections for a sampler whose log-probs are off by noise.

split_worker.py OUT.json
"""

from __future__ import annotations

import torch

from by_layout import write_by_layout
from megatron_fspo.config.correction import (
    LengthFairGate,
    SequenceTIS,
    TokenTIS,
)
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import gather_lists, share
from megatron_fspo.record.records import SequenceRecord, clip_metrics, records_of
from megatron_fspo.trainer.correction import Rule, correct
from megatron_fspo.trainer.mismatch import measure
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import (
    LOSSES,
    SMALL,
    SPLITS,
    TEMPERATURE,
    drifts,
    make_samples,
    random_weights,
)
from megatron_fspo.verify.layouts import parse_layout

LAYOUTS = ("dp2", "cp2", "pp2", "tp2.sp")
# Name → loss and correction. Noise of .04 per token: the rules act on some responses, not on all.
CASES: dict[str, tuple[str, Rule | None]] = {
    **{name: (name, None) for name in ("fspo", "gspo", "grpo", "dapo")},
    "fspo, length_fair_gate": ("fspo", LengthFairGate(c=0.03)),
    "fspo, token_tis": ("fspo", TokenTIS(cap=1.03)),
    "dapo, sequence_tis": ("dapo", SequenceTIS(cap=1.1)),
}


def reported(layout_name: str) -> dict[str, dict[str, float]]:
    """Loss and split → every number of the step."""
    backend = choose_backend("cpu")
    layout = parse_layout(layout_name, world_size=2)
    groups = start(backend, parallel=layout.parallel, seed=1)
    policy = production.build(layout, SMALL, random_weights(SMALL), backend, groups, torch.float32)
    samples = make_samples(SMALL)
    moved, noise = drifts(samples, seed=5), drifts(samples, seed=6)
    found = {}
    for split in SPLITS:
        scored = production.score(policy, split, samples, TEMPERATURE)
        batches = scored.micro_batches.with_columns(
            old_log_probs=scored.log_probs, sampled_log_probs=production.below(scored, noise, samples)
        )
        mismatch = measure(batches, len(samples), group=groups.dp_cp)
        old = production.below(scored, moved, samples)
        for name, (loss_name, correction) in CASES.items():
            mine: list[SequenceRecord] = []
            loss = PolicyLoss(
                objective=LOSSES[loss_name].objective(),
                scoring=scored.scoring,
                observer=lambda batch, terms, mine=mine: mine.extend(
                    records_of(batch, terms, groups.dp.rank())
                ),
            )
            corrected, metrics = batches, {}
            if correction is not None:
                corrected, metrics = correct(correction, batches, mismatch, groups=groups)
            corrected = corrected.with_columns(old_log_probs=old)
            update = policy.update(corrected, loss)
            records = gather_lists(share(mine, group=groups.pp, source=-1), group=groups.dp)
            numbers = update.metrics | {"grad_norm": update.grad_norm} | clip_metrics(records, seed=1)
            found[f"{name} | {split}"] = numbers | mismatch.metrics | metrics
    return found


if __name__ == "__main__":
    write_by_layout(LAYOUTS, reported)
