"""``train --check``: all that is wrong with a run, at once, and nothing left behind."""

from __future__ import annotations

import asyncio

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import Attempts, InputErrors
from megatron_fspo.job.folder import Resume, check_writable, checkpoints_to_resume
from megatron_fspo.rollout.client.connect import absent_servers
from megatron_fspo.trainer.prepare import prepare


def check_run(config: Config, *, world_size: int, resume: Resume, here: bool) -> list[str]:
    """Check what a run reads, its folder and its servers.

    Args:
        here: the run will be on this machine, and now. If it need not be (on a login node, say), a server
            that does not answer is no problem; nor is a missing GPU, and what only one can tell is left out.

    Returns:
        what was not checked or is not there yet, a line each.

    Raises:
        InputErrors: everything that is wrong.
    """
    elsewhere = not here and config.model.backend == "cuda" and not torch.cuda.is_available()
    attempt = Attempts()
    attempt(lambda: prepare(config, world_size=world_size, elsewhere=elsewhere))
    attempt(lambda: checkpoints_to_resume(config, resume))
    attempt(lambda: check_writable(config.run_folder, probe=True))
    absent = attempt(lambda: _absent(config, here=here))
    attempt.end()
    notes = ["no GPU here: model.layers and fp8 were not tried"] if elsewhere else []
    return notes + (absent or [])


def _absent(config: Config, *, here: bool) -> list[str]:
    absent = asyncio.run(absent_servers(config.vllm)) if config.rollout.engine == "vllm" else []
    if absent and here:
        raise InputErrors(absent)
    return absent
