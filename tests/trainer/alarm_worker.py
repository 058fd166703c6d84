"""Rollouts sampled by the embedded engine in a way the trainer did not ask for, and what the alarm says:
of all situations on one rank, of some in layouts of two.

alarm_worker.py OUT.json
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from by_layout import write_by_layout
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.parallel.groups import gather_lists
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.trainer.mismatch import LIMIT, MismatchAlarm, token_deltas
from megatron_fspo.types import Completion, Prompt, Sample, SamplingParams, VersionSpan
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import SMALL, random_weights, with_layers
from megatron_fspo.verify.layouts import parse_layout
from mismatch_cases import as_rollout
from packs import make_micro_batches

TEMPERATURE, VERSION = 0.7, 5
OLDER = 1  # tokens that an older version wrote, of each response
ALONE, LAYOUTS = "single", ("dp2", "cp2", "pp2.vpp2", "tp2.sp")
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Situation:
    """A policy in training in one layout, and others that may have sampled in its place."""

    def __init__(self, layout_name: str) -> None:
        self.backend = choose_backend("cpu")
        layout = parse_layout(layout_name, world_size=WORLD)
        self.groups = start(self.backend, parallel=layout.parallel, seed=1)
        arch = with_layers(SMALL, layout.parallel)
        weights = random_weights(arch)
        generator = torch.Generator().manual_seed(9)

        def policy(noise: float, head: float = 1.0) -> Policy:
            moved = {n: w + noise * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
            moved["lm_head.weight"] *= head
            return production.build(layout, arch, moved, self.backend, self.groups, torch.float32)

        self.policy, self.nearby, self.other = policy(0.0), policy(0.01), policy(0.3)
        # As sure of itself as a trained model is against an untrained one: hardly any Δ above 0.
        self.sure = policy(0.3, head=20.0)

    def sample(self, policy: Policy | None = None, **changed: Any) -> list[Sample]:
        """Four responses to each of eight prompts; sampled as asked for but for what is ``changed``."""
        version = changed.pop("version", VERSION)
        params = SamplingParams(
            **{"n": 4, "temperature": TEMPERATURE, "max_tokens": 24, "stop_token_ids": (3,), "seed": 1}
            | changed
        )
        prompts = [Prompt(index=i, token_ids=(i + 1, 7), text="", answer="") for i in range(8)]
        model = policy or self.policy
        engine = EmbeddedEngine(Decoder(model.chunks, self.groups, vocab_size=SMALL.vocab_size), max_batch=64)
        engine.update_weights(version)
        dp = self.groups.dp
        mine = range(dp.rank(), len(prompts), dp.size())
        rows = engine.submit([prompts[i] for i in mine], params)()
        found = dict(gather_lists(list(zip(mine, rows, strict=True)), group=dp))
        return [
            Sample(prompt=prompt, number=n, completion=completion, reward=0.0, advantage=0.0)
            for i, prompt in enumerate(prompts)
            for n, completion in enumerate(found[i])
        ]

    def check(
        self,
        samples: Sequence[Sample],
        *,
        noise: float = 0.0,
        raw: bool = False,
        spoilt: bool = False,
        **changed: Any,
    ) -> tuple[dict[str, float], str | None]:
        """What the alarm says. ``raw``: log-probs at temperature 1 in place of the sampler's; ``spoilt``: bad
        ones for the first token of each response."""
        batches = self._micro_batches(samples)
        sampled = self._scores(batches, 1.0) if raw else [batch.sampled_log_probs for batch in batches]
        generator = torch.Generator().manual_seed(self.groups.dp.rank())
        first = len(samples[0].prompt.token_ids) - 1
        sampled = [
            log_probs
            + noise * torch.randn(batch.loss_mask.shape, generator=generator)
            + 5.0 * spoilt * (batch.position_ids[0] == first)
            for batch, log_probs in zip(batches, sampled, strict=True)
        ]
        batches = batches.with_columns(
            sampled_log_probs=sampled, old_log_probs=self._scores(batches, TEMPERATURE)
        )
        asked: dict[str, Any] = {"version": VERSION, "top_p": 1.0, "limit": LIMIT[torch.float32]} | changed
        alarm = MismatchAlarm(
            fresh=as_rollout(samples).fresh_from(asked["version"]),
            groups=self.groups,
            **asked,
        )
        for batch in batches:
            alarm.add(batch, token_deltas(batch))
        return alarm.check()

    def _micro_batches(self, samples: Sequence[Sample]) -> MicroBatches:
        """Two per pipeline stage."""
        groups = self.groups
        mine = range(groups.dp.rank(), len(samples), groups.dp.size())
        count = 2 * groups.pp.size()
        return make_micro_batches(
            samples,
            [mine[number::count] for number in range(count)],
            context_rank=groups.cp.rank(),
            context_size=groups.cp.size(),
            multiple_of=groups.tp.size(),
        )

    def _scores(self, batches: Sequence[MicroBatch], temperature: float) -> list[torch.Tensor]:
        scoring = Scoring(groups=self.groups, vocab_size=SMALL.vocab_size, temperature=temperature)
        return self.policy.score(batches, scoring)


def with_spans(samples: Sequence[Sample], first: int) -> list[Sample]:
    """Responses whose first tokens an older version wrote."""

    def spanned(completion: Completion) -> Completion:
        spans = (
            VersionSpan(version=first, start=0, end=OLDER),
            VersionSpan(version=VERSION, start=OLDER, end=len(completion.token_ids)),
        )
        return replace(completion, weight_version=first, version_spans=spans)

    return [replace(sample, completion=spanned(sample.completion)) for sample in samples]


def older(s: Situation, sound: Sequence[Sample]) -> list[Sample]:
    """Half of the responses from the weights before."""
    old = s.sample(s.nearby, version=VERSION - 1)
    return [*sound[:9], *old[9:]]


OTHER = "log-probs before the temperature (a server without"
CUT = "a vocabulary cut by top-p or top-k"
BF16: dict[str, Any] = {"noise": 0.009, "limit": LIMIT[torch.bfloat16]}
Check = Callable[[Situation, list[Sample]], tuple[dict[str, float], str | None]]

IN_EVERY_LAYOUT: dict[str, tuple[str | None, Check]] = {
    "sound": (None, lambda s, sound: s.check(sound)),
    "raw": (OTHER, lambda s, sound: s.check(sound, raw=True)),
    "other weights": (OTHER, lambda s, sound: s.check(s.sample(s.other))),
}
"""Situation → the cause that is to be named, and how it comes about; ``sound``: responses as asked for."""
SITUATIONS: dict[str, tuple[str | None, Check]] = IN_EVERY_LAYOUT | {
    "sound in bf16": (None, lambda s, sound: s.check(sound, **BF16)),
    "raw in bf16": (OTHER, lambda s, sound: s.check(sound, raw=True, **BF16)),
    "temperature ignored": (OTHER, lambda s, sound: s.check(s.sample(temperature=1.0))),
    "temperature 0.35": (OTHER, lambda s, sound: s.check(s.sample(temperature=0.35))),
    "top-p": (
        f"{CUT}, and log-probs renormalised over the rest; but rollout.top_p is 1",
        lambda s, sound: s.check(s.sample(top_p=0.6)),
    ),
    "top-p as asked": (
        f"{CUT}, and log-probs renormalised over the rest; expected with rollout.top_p = 0.6",
        lambda s, sound: s.check(s.sample(top_p=0.6), top_p=0.6),
    ),
    "weights of a surer model": (OTHER, lambda s, sound: s.check(s.sample(s.sure))),
    "weights nearby": (OTHER, lambda s, sound: s.check(s.sample(s.nearby))),
    "some older": (None, lambda s, sound: s.check(older(s, sound))),
    "partly older": (OTHER, lambda s, sound: s.check(with_spans(sound, VERSION - 1), raw=True)),
    "partly older, and not right before": (
        None,
        lambda s, sound: s.check(with_spans(sound, VERSION - 1), spoilt=True),
    ),
    "spoilt": (OTHER, lambda s, sound: s.check(sound, spoilt=True)),
}


def said(layout_name: str) -> dict[str, Any]:
    """Situation → metrics and text."""
    s = Situation(layout_name)
    sound = s.sample()
    found = {"older weights": s.check(s.sample(s.nearby, version=VERSION - 1))}
    for name, (_, check) in (SITUATIONS if layout_name == ALONE else IN_EVERY_LAYOUT).items():
        found[name] = check(s, sound)
    return found


if __name__ == "__main__":
    write_by_layout(LAYOUTS if WORLD > 1 else [ALONE], said)
