"""wandb and TensorBoard: the numbers of a run, its pictures, and what it warned of.

Both packages are optional, imported when the configuration asks for them, and on the first rank only.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_fspo.config import Config, Log
from megatron_fspo.errors import InputError

_ID = "run-id.txt"
_ALERT_SECONDS = 60
"""wandb's shortest time between two alerts of one title."""
_ALERT_CHARACTERS = 2000


class Tracker(Protocol):
    """Where a run tells what it tells."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, each step once and in their order."""

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        """Name → the text of an ``<svg>`` element; before the metrics of the step."""

    def alert(self, title: str, text: str) -> None:
        """Something that a person should know of now."""

    def close(self, *, failed: bool = False) -> None:
        """Hand over what is still on its way."""


class WandbTracker:
    """A run of wandb's.

    Its id is drawn once and kept in ``wandb/run-id.txt``: runs of one name in several folders are several
    curves, and a run that is resumed goes on with its own.

    Raises:
        InputError: wandb does not take the run.
    """

    def __init__(self, config: Config, *, resuming: bool) -> None:
        import wandb

        log, files = config.log, config.run_folder / "wandb"
        new = not files.exists()
        try:
            self._run: Any = wandb.init(
                entity=log.entity,
                project=log.project,
                name=config.run.name,
                group=log.group,
                tags=list(log.tags) or None,
                id=_run_id(files, config.run.name, resuming=resuming),
                resume="allow" if resuming else None,
                mode="online" if log.wandb == "online" else "offline",
                dir=str(config.run_folder),
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            if new:  # else the name of the run would be taken by one that never began
                shutil.rmtree(files, ignore_errors=True)
            reason = " ".join(str(error).split())
            raise InputError(
                f"log.wandb = {log.wandb}, but wandb does not take the run: {reason[:300]}. Set it to off, "
                "or to offline and send the run later"
            ) from None
        self._html = wandb.Html

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        self._run.log({f"pictures/{name}": self._html(svg) for name, svg in svgs.items()}, step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title=title, text=text[:_ALERT_CHARACTERS], wait_duration=_ALERT_SECONDS)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class TensorBoardTracker:
    """Event files in ``tensorboard/``; pictures, which TensorBoard cannot show as SVG, stay in the report.

    Args:
        after: the run goes on after this step; what an earlier job logged later is hidden.
    """

    def __init__(self, config: Config, *, after: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if after is None else after + 1
        self._writer = SummaryWriter(str(config.run_folder / "tensorboard"), purge_step=purge)
        self._last = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        """Nothing."""

    def alert(self, title: str, text: str) -> None:
        self._writer.add_text(title, text, self._last)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


def check_trackers(log: Log) -> None:
    """``InputError`` unless what ``log`` asks for is installed, and wandb has a key. Asked on the first rank
    only."""
    if os.environ.get("RANK", "0") != "0":
        return
    if log.wandb != "off":
        _check_wandb(log.wandb)
    if log.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise InputError(
                "log.tensorboard = true needs the package tensorboard, which is not installed: install it, "
                "or set log.tensorboard = false"
            ) from None


def start_trackers(config: Config, *, resume_step: int | None) -> list[Tracker]:
    """Those that the configuration asks for.

    Raises:
        InputError: one does not take the run.
    """
    found: list[Tracker] = []
    if config.log.wandb != "off":
        found.append(WandbTracker(config, resuming=resume_step is not None))
    if config.log.tensorboard:
        found.append(TensorBoardTracker(config, after=resume_step))
    return found


def _check_wandb(mode: str) -> None:
    try:
        import wandb
    except ImportError:
        raise InputError(
            f"log.wandb = {mode} needs the package wandb, which is not installed: install it, or set "
            "log.wandb = off"
        ) from None
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise InputError(
            "log.wandb = online, but wandb has no API key here: run `wandb login`, set WANDB_API_KEY, or set "
            "log.wandb = offline"
        )


def _run_id(files: Path, name: str, *, resuming: bool) -> str:
    """Of the run whose wandb files are in ``files``."""
    path = files / _ID
    if resuming and path.exists():
        return path.read_text(encoding="utf-8").strip()
    if resuming and files.exists():  # it began when the name was the id
        return name
    found = secrets.token_hex(6)
    files.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{found}\n", encoding="utf-8")
    return found
