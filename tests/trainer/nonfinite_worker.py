"""On two ranks: a NaN inside the network, at the tokens of some responses, in several layouts.

nonfinite_worker.py OUT.json
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from by_layout import write_by_layout
from left_out_worker import moved, rollout_and_completions, scoring, settings
from megatron_fspo.errors import TrainingError
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start
from megatron_fspo.mcore.model import policy_loss
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.trainer.batch import TrainingBatch
from megatron_fspo.trainer.optimize import update
from megatron_fspo.trainer.rollout import make_layout, make_mini_batches, with_advantages
from megatron_fspo.trainer.training import State
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import SMALL, random_weights, with_layers
from megatron_fspo.verify.layouts import parse_layout

LAYOUTS = ("cp2 bfloat16", "pp2.vpp2", "tp2.sp", "dp2.do bfloat16")
CULPRIT, MANY = 4, (1, 2, 4, 6)
"""Of the first mini-batch's nine responses."""
LOSS = FSPOLoss(c_low=0.05, c_high=0.05, max_nonfinite_share=0.3)


class Fault:
    """NaN in the output of the first layer, or in its gradient, where tokens of some responses are next."""

    def __init__(self, samples: Sequence[int], *, backward: bool = False) -> None:
        self.samples, self.backward = samples, backward

    @contextmanager
    def __call__(self) -> Iterator[None]:
        original = policy_loss.forward

        def forward(batch: MicroBatch, model: Any) -> Tensor:
            gpt = policy_loss._gpt(model)
            hooks = [
                layer.register_forward_hook(lambda module, args, out: self.spoil(batch, gpt, out))
                for layer in gpt.decoder.layers
                if layer.layer_number == 1
            ]
            try:
                return original(batch, model)
            finally:
                for hook in hooks:
                    hook.remove()

        with mock.patch.object(policy_loss, "forward", forward):
            yield

    def spoil(self, batch: MicroBatch, gpt: Any, out: Any) -> Any:
        rows = [row for row, n in enumerate(batch.sample_index.tolist()) if n in self.samples]
        here = torch.isin(batch.segment, torch.tensor(rows)) & batch.loss_mask
        if gpt.config.sequence_parallel:
            tp = gpt.pg_collection.tp
            here = here.chunk(tp.size())[tp.rank()]
        hidden, *rest = out
        if self.backward:
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: torch.where(here[:, None, None], float("nan"), grad))
            return out
        # As a product: the gradient of the token is NaN, too, whatever comes from behind.
        return (hidden * torch.where(here, float("nan"), 1.0).to(hidden)[:, None, None], *rest)


class Situation:
    """A policy in a layout, and what the trainer has beside it."""

    def __init__(self, layout_name: str) -> None:
        name, _, dtype = layout_name.partition(" ")
        self.backend = choose_backend("cpu")
        self.layout = parse_layout(name, world_size=2)
        self.groups = start(self.backend, parallel=self.layout.parallel, seed=1)
        self.arch = with_layers(SMALL, self.layout.parallel)
        self.dtype = torch.bfloat16 if dtype else torch.float32

    def run(self) -> Any:
        """A run with the policy as it was in the beginning."""
        weights = random_weights(self.arch)
        policy = production.build(self.layout, self.arch, weights, self.backend, self.groups, self.dtype)
        for group in policy.optimizer.param_groups:
            group["max_lr"] = group["min_lr"] = 1e-3  # a step that can be seen
        said: list[str] = []
        # In bfloat16 what is left of a group rounds otherwise than the group, if it shares its prompt.
        config = settings(policy, LOSS, "off" if self.dtype == torch.bfloat16 else "auto")
        more: Any = {"log": SimpleNamespace(tokens=0), "rollout": SimpleNamespace(old_log_probs="recompute")}
        config = config.model_copy(update=more)
        return SimpleNamespace(
            inputs=SimpleNamespace(config=config, backend=self.backend),
            policy=policy,
            groups=self.groups,
            scoring=scoring(policy),
            state=State(step=2, loss=LOSS.start(longest=100), norms=deque(), skips_in_a_row=0, saved=0),
            layout=make_layout(config, self.arch, self.groups, self.backend),
            log=SimpleNamespace(say=said.append, warn=lambda _, text: said.append(text)),
            said=said,
        )

    def batch(self, run: Any) -> TrainingBatch:
        """Nine prompts with three responses each, in three mini-batches; all but the empty one in packs."""
        rollout, _ = rollout_and_completions(run.policy)
        pattern = torch.tensor([1.0, -0.5, -1.5]).expand(len(rollout.prompts), -1)
        rollout = with_advantages(rollout, pattern)
        micro_batches, sizes = make_mini_batches(run.inputs.config, rollout, self.groups, run.layout)
        old = moved(micro_batches, run.policy.score(micro_batches, run.scoring), seed=0)
        micro_batches = micro_batches.with_columns(old_log_probs=old)
        return TrainingBatch(
            rollout=rollout, micro_batches=micro_batches, sizes=sizes, on_policy=False, stale=False, warm=True
        )


def weights_of(policy: Policy) -> list[Tensor]:
    """Parameters, the fp32 copies behind them, and what Adam knows."""
    found = [parameter.detach().clone() for chunk in policy.chunks for parameter in chunk.parameters()]
    for group in policy.optimizer.param_groups:
        found += [p.detach().clone() for p in group["params"]]
    for one in policy.optimizer.chained_optimizers:  # type: ignore[attr-defined]
        for state in one.optimizer.state.values():
            found += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return found


def untouched(before: list[Tensor], policy: Policy) -> bool:
    """Whether all of it is the same to the bit."""
    after = weights_of(policy)
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def scoring_with_a_fault(situation: Situation) -> dict[str, Any]:
    """Who is not finite in a forward pass, and whose log-probs are others than without the fault."""
    run = situation.run()
    micro_batches = situation.batch(run).micro_batches
    with Fault([CULPRIT])():
        scores = run.policy.score(micro_batches, run.scoring)
    right = run.policy.score(micro_batches, run.scoring)
    broken, moved = [], []
    for batch, score, wanted in zip(micro_batches, scores, right, strict=True):
        for row, number in enumerate(batch.sample_index.tolist()):
            here = batch.loss_mask & (batch.segment == row)
            broken += [number] if not score[here].isfinite().all() else []
            moved += [number] if not torch.equal(score[here], wanted[here]) else []
    largest = max(len(batch.sample_index) for batch in micro_batches)
    return {"broken": broken, "moved": moved, "largest pack": largest}


def refused(situation: Situation) -> dict[str, Any]:
    """An optimizer step with the fault, by the policy alone, after one without."""
    run = situation.run()
    batch = situation.batch(run)
    first, *_ = batch.mini_batches
    update(run, batch, first, [])
    before = weights_of(run.policy)
    lr, steps = run.policy.optimizer.param_groups[0]["lr"], run.policy.optimizer_steps
    loss = policy_loss.PolicyLoss(objective=run.state.loss.objective(), scoring=run.scoring)
    try:
        with Fault([CULPRIT])():
            run.policy.update(first, loss)
        raised = ""
    except TrainingError as error:
        raised = str(error)
    same = lr == run.policy.optimizer.param_groups[0]["lr"] and steps == run.policy.optimizer_steps
    return {"raised": raised, "untouched": untouched(before, run.policy) and same}


def stepped(situation: Situation, fault: Fault) -> dict[str, Any]:
    """Two optimizer steps of a rollout, the first one with a fault."""
    run = situation.run()
    batch = situation.batch(run)
    first, second, _ = batch.mini_batches
    before = weights_of(run.policy)
    try:
        with fault():
            step = update(run, batch, first, [])
    except TrainingError as error:
        same = untouched(before, run.policy)
        return {"raised": str(error), "untouched": same, "said": run.said}
    same = untouched(before, run.policy)
    following = update(run, batch, second, [step])
    return {
        "skipped": [step.update.skipped, following.update.skipped],
        "broken": sorted(record.sample for record in step.nonfinite),
        "said": run.said,
        "in a row": run.state.skips_in_a_row,
        "untouched": same,
        "moved": not untouched(before, run.policy),
        "finite": all(tensor.isfinite().all().item() for tensor in weights_of(run.policy)),
    }


def found_in(layout_name: str) -> dict[str, Any]:
    """Situation → what either rank has to say."""
    situation = Situation(layout_name)
    found = {
        "scoring": scoring_with_a_fault(situation),
        "refused": refused(situation),
        "one": stepped(situation, Fault([CULPRIT])),
        "many": stepped(situation, Fault(MANY)),
        "backward": stepped(situation, Fault([CULPRIT], backward=True)),
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {name: [one[name] for one in every] for name in found}


if __name__ == "__main__":
    write_by_layout(LAYOUTS, found_in)
