"""``train --check``: all that is wrong with a run, at once, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError, InputErrors
from megatron_fspo.rollout.vllm.connect import absent_servers
from megatron_fspo.trainer.folder import Resume, check_writable, checkpoints_to_resume
from megatron_fspo.trainer.prepare import prepare


def check_run(config: Config, *, world_size: int, resume: Resume, here: bool) -> str:
    """Check what a run reads, its folder and its servers.

    Args:
        here: the run will be on this machine. If it need not be, and there is no GPU here (on a login node,
            say), what only a GPU can tell is left out.

    Returns:
        what was found, in words.

    Raises:
        InputErrors: everything that is wrong.
    """
    elsewhere = not here and config.model.backend == "cuda" and not torch.cuda.is_available()
    checks: tuple[Callable[[], object], ...] = (
        lambda: prepare(config, world_size=world_size, elsewhere=elsewhere),
        lambda: checkpoints_to_resume(config, resume),
        lambda: check_writable(config.run_folder),
        lambda: _check_servers(config),
    )
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except InputErrors as errors:
            problems += errors.problems
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputErrors(problems)
    if elsewhere:
        return "fine, as far as can be seen without a GPU (model.layers and fp8 were not tried)"
    return "fine"


def _check_servers(config: Config) -> None:
    if config.rollout.engine == "vllm" and (absent := absent_servers(config.vllm)):
        raise InputErrors(absent)
