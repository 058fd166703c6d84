"""Every family in every layout of so many ranks: it decodes as it scores, replays routes, and its checkpoints
have the biases of routers. family_worker.py OUT WORLD FOLDER..."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputErrors
from megatron_fspo.mcore.machine.sizes import check_parallel
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.state.checkpoint import load_checkpoint, save_checkpoint
from megatron_fspo.weights import MegatronReader, read_architecture
from packs import sample
from passes import build, by_token, make_micro_batches, scoring_of

TEMPERATURE, LENGTH = 0.7, 40
KEPT = {4: [2, 0, 1], 11: [1, 1, 0, 2], 17: [3, 1]}
"""Tokens fed → the slots to keep: they move, one becomes two, some end."""
LAYOUTS = {
    1: {"tp1": Parallel()},
    2: {
        "tp2.sp": Parallel(tensor=2, sequence=True),
        "pp2": Parallel(pipeline=2),
        "ep2": Parallel(expert=2),
    },
}
SAVED_BY = Parallel(expert=2, distributed_optimizer=True)
Rows = list[tuple[list[int], list[float]]]
"""Sequences, and the log-probs of their tokens but the first three."""


def decoded(policy: Policy) -> Rows:
    """Three prompts of different lengths: each slot takes the likeliest token, the second or the third."""
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
    generator = torch.Generator().manual_seed(3)
    given = torch.randint(0, 11, (3, 5), generator=generator).tolist()
    prompts = [given[0][:3], given[1], given[2][:4]]
    rows: Rows = [(prompt[:3], []) for prompt in prompts]
    done: Rows = []
    with decoder.session(slots=3, max_tokens=LENGTH):
        fed = [ids for ids, _ in rows]
        while (length := len(rows[0][0])) < LENGTH:
            logs = (decoder.feed(fed) / TEMPERATURE).log_softmax(-1)
            if kept := KEPT.get(length):
                done += [row for slot, row in enumerate(rows) if slot not in kept]
                rows = [([*rows[slot][0]], [*rows[slot][1]]) for slot in kept]
                prompts, logs = [prompts[slot] for slot in kept], logs[kept]
                decoder.keep(kept)
            for slot, (ids, scores) in enumerate(rows):
                own = int(logs[slot].topk(4).indices[slot])
                ids.append(prompts[slot][length] if length < len(prompts[slot]) else own)
                scores.append(logs[slot, ids[-1]].item())
            fed = [ids[-1:] for ids, _ in rows]
    decoder.finish()
    return [*done, *rows]


def largest(values: Any, policy: Policy) -> float:
    """Over all ranks, those of another pipeline stage, too."""
    found = torch.tensor(float(values))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def decode(policy: Policy) -> dict[str, float]:
    """Largest difference of a log-prob between the decoder and the packed pass of the same sequences."""
    found = decoded(policy)
    assert len({tuple(ids) for ids, _ in found}) == len(found) == 4
    batches = make_micro_batches(policy, [sample(ids[:3], ids[3:]) for ids, _ in found], 100)
    scores = by_token(batches, policy.score(batches, scoring_of(policy, TEMPERATURE)), policy.groups)
    wanted = torch.tensor([x for _, row in found for x in row])
    return {"decode": largest((scores - wanted).abs().max(), policy)}


def replay(policy: Policy) -> dict[str, float]:
    """Routes of a first pass, replayed, change nothing. Others, as of a server that sends 0 for layers with
    an MLP, are used."""
    count, dense = policy.arch.num_experts, policy.arch.dense_layers
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, 11, (4, 20), generator=generator).tolist()
    batches = make_micro_batches(policy, [sample(ids[:6], ids[6:]) for ids in rows], 45)

    def scored(routes: list[Tensor] | None) -> tuple[Tensor, list[Tensor], bool]:
        given = batches if routes is None else batches.with_columns(routes=routes)
        routed, passes = policy.with_routers(given, replay=routes is not None)
        scores = torch.cat(policy.score(routed, scoring_of(policy)))
        assert passes is not None
        return scores, passes.routes(), any(bool(flips.any()) for flips in passes.flipped())

    mlps = torch.tensor([layer < dense for layer in policy.layers])[:, None]
    first, own, _ = scored(None)
    again, _, flipped = scored(own)
    others = [torch.where(mlps, 0, (route + 1) % count).to(torch.uint8) for route in own]
    moved, used, moves = scored(others)
    wanted = [torch.where(mlps, 255, route) for route in others]
    wrong = any(not torch.equal(a, b) for a, b in zip(used, wanted, strict=True))
    return {
        "replay": largest(flipped or not torch.equal(first, again), policy),
        "other routes": largest(wrong or not moves, policy),
        "moved": largest((moved - first).abs().max(), policy),
    }


def biases(policy: Policy) -> list[Tensor]:
    return [b for chunk in policy.chunks for name, b in chunk.named_buffers() if name.endswith("expert_bias")]


def save(folder: Path, out: Path) -> dict[str, float]:
    """Biases are float32 in a bfloat16 model, and those of the files; in its checkpoint, too, which another
    layout and dtype resumes and which our reader reads."""
    suffix = "gate.e_score_correction_bias"
    stored = {key: x for key, x in load_file(folder / "model.safetensors").items() if key.endswith(suffix)}
    wanted = [stored[key] for key in sorted(stored)]
    policy = build(folder, SAVED_BY, dtype=torch.bfloat16)
    found = [biases(policy)]
    save_checkpoint(policy, out, {"step": 0})
    shutil.copy(folder / "config.json", out)
    reader = MegatronReader(out, read_architecture(folder))
    found.append([reader.read(key) for key in sorted(stored)])
    policy = build(folder, LAYOUTS[2]["tp2.sp"], load=False)
    load_checkpoint(policy, out)
    found.append(biases(policy))
    pairs = [pair for each in found for pair in zip(wanted, each, strict=True)]
    same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs]
    return {"bias": largest(not (same and all(same)), policy)}


def main(out: Path, world: int, folders: list[Path]) -> None:
    found: dict[str, dict[str, float]] = {}
    for folder in folders:
        arch = read_architecture(folder)
        for layout, parallel in LAYOUTS[world].items():
            try:
                check_parallel(arch, parallel)
            except InputErrors:
                continue
            # The norm after a delta rule magnifies the rounding of float32.
            policy = build(folder, parallel, dtype=torch.float64 if arch.linear else torch.float32)
            found[f"{folder.name} {layout}"] = decode(policy) | (replay(policy) if arch.experts else {})
            del policy
            stop()
        if world > 1 and arch.experts and arch.experts.sigmoid:
            found[f"{folder.name} saved"] = save(folder, out.parent / f"saved-{folder.name}")
            leads = dist.get_rank() == 0
            stop()
    if world == 1 or leads:
        out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
