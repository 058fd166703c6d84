"""wandb, TensorBoard, MLflow, SwanLab and Trackio: the numbers of a run, its pictures and its warnings.

The packages are optional, imported when the configuration asks for them, and on the first rank only.
"""

from __future__ import annotations

import importlib
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fspo.config import Config, Log
from megatron_fspo.errors import InputError

_ID = "run-id.txt"
_ALERT_SECONDS = 60
"""wandb's shortest time between two alerts of one title."""
_ALERT_CHARACTERS = 2000


class WandbTracker:
    """A run in wandb.

    Its id is drawn once and kept in ``wandb/run-id.txt``: runs of one name in several folders are several
    curves, and a run that is resumed goes on with its own.

    Raises:
        InputError: wandb does not take the run.
    """

    def __init__(self, config: Config, *, resuming: bool) -> None:
        import wandb

        log, files = config.log, config.run_folder / "wandb"
        new = not files.exists()
        run_id = _run_id(files, resuming=resuming)
        try:
            self._run: Any = wandb.init(
                entity=log.entity,
                project=log.project,
                name=config.run.name,
                group=log.group,
                tags=list(log.tags) or None,
                id=run_id,
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
        """Log the metrics of a step, each step once and in their order."""
        self._run.log(dict(metrics), step=step)

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        """Log pictures, name → the text of an ``<svg>`` element; before the metrics of the step."""
        self._run.log({f"pictures/{name}": self._html(svg) for name, svg in svgs.items()}, step=step)

    def alert(self, title: str, text: str) -> None:
        """Tell what a person should know of now."""
        self._run.alert(title=title, text=text[:_ALERT_CHARACTERS], wait_duration=_ALERT_SECONDS)

    def close(self, *, failed: bool = False) -> None:
        """Hand over what is still on its way."""
        self._run.finish(exit_code=int(failed))


class TensorBoardTracker:
    """Event files in ``tensorboard/``; methods as :class:`WandbTracker` has them.

    The run goes on ``after`` this step: what an earlier job logged later is hidden.
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
        """Do nothing: TensorBoard cannot show SVG, so pictures stay in the report."""

    def alert(self, title: str, text: str) -> None:
        self._writer.add_text(title, text, self._last)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class MLflowTracker:
    """A run in MLflow, at MLFLOW_TRACKING_URI or in ``mlflow/`` of the run; methods as :class:`WandbTracker`
    has them."""

    def __init__(self, config: Config, *, resuming: bool) -> None:
        from mlflow import MlflowClient

        # Other ranks wait for this one: 10 s, twice, and not 120 s eight times.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        files = config.run_folder / "mlflow"
        files.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{files.absolute() / 'mlflow.db'}")
        artifacts = None if uri else (files.absolute() / "artifacts").as_uri()
        named = files / _ID
        if not (resuming and named.exists()):
            project = config.log.project
            experiment = self._client.get_experiment_by_name(project)
            made = None if experiment else self._client.create_experiment(project, artifacts)
            run = self._client.create_run(made or experiment.experiment_id, run_name=config.run.name)
            named.write_text(f"{run.info.run_id}\n", encoding="utf-8")
            self._client.log_dict(run.info.run_id, config.model_dump(mode="json"), "config.json")
        self._run = named.read_text(encoding="utf-8").strip()
        self._client.update_run(self._run, status="RUNNING")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # Its names have no @.
        numbers = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        rows = [Metric(name, value, now, step) for name, value in numbers.items() if math.isfinite(value)]
        self._send("log_batch", metrics=rows)

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        for name, svg in svgs.items():
            self._send("log_text", text=svg, artifact_file=f"pictures/{name}_{step:06d}.svg")

    def alert(self, title: str, text: str) -> None:
        self._send("set_tag", key=f"warning: {title}", value=text[:_ALERT_CHARACTERS])

    def close(self, *, failed: bool = False) -> None:
        self._send("set_terminated", status="FAILED" if failed else "FINISHED")

    def _send(self, call: str, **what: Any) -> None:
        """Call MLflow; a server that is away costs numbers there, not the run."""
        try:
            getattr(self._client, call)(self._run, **what)
        except Exception as error:  # of any kind, by the store
            print(f"MLflow lost {call}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)


class ModuleTracker:
    """A run in SwanLab (offline, in ``swanlab/``, unless SWANLAB_MODE says otherwise) or Trackio (in its own
    folder, or TRACKIO_SPACE_ID), whose functions are wandb's; methods as :class:`WandbTracker` has them."""

    def __init__(self, config: Config, name: str, *, resuming: bool) -> None:
        words: dict[str, Any] = {"project": config.log.project, "name": config.run.name}
        if name == "trackio":
            words |= {"embed": False, "resume": "allow"}
        else:
            files = config.run_folder / name
            words |= {"mode": os.environ.get("SWANLAB_MODE", "offline"), "log_dir": str(files)}
            words |= {"id": _run_id(files, resuming=resuming), "resume": "allow", "reinit": True}
        self._module = importlib.import_module(name)
        self._module.init(config=config.model_dump(mode="json"), **words)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log({k: v for k, v in metrics.items() if math.isfinite(v)}, step=step)

    def pictures(self, step: int, svgs: Mapping[str, str]) -> None:
        """Do nothing: neither shows SVG, so pictures stay in the report."""

    def alert(self, title: str, text: str) -> None:
        if hasattr(self._module, "alert"):
            self._module.alert(title, text[:_ALERT_CHARACTERS])

    def close(self, *, failed: bool = False) -> None:
        self._module.finish()


def _run_id(folder: Path, *, resuming: bool) -> str:
    """Return the id of the run that the folder has; a new one unless it resumes."""
    named = folder / _ID
    if not (resuming and named.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        named.write_text(f"{secrets.token_hex(6)}\n", encoding="utf-8")
    return named.read_text(encoding="utf-8").strip()


Tracker = WandbTracker | TensorBoardTracker | MLflowTracker | ModuleTracker


def check_trackers(log: Log) -> None:
    """Raise ``InputError`` on the first rank unless what ``log`` asks for is installed, and wandb has a
    key."""
    if os.environ.get("RANK", "0") != "0":
        return
    for key, value, module, off in (
        ("log.wandb", log.wandb, "wandb", "off"),
        ("log.tensorboard", str(log.tensorboard).lower(), "torch.utils.tensorboard", "false"),
        *(("log.trackers", name, name, "[]") for name in log.trackers),
    ):
        try:
            if value != off:
                importlib.import_module(module)
        except ImportError:
            raise InputError(
                f"{key} = {value} needs the package {module.rpartition('.')[2]}, which is not installed: "
                f"install it, or set {key} = {off}"
            ) from None
    if log.wandb == "online":
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise InputError(
                "log.wandb = online, but wandb has no API key here: run `wandb login`, set WANDB_API_KEY, or "
                "set log.wandb = offline"
            )


def start_trackers(config: Config, *, resume_step: int | None) -> list[Tracker]:
    """Start the trackers that the configuration asks for.

    Raises:
        InputError: one does not take the run.
    """
    trackers: list[Tracker] = []
    if config.log.wandb != "off":
        trackers.append(WandbTracker(config, resuming=resume_step is not None))
    if config.log.tensorboard:
        trackers.append(TensorBoardTracker(config, after=resume_step))
    for name in config.log.trackers:
        resuming = resume_step is not None
        try:
            if name == "mlflow":
                trackers.append(MLflowTracker(config, resuming=resuming))
            else:
                trackers.append(ModuleTracker(config, name, resuming=resuming))
        except Exception as error:  # of any kind, by the package
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"log.trackers: {name} does not take the run: {reason}") from error
    return trackers
