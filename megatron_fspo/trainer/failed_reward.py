"""A reward that failed for a response ends the run: one line, and a file with the response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.errors import RewardError, StopRequested
from megatron_fspo.rewards import Failure

FILE = "reward_error.json"


def raise_first(config: Config, failures: Mapping[int, Failure | None], samples: int) -> NoReturn:
    """End all ranks with the first failure of any; the first rank writes its response to a file. Collective.

    Args:
        failures: this rank's, by number of the response in the batch; some rank has one. None: there was no
            verdict yet when the job was asked to stop.
        samples: responses to each prompt.

    Raises:
        RewardError: one line, the same on every rank.
        StopRequested: on every rank; no reward failed.
    """
    parts: list[dict[int, Failure | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, dict(failures))
    failed = {number: one for part in parts for number, one in part.items() if one is not None}
    if not failed:
        raise StopRequested("a stop was requested during the wait for grades")
    number, failure = min(failed.items())
    path = _path(config)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        evidence = {"reward": config.reward.name, "sample": number % samples, **failure.evidence()}
        path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    raise RewardError(
        f"reward {config.reward.name!r} {failure.problem} on prompt {failure.prompt.index}, "
        f"response {number % samples} (written to {path})"
    )


def _path(config: Config) -> Path:
    """In the folder of the run. Beside its place where there is none (``evaluate`` makes none): a folder
    would be taken for a run."""
    folder = config.run_folder
    return folder / FILE if folder.is_dir() else folder.with_name(f"{folder.name}.{FILE}")
