"""Counts, on a CPU, the calls that make the host wait for a GPU; writes them as JSON.

sync_worker.py OUT CHECKPOINT
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import optimizer as megatron_optimizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import samples
from launch import REPO
from megatron_fspo import config as options
from megatron_fspo.config.correction import SequenceTIS, TokenTIS
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.record.records import Recorder
from megatron_fspo.trainer.correction import correct
from megatron_fspo.trainer.mismatch import MismatchAlarm, measure
from megatron_fspo.verify.cases import LOSSES
from passes import build, make_micro_batches, scoring_of

PACKAGE = f"{REPO}/megatron_fspo/"
OPERATIONS = {"_local_scalar_dense", "is_nonzero", "nonzero", "_unique2", "masked_select", "equal"}
METHODS = {"tolist", "cpu", "numpy", "new_tensor"}
"""The last makes a copy from memory that is not pinned, as ``torch.tensor`` does."""

PASSED_ON = ("/torch/", "mcore/machine/backend.py")


class Syncs(TorchDispatchMode):
    """Counts such calls by the file of the package that makes them. What Megatron's own layers ask, and ours
    in their place, is left out: on a GPU there are others."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = any(torch.is_tensor(x) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        if (
            name in OPERATIONS
            or (name in ("index", "index_put", "index_put_") and masked)
            or (name == "repeat_interleave" and (kwargs or {}).get("output_size") is None)
        ):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and any(
            part in frame.f_code.co_filename for part in ("/torch/", "mcore/machine/backend.py")
        ):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith("mcore/model/layers.py"):
            self.found[f"{file.removeprefix(PACKAGE)} {name}"] += 1

    def noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return function(*args, **kwargs)

        return call

    def __enter__(self) -> Syncs:
        self.patches = ExitStack()
        for owner, names in ((Tensor, METHODS), (torch, {"tensor"})):
            for name in names:
                noted = self.noting(name, getattr(owner, name))
                self.patches.enter_context(mock.patch.object(owner, name, noted))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.close()


def check_one_norm(checkpoint: Path, dtype: torch.dtype, *, distributed: bool) -> None:
    """The optimizer step is Megatron's own, bit for bit, clipping and all, with one norm in place of two."""
    parallel = options.Parallel(distributed_optimizer=distributed)
    settings = options.Optimizer(lr=0.01, clip_grad=0.01)
    states = []
    for own in (True, False):
        policy = build(checkpoint, parallel, dtype=dtype, optimizer=settings)
        micro_batches = make_micro_batches(policy, samples(), 70)
        totals = policy.backward(
            micro_batches, PolicyLoss(objective=LOSSES["fspo"].objective(), scoring=scoring_of(policy))
        )
        real = megatron_optimizer.get_grad_norm_fp32
        with mock.patch.object(megatron_optimizer, "get_grad_norm_fp32", wraps=real) as norms:
            if own:
                assert policy.step(totals, policy.grad_norm()).grad_norm > 10 * settings.clip_grad
                assert norms.call_count == 1
            else:
                policy._scheduler.step(increment=1)
                policy.optimizer.step()
        parameters = [p.detach() for chunk in policy.chunks for p in chunk.parameters()]
        moments = [x for x in tree_leaves(policy.optimizer.state_dict()) if torch.is_tensor(x)]
        states.append([x.clone() for x in (*parameters, *moments)])
        stop()
    assert len(states[0]) == len(states[1]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def passes(policy: Policy, micro_batches: MicroBatches) -> dict[str, dict[str, int]]:
    """Pass → calls by file, for all passes over the packs of a step."""
    found: dict[str, dict[str, int]] = {}

    def counted(name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Syncs() as syncs:
            result = work(*args, **kwargs)
        found[name] = dict(syncs.found)
        return result

    scoring, groups, count = scoring_of(policy), policy.groups, len(samples())
    scores = counted("score", policy.score, micro_batches, scoring)
    shifted = [score - 0.01 for score in scores]
    micro_batches = micro_batches.with_columns(old_log_probs=shifted, reference_log_probs=shifted)
    alarm = MismatchAlarm(
        fresh=torch.zeros(count, dtype=torch.long),
        version=0,
        top_p=1.0,
        limit=100.0,
        groups=groups,
    )
    mismatch = counted("mismatch", measure, micro_batches, count, group=groups.dp_cp, also=alarm.add)
    counted("alarm", alarm.check)
    for rule in (TokenTIS(), SequenceTIS()):
        corrected, _ = counted(rule.name, correct, rule, micro_batches, mismatch, groups=groups)
    for name, section in LOSSES.items():
        recorder = Recorder(1)
        loss = PolicyLoss(
            objective=section.objective(),
            scoring=scoring,
            entropy_coef=section.entropy_coef,
            kl_coef=section.kl_coef,
            observer=recorder,
        )
        counted(f"update {name}", policy.backward, corrected, loss)
        counted("records", recorder.records, 0)
    return found


def main() -> None:
    out, checkpoint = map(Path, sys.argv[1:])
    policy = build(checkpoint, options.Parallel())
    few, many = (make_micro_batches(policy, samples(), size) for size in (512, 70))
    found = {str(len(micro_batches)): passes(policy, micro_batches) for micro_batches in (few, many)}
    stop()
    for dtype, distributed in ((torch.float32, False), (torch.bfloat16, True)):
        check_one_norm(checkpoint, dtype, distributed=distributed)
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
