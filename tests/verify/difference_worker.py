"""On every rank and in every layout that ``verify --all`` has: training steps whose sequences all sit exactly
at the edges of the band, with a difference of 2 ulp forced on one rank.

difference_worker.py OUT [LAYOUT...]
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from patching import Patch, wrap
from torch import Tensor

from megatron_fspo.config.correction import LengthFairGate
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.mcore.model import policy_loss
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.objective import surrogate
from megatron_fspo.objective.calibration import BandCalibrator
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first, gather_lists, share
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.rollout import embedded
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.trainer import correction
from megatron_fspo.trainer.mismatch import measure
from megatron_fspo.trainer.optimize import observe
from megatron_fspo.types import Prompt, SamplingParams
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import (
    LOSSES,
    SMALL,
    TEMPERATURE,
    Case,
    make_samples,
    random_weights,
    with_layers,
)
from megatron_fspo.verify.layouts import Layout, all_layouts, parse_layout
from megatron_fspo.verify.production import Outcome, Scored

BACKEND = choose_backend("cpu")
SAMPLES = make_samples(SMALL)
SPLIT = "2 micro-batches"
SEQUENCE = ("S", "advantage", "weight", "rollout weight", "band")
"""What is forced apart, with a loss of one decision per sequence."""


def forced(values: Tensor, towards: Tensor | float = math.inf) -> Tensor:
    """2 ulp further; 0 becomes the second number above it."""
    goal = torch.as_tensor(towards, dtype=values.dtype).expand_as(values)
    return values.nextafter(goal).nextafter(goal)


def apart(what: set[str], *, here: bool) -> Patch:
    """Puts every sequence (every token, of a token-level loss) on both edges of the band, and takes the
    advantage of some and the rollout weight of others; on the rank that is ``here``, forces ``what`` apart.
    """
    what = what if here else set()

    def decide(real: Any, ratio: Tensor, advantages: Tensor, *limits: Tensor, **more: Any) -> Any:
        low = high = ratio.detach()
        if "band" in what:  # as with a c that is a little smaller
            low, high = forced(low), forced(high, -math.inf)
        if "S" in what:
            ratio = forced(ratio.detach(), torch.where(advantages > 0, math.inf, -math.inf).to(ratio))
        terms = real(ratio, advantages, low, high, *limits[2:], **more)
        return replace(terms, weight=forced(terms.weight)) if "weight" in what else terms

    def loss(real: Any, self: Any, batch: Any, *rest: Any) -> Any:
        advantages = torch.where(batch.sample_index % 3 == 0, 0.0, batch.advantages)
        kept = torch.cat([batch.sample_index % 4 != 1, torch.tensor([False])])[batch.segment].to(advantages)
        return real(
            self,
            replace(
                batch,
                advantages=forced(advantages) if "advantage" in what else advantages,
                rollout_weights=forced(kept) if "rollout weight" in what else kept,
            ),
            *rest,
        )

    stack = ExitStack()
    stack.enter_context(wrap(surrogate, "min_form", decide))
    stack.enter_context(wrap(policy_loss.PolicyLoss, "loss", loss))
    return stack


@dataclass(frozen=True, kw_only=True)
class Place:
    """A policy in its layout. The rank that is to differ is the last; it decides only where nobody shares its
    sequences."""

    groups: ParallelGroups
    policy: Policy
    scored: Scored

    @property
    def here(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1

    def step(self, loss: str, what: set[str]) -> Outcome:
        """One optimizer step."""
        with apart(what, here=self.here):
            case = Case(name=loss, loss=LOSSES[loss], split=SPLIT)
            outcome = production.run(self.policy, case, self.scored, SAMPLES)
        copies = [(row, gradient.clone()) for row, gradient in outcome.gradients]
        # The records of a training run are those of the first tensor-parallel rank.
        rows = torch.stack([outcome.log_ratio_sums, outcome.clipped, outcome.out_of_band.double()])
        sums, clipped, outside = broadcast_first(rows, self.groups.tp)
        return replace(
            outcome, gradients=copies, log_ratio_sums=sums, clipped=clipped, out_of_band=outside > 0
        )

    def found(self) -> dict[str, Any]:
        """Difference → what of the step is other than without it, on any rank."""
        tp, cp = self.groups.tp.size(), self.groups.cp.size()
        clean = self.step("fspo", set())
        # Where nobody shares its sequences, the rank decides otherwise by right: that shows that it would.
        apart = SEQUENCE if tp * cp > 1 else ("S",)
        found = {what: unlike(clean, self.step("fspo", {what})) for what in apart}
        if tp * cp > 1:
            tokens = self.step("dapo", set())
            found["tokens"] = unlike(tokens, self.step("dapo", {*SEQUENCE}))
        if cp > 1 and tp == 1:  # with tensor parallel it would abort the job, or hang it
            with wrap(policy_loss, "broadcast_first", lambda real, values, *groups: values):
                found["S, and each decides for itself"] = unlike(clean, self.step("fspo", {"S"}))
        found |= {"c": self.calibrated(), "gate": self.gate(), "draws": self.drawn()}
        return {name: gathered(problems) for name, problems in found.items()}

    def calibrated(self) -> list[str]:
        """A calibrated c, forced apart in the calibration."""
        loss = FSPOLoss(calibrate=1).start(longest=256)
        flags = dict.fromkeys(("out_of_band", "nonfinite", "clipped_low", "clipped_high", "dual_clipped"), 0)
        records = [
            SequenceRecord(
                sample=n, rank=0, length=10 * n + 1, log_ratio_sum=0.01 * n + 0.1, advantage=1.0, **flags
            )
            for n in range(8)
        ]

        def nudge(real: Callable[..., None], calibrator: Any, *args: Any) -> None:
            real(calibrator, *args)
            calibrator.c = math.nextafter(math.nextafter(calibrator.c, math.inf), math.inf)

        with wrap(BandCalibrator, "observe", nudge) if self.here else nullcontext():
            step: Any = SimpleNamespace(records=records, number=2, measured=True)
            state: Any = SimpleNamespace(loss=loss, step=0)
            observe(step, state, self.groups, mock.Mock(), warm=True, fresh=True)
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, loss.state_dict())
        return [] if all(state == everywhere[0] for state in everywhere) else ["the band"]

    def gate(self) -> list[str]:
        """Responses exactly at a gate for the sampler's mismatch, with Σ Δ forced apart."""
        scores = self.scored.log_probs
        batches = self.scored.micro_batches.with_columns(
            old_log_probs=scores, sampled_log_probs=[score - 0.125 for score in scores]
        )
        mismatch = measure(batches, len(SAMPLES), group=self.groups.dp_cp)
        lasting = mismatch.sums

        def gate(real: Any, sums: Tensor, *_: Any) -> Tensor:
            return sums <= lasting

        with wrap(correction, "length_fair_gate", gate):
            kept, _ = correction.correct(LengthFairGate(c=1.0), batches, mismatch, groups=self.groups)
            moved = replace(mismatch, sums=forced(lasting)) if self.here else mismatch
            got, _ = correction.correct(LengthFairGate(c=1.0), batches, moved, groups=self.groups)
        same = all(
            torch.equal(a.rollout_weights, b.rollout_weights) and (b.rollout_weights[b.loss_mask] == 1).all()
            for a, b in zip(kept, got, strict=True)
        )
        return [] if same else ["what the gate drops"]

    def drawn(self) -> list[str]:
        """Responses of the embedded engine, where one rank draws other tokens. (2 ulp would hardly do it.)"""
        decoder = Decoder(self.policy.chunks, self.groups, vocab_size=SMALL.vocab_size)
        engine = EmbeddedEngine(decoder, max_batch=8)
        params = SamplingParams(n=2, temperature=1.0, max_tokens=5, stop_token_ids=(*range(20),), seed=1)
        prompts = [Prompt(index=i, token_ids=(i + 1, 7), text="", answer="") for i in range(3)]

        def draw(real: Any, logits: Tensor, draws: Tensor, **more: Any) -> Any:
            return real(logits, 1 - draws if self.here else draws, **more)

        with wrap(embedded, "sample", draw):
            mine = engine.submit(prompts, params)()
        groups = (self.groups.tp, self.groups.cp, self.groups.pp)
        return [] if all(mine == share(mine, group=group) for group in groups) else ["responses"]


def unlike(clean: Outcome, other: Outcome) -> list[str]:
    """What differs on this rank."""
    found = [
        name
        for name in ("log_ratio_sums", "clipped", "out_of_band", "seen")
        if not torch.equal(getattr(clean, name), getattr(other, name))
    ]
    pairs = [(want, got) for (_, want), (_, got) in zip(clean.gradients, other.gradients, strict=True)]
    # The weights of a rank's own tokens make some ulp of difference; another decision, about 1.
    if not all((want - got).abs().max() <= 1e-5 * want.abs().max() for want, got in pairs):
        found.append("gradients")
    return found


def gathered(problems: list[str]) -> list[str]:
    everyone = dist.group.WORLD
    assert everyone is not None
    return sorted(set(gather_lists(problems, group=everyone)))


def on_layout(layout: Layout) -> dict[str, Any]:
    groups = start(BACKEND, parallel=layout.parallel, seed=1)
    model = with_layers(SMALL, layout.parallel)
    policy = production.build(layout, model, random_weights(model), BACKEND, groups, torch.float32)
    scored = production.score(policy, SPLIT, SAMPLES, TEMPERATURE)
    place = Place(groups=groups, policy=policy, scored=scored)
    found = place.found()
    del policy, scored, place
    stop()
    return found


def main() -> None:
    join(BACKEND)
    world = dist.get_world_size()
    names = sys.argv[2:] or [layout.name for layout in all_layouts(SMALL, world_size=world)]
    stop()
    found = {name: on_layout(parse_layout(name, world_size=world)) for name in names}
    join(BACKEND)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
    stop()


if __name__ == "__main__":
    main()
