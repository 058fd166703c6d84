"""A training run in which something goes wrong.

faulty_run.py FAULT ARGUMENT... : WORDS...: a function of this file, what it takes, a colon, the words of the
command line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.job import consistency, lock
from megatron_fspo.job.hang import record_collectives
from megatron_fspo.lab.status import examine, render
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.mcore.state.parameter_state import parameter_states
from megatron_fspo.trainer import batch, loop, prepare, sampling
from megatron_fspo.trainer.sampling import RolloutQueue


def stop(place: str, count: str) -> AbstractContextManager[Any]:
    """SIGTERM to the first rank alone, at the COUNTth graded response (``rollout``) or optimizer step
    (``update``)."""
    module, name = {"rollout": (sampling, "response_text"), "update": (loop, "update")}[place]
    real, calls = getattr(module, name), itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(count) and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3)  # until it has reached the other ranks
        return real(*args, **kwargs)

    return mock.patch.object(module, name, counted)


SIXTH = 6
"""The optimizer step that goes wrong: the second of step 2; there are four of one micro-batch in step 1."""


def nan_at_the_head() -> AbstractContextManager[Any]:
    """In a sequence on its way into the loss, as by a broken kernel; no parameter's gradient has it."""
    original, calls = PolicyLoss.loss, itertools.count(1)

    def loss(self, batch, model, hidden):  # type: ignore[no-untyped-def]
        if next(calls) == SIXTH:
            # Under sequence parallel this rank holds a slice of the tokens.
            share = batch.segment.chunk(self.scoring.groups.tp.size())[self.scoring.groups.tp.rank()]
            hidden = hidden.clone()
            hidden[0, share == 0] = float("nan")
        return original(self, batch, model, hidden)

    return mock.patch.object(PolicyLoss, "loss", loss)


def _state_of(policy: Policy) -> str:
    """A hash of the weights, and of all that the optimizer knows."""
    found = hashlib.sha256(json.dumps([policy.optimizer_steps]).encode())
    for state in parameter_states(policy):
        for tensor in (state.parameter, state.main, *state.moments.values()):
            found.update(tensor.detach().numpy().tobytes())
    found.update(json.dumps([group["lr"] for group in policy.optimizer.param_groups]).encode())
    return found.hexdigest()


@contextmanager
def spikes(out: str, steps: str) -> Iterator[None]:
    """In these optimizer steps, ``9,10``, from 1, the loss of rank 1 is a million times too large. Each rank
    writes to ``out`` whether a step was skipped, and left weights and optimizer as they were, to the bit."""
    update, loss, rank = loop.update, PolicyLoss.loss, os.environ["RANK"]
    found: list[dict[str, float]] = []

    def watched(run: Any, *args: Any, **kwargs: Any) -> Any:
        before = _state_of(run.policy)
        found.append({})
        step = update(run, *args, **kwargs)
        moved = _state_of(run.policy) != before
        found[-1] = {"skipped": step.update.skipped, "moved": moved, "norm": step.update.grad_norm}
        return step

    def spiked(self: PolicyLoss, *args: Any) -> Any:
        value, *rest = loss(self, *args)
        spike = rank == "1" and str(len(found)) in steps.split(",")
        return ((1e6 if spike else 1.0) * value, *rest)

    with mock.patch.object(loop, "update", watched), mock.patch.object(PolicyLoss, "loss", spiked):
        try:
            yield
        finally:
            Path(f"{out}.{rank}").write_text(json.dumps(found))


@contextmanager
def slow_rank(folder: str, out: str) -> Iterator[None]:
    """Rank 1 computes slowly; the status of the run in ``folder`` is written to ``out`` in its third step."""
    forward, update = PolicyLoss.forward_step, loop.update

    def slow(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = forward(*args, **kwargs)
        if os.environ["RANK"] == "1":
            busy = time.thread_time() - began
            while time.thread_time() - began < 5 * busy:  # as much as forward and backward need, and more
                pass
        return result

    def watched(run: Any, batch: Any, micro_batches: Any, before: Any) -> Any:
        if os.environ["RANK"] == "0" and run.state.step == 2 and len(before) == 1:
            time.sleep(5 * lock.REFRESH_SECONDS)  # until both ranks have written this step
            Path(out).write_text(render(examine(Path(folder))), encoding="utf-8")
        return update(run, batch, micro_batches, before=before)

    with (
        mock.patch.object(lock, "REFRESH_SECONDS", 0.2),
        mock.patch.object(PolicyLoss, "forward_step", slow),
        mock.patch.object(loop, "update", watched),
    ):
        yield


@contextmanager
def dynamic(out: str, die_in_step: str) -> Iterator[None]:
    """What is learned from is written to ``out``, one JSON line a step. In a step (0: in none), the process
    ends after the first round of responses."""
    make, further = batch.make_mini_batches, RolloutQueue.further

    def written(config: Any, rollout: Any, *args: Any, **options: Any) -> Any:
        row = {
            "prompts": [prompt.index for prompt in rollout.prompts],
            "lengths": rollout.lengths.tolist(),
            "rewards": rollout.rewards.tolist(),
            "advantages": rollout.advantages.view(-1, rollout.samples).tolist(),
            "owner": rollout.owner.tolist(),
        }
        if os.environ["RANK"] == "0":
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return make(config, rollout, *args, **options)

    def asked(self: RolloutQueue, step: int, *args: Any) -> Any:
        if step + 1 == int(die_in_step):
            os._exit(9)
        return further(self, step, *args)

    with (
        mock.patch.object(batch, "make_mini_batches", written),
        mock.patch.object(RolloutQueue, "further", asked),
    ):
        yield


@contextmanager
def no_kernels(rank: str) -> Iterator[None]:
    """On this rank the head's kernels do not compile."""
    problem = "no ptxas" if os.environ["RANK"] == rank else None
    with mock.patch.object(prepare, "check_head", lambda *_: problem):
        yield


@contextmanager
def on_nccl(folder: str) -> Iterator[None]:
    """With NCCL's flight recorder on, as if there were GPUs."""
    record_collectives(Path(folder))
    yield


@contextmanager
def own_folder(nodes: str) -> Iterator[None]:
    """Each rank starts in a folder of its own, ``nodes``/node<rank>, as on a node of its own."""
    os.chdir(f"{nodes}/node{os.environ['RANK']}")
    with mock.patch.object(consistency, "VISIBLE_SECONDS", 1.0):  # this is no network file system
        yield


if __name__ == "__main__":
    at = sys.argv.index(":")
    with globals()[sys.argv[1]](*sys.argv[2:at]):
        status = main(sys.argv[at + 1 :])
    sys.exit(status)
