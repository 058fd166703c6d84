"""On two ranks: optimizer steps with and without the responses that have no gradient, in several layouts;
also with corrections for a sampler whose log-probs are off.

left_out_worker.py OUT.json
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from by_layout import write_by_layout
from megatron_fspo.config import Batch, Config
from megatron_fspo.config.correction import LengthFairGate, SequenceTIS, TokenTIS
from megatron_fspo.losses import DAPOLoss, FSPOLoss, PolicyLossConfig
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.groups import gather_lists, share
from megatron_fspo.record.records import Recorder, clip_metrics
from megatron_fspo.trainer import rollout as rollout_module
from megatron_fspo.trainer.correction import Rule, correct
from megatron_fspo.trainer.mismatch import measure
from megatron_fspo.trainer.rollout import Rollout, describe, make_rollout, with_advantages
from megatron_fspo.types import Completion, Prompt, Routing
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import SMALL, random_weights
from megatron_fspo.verify.layouts import parse_layout

SAMPLES, PROMPTS, MINI_BATCHES = 3, 9, 3
# One group of each of the first two mini-batches has variance or two; none of the last one's.
HAS_VARIANCE = (True, False, False, True, True, False, False, False, False)
LAYOUTS = ("dp2", "cp2", "pp2", "tp2.sp")
FSPO, DAPO = FSPOLoss(c_low=0.05, c_high=0.05), DAPOLoss(eps_low=0.05, eps_high=0.06)
LOSSES: dict[str, tuple[PolicyLossConfig, Rule | None]] = {
    "fspo": (FSPO, None),
    "dapo": (DAPO, None),
    "fspo with length_fair_gate": (FSPO, LengthFairGate(c=0.03)),
    "fspo with token_tis": (FSPO, TokenTIS(cap=1.03)),
    "dapo with sequence_tis": (DAPO, SequenceTIS(cap=1.02)),
    "fspo, entropy": (FSPO.model_copy(update={"entropy_coef": 0.3}), None),
    "fspo, kl": (FSPO.model_copy(update={"kl_coef": 0.2}), None),
}


def rollout_and_completions(policy: Policy) -> tuple[Rollout, list[Completion]]:
    """Groups with and without variance; in one with it a response has A = 0, too, and one in the batch is
    empty. Into every fourth an environment inserted three tokens. Which data-parallel rank holds a response
    follows no rule of places."""
    groups, vocab = policy.groups, policy.arch.vocab_size
    generator = torch.Generator().manual_seed(11)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())

    prompts = [Prompt(index=i, token_ids=ids(1 + i % 4), text="", answer="") for i in range(PROMPTS)]
    table, held, completions = [], {}, []
    for number in range(PROMPTS * SAMPLES):
        length = 0 if number == 13 else 1 + (7 * number) % 19
        owner = (number * number) % 5 % groups.dp.size()
        half, more = length // 2, 3 * (number % 4 == 1)
        tokens, log_probs = ids(length), torch.randn(length, generator=generator).tolist()
        completion = Completion(
            token_ids=(*tokens[:half], *(5, 6, 7)[:more], *tokens[half:]),
            log_probs=(*log_probs[:half], *[0.0] * more, *log_probs[half:]),
            loss_mask=[1] * half + [0] * more + [1] * (length - half),
            finish_reason="length",
            weight_version=0,
        )
        table.append(describe(completion, owner))
        completions.append(completion)
        if groups.is_replica_leader and owner == groups.dp.rank():
            held[number] = completion
    rollout = make_rollout(prompts, SAMPLES, torch.tensor(table, dtype=torch.float64), held)
    pattern = torch.tensor([1.0, 0.0, -1.5])
    return with_advantages(rollout, torch.tensor(HAS_VARIANCE)[:, None] * pattern), completions


@contextmanager
def nobody_left_out() -> Iterator[None]:
    """The reference: every response is in a pack."""
    with mock.patch.object(rollout_module, "left_out", lambda config, rollout: rollout.lengths < 0):
        yield


def settings(policy: Policy, loss: PolicyLossConfig, share: Any = "auto") -> Any:
    """The sections of a run's configuration that packs depend on."""
    batch = Batch(mini_batches=MINI_BATCHES, max_tokens=48, share_prompts=share)
    return Config.model_construct(parallel=policy.parallel, batch=batch, loss=loss)


def layout_for(policy: Policy, config: Any) -> PackLayout:
    return rollout_module.make_layout(config, policy.arch, policy.groups, policy.backend)


def moved(micro_batches: MicroBatches, scores: list[Tensor], seed: float) -> list[Tensor]:
    """Scores below and above these: each token's by its response and its place there, whoever holds it."""
    found = []
    for batch, score in zip(micro_batches, scores, strict=True):
        index = torch.cat([batch.sample_index, batch.sample_index.new_zeros(1)])[batch.segment]
        place = batch.position_ids[0]
        found.append(score - 0.05 * torch.sin(seed + 7.0 * index + 3.0 * place).to(score))
    return found


def make_micro_batches(policy: Policy, rollout: Rollout, loss: PolicyLossConfig) -> list[MicroBatches]:
    """Of each mini-batch, with log-probs of others that lie below and above the policy's."""
    config = settings(policy, loss)
    micro_batches, sizes = rollout_module.make_mini_batches(
        config, rollout, policy.groups, layout_for(policy, config)
    )
    scores = policy.score(micro_batches, scoring(policy))

    micro_batches = micro_batches.with_columns(
        old_log_probs=moved(micro_batches, scores, 1),
        reference_log_probs=moved(micro_batches, scores, 2),
        sampled_log_probs=moved(micro_batches, scores, 3),
    )
    ends = list(accumulate(sizes, initial=0))
    return [micro_batches[start:end] for start, end in pairwise(ends)]


def scoring(policy: Policy) -> Scoring:
    return Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=0.8)


def steps(
    policy: Policy, rollout: Rollout, loss: PolicyLossConfig, rule: Rule | None
) -> list[dict[str, Any]]:
    """What each mini-batch's optimizer step computes: the gradients (this rank's), and the rest (of all)."""
    found, groups = [], policy.groups
    for micro_batches in make_micro_batches(policy, rollout, loss):
        recorder = Recorder(1)
        policy_loss = PolicyLoss(
            objective=loss.objective(),
            scoring=scoring(policy),
            entropy_coef=loss.entropy_coef,
            kl_coef=loss.kl_coef,
            observer=recorder,
        )
        mismatch = measure(micro_batches, len(rollout), group=groups.dp_cp)
        reported = mismatch.metrics
        if rule is not None:
            micro_batches, metrics = correct(rule, micro_batches, mismatch, groups=groups)
            reported |= metrics
        update = policy.update(micro_batches, policy_loss)
        records = gather_lists(
            share(recorder.records(groups.dp.rank()), group=groups.pp, source=-1), group=groups.dp
        )
        numbers = [int(n) for batch in micro_batches for n in batch.sample_index]
        found.append(
            {
                "gradients": {
                    name: parameter.main_grad.double().clone()
                    for chunk in policy.chunks
                    for name, parameter in chunk.named_parameters()
                },
                "metrics": update.metrics,
                "reported": reported | update.metrics | clip_metrics(records, samples=1, seed=1),
                "grad_norm": update.grad_norm,
                "packed": sorted(gather_lists(numbers, group=groups.dp)),
                "totals": [
                    micro_batches.totals.num_sequences,
                    micro_batches.totals.num_tokens,
                    micro_batches.totals.packed_tokens,
                ],
            }
        )
    return found


def compared(policy: Policy) -> dict[str, list[dict[str, Any]]]:
    """Loss → for each mini-batch what both ways have, and how far their gradients are apart on any rank."""
    found = {}
    for name, (loss, rule) in LOSSES.items():
        rollout = rollout_and_completions(policy)[0]
        got = steps(policy, rollout, loss, rule)
        with nobody_left_out():
            want = steps(policy, rollout, loss, rule)
        found[name] = [_compared(one, other) for one, other in zip(got, want, strict=True)]
    return found


def _compared(got: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    gap = 0.0
    for name, wanted in want["gradients"].items():
        scale = wanted.abs().max().item()
        off = (got["gradients"][name] - wanted).abs().max().item()
        gap = max(gap, off / scale if scale else off)
    largest: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(largest, gap)
    pair = {key: [got[key], want[key]] for key in ("metrics", "reported", "grad_norm", "packed", "totals")}
    return pair | {"gap": max(largest)}


def routes_of_packs(policy: Policy) -> list[int]:
    """How many tokens in packs have the sampler's routes, how many have none, and how many have others than
    they should or are wrongly in or out of the mask, with prompts shared or not, on all ranks. Every fourth
    response came without, and no sampler reads its last token."""
    groups, layers = policy.groups, policy.layers
    rollout, completions = rollout_and_completions(policy)
    routing = Routing(layers=SMALL.num_layers, experts=200, per_token=2)
    sent, generator = {}, torch.Generator().manual_seed(3)
    for number, completion in enumerate(completions):
        rows = len(rollout.prompts[number // SAMPLES].token_ids) + len(completion.token_ids) - 1
        sent[number] = torch.randint(
            0, 200, (rows, SMALL.num_layers, 2), dtype=torch.uint8, generator=generator
        )
    told = {number for number in sent if number % 4}
    held = {
        number: replace(completion, routes=sent[number] if number in told else None)
        for number, completion in rollout.held.items()
    }
    routed = torch.tensor([1 if number in told else -1 for number in sent])
    counts = torch.zeros(3, dtype=torch.long)
    for key in ("off", "auto"):
        config = settings(policy, FSPO, key)
        with nobody_left_out():
            micro_batches, _ = rollout_module.make_mini_batches(
                config,
                replace(rollout, held=held, routed=routed),
                groups,
                layout_for(policy, config),
                routing=routing,
                layers=layers,
            )
        for batch in micro_batches:
            assert batch.routes is not None and batch.routes.dtype == torch.uint8
            index = [*batch.sample_index.tolist(), -1]
            owners = batch.segment.clone()
            for prefix in batch.prefixes:
                owners[prefix.start : prefix.end] = prefix.sequences[0]
            for token, (owner, place) in enumerate(
                zip(owners.tolist(), batch.position_ids[0].tolist(), strict=True)
            ):
                number = index[owner]
                label = place + 1 - len(rollout.prompts[number // SAMPLES].token_ids)
                after = completions[number].loss_mask[label:][:1] if number >= 0 <= label else []
                counts[2] += bool(batch.loss_mask[token]) != any(after)
                known = number in told and place < len(sent[number])
                want = sent[number][place, layers] if known else torch.full((len(layers), 2), 255)
                right = torch.equal(batch.routes[token].long(), want.long())
                if key == "off" or not right:
                    counts[0 if right and known else 1 if right else 2] += 1
    dist.all_reduce(counts)
    return counts.tolist()


def found_in(layout_name: str) -> dict[str, Any]:
    """See :func:`compared`."""
    backend = choose_backend("cpu")
    layout = parse_layout(layout_name, world_size=2)
    groups = start(backend, parallel=layout.parallel, seed=1)
    policy = production.build(layout, SMALL, random_weights(SMALL), backend, groups, torch.float32)
    return compared(policy) | {"routes": routes_of_packs(policy)}


if __name__ == "__main__":
    write_by_layout(LAYOUTS, found_in)
