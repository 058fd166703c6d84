"""One process, a mixture of experts in float64: a pass over the batch of ``verify`` with shared prompts and
without.

share_worker.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.packing.batch import MicroBatch, Sequences
from megatron_fspo.packing.pack import PackLayout, pack
from megatron_fspo.verify.cases import MIXTURE, make_samples, random_weights
from megatron_fspo.verify.layouts import parse_layout
from megatron_fspo.verify.production import build

backend = choose_backend("cpu")
layout = parse_layout("moe", world_size=1)
groups = start(backend, parallel=layout.parallel, seed=1)
policy = build(layout, MIXTURE, random_weights(MIXTURE), backend, groups, torch.float64)
samples = make_samples(MIXTURE)
sequences = Sequences.of(
    prompts=[sample.prompt.token_ids for sample in samples],
    responses=[sample.completion.token_ids for sample in samples],
    advantages=[sample.advantage for sample in samples],
)
scoring = Scoring(groups=groups, vocab_size=MIXTURE.vocab_size, temperature=1.0)
out = {}
seen: list[tuple[list[int], int]] = []  # borders that RoPE begins at, and angles
policy.chunks[0].decoder.layers[0].self_attention.register_forward_pre_hook(
    lambda _, args, kwargs: seen.append(
        (kwargs["packed_seq_params"].cu_seqlens_q.tolist(), len(kwargs["rotary_pos_emb"]))
    ),
    with_kwargs=True,
)
for share in (False, True):
    micro_batches = pack(sequences, PackLayout(share_prompts=share))
    routed, passes = policy.with_routers(micro_batches)
    assert passes is not None
    scores = policy.score(routed, scoring)
    sums: list[float] = []

    def observe(batch: MicroBatch, terms: Any, log_ratio: Tensor, sums: list[float] = sums) -> None:
        sums += terms.log_ratio_sum.tolist()

    loss = PolicyLoss(
        objective=FSPOLoss(c_low=0.1, c_high=0.1).objective(), scoring=scoring, observer=observe
    )
    report = passes.report().tolist()
    micro_batches = micro_batches.with_columns(old_log_probs=scores, routes=passes.routes())
    micro_batches, _ = policy.with_routers(micro_batches, replay=True)
    policy.backward(micro_batches, loss)
    norm = torch.cat([p.main_grad.flatten() for p in policy.chunks[0].parameters()]).norm().item()
    out[str(share)] = {
        "tokens": micro_batches.tokens,
        "report": report,
        "sums": sums,
        "norm": norm,
        "rope": seen[-1],
    }
Path(sys.argv[1]).write_text(json.dumps(out), encoding="utf-8")
stop()
