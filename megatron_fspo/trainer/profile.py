"""Traces of chosen steps by torch's profiler: ``profiles/step_000012/rank_00003.json.gz``, for Perfetto or
chrome://tracing.

``log.profile`` names steps; a file ``profile``, put into the folder of a run, asks for the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_fspo.parallel.metrics import any_rank
from megatron_fspo.trainer.build import Training

WISH = "profile"
"""The file that asks for a profile; the first rank removes it."""


@contextmanager
def profiled(run: Training) -> Iterator[None]:
    """Around a step, which is recorded where somebody asked for that. Collective."""
    config, step = run.inputs.config, run.step + 1
    first, last = config.log.profile or (0, 0)
    if not (_wished(run) or first <= step <= last):
        yield
        return
    activities = [ProfilerActivity.CPU]
    if run.inputs.backend.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    path = config.run_folder / f"profiles/step_{step:06d}/rank_{dist.get_rank():05d}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:  # a full disk is no reason to lose the step
        run.log.say(f"step {step}: {path} could not be written: {error}")
    run.log.say(f"step {step}: profiled, see {path.parent}")


def _wished(run: Training) -> bool:
    """Whether the file is there, as the first rank sees it; it is gone then. Collective."""
    # Not in a collective: before this step the first rank writes rows, and removes old checkpoints.
    run.groups.control.meet("the first rank to write its records")
    wish: Path = run.inputs.config.run_folder / WISH
    found = dist.get_rank() == 0 and wish.exists()
    if found:
        wish.unlink(missing_ok=True)
    return any_rank(found, device=run.inputs.backend.device)
