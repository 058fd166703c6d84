"""The runs of a sweep as processes, so many at a time; one that is there already is not made again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import torch

from megatron_fspo.config import Config
from megatron_fspo.config.loading import config_changes
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.explain.losses import factor_for, reach_of_sums
from megatron_fspo.lab.report.history import History, Records, read_records, steady
from megatron_fspo.lab.sweep.file import Planned, Sweep, make_run_config, planned


def make(
    sweep: Sweep, say: Callable[[str], None], programs: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Make what is not there yet of a sweep.

    Args:
        sweep: of which no run is under way.
        say: takes a line on each run.
        programs: arm → words after ``python``, in the place of ``-m megatron_fspo train``.

    Raises:
        InputError: a key of some run is wrong, or a run that is there was made with others. No run is begun
            before the keys of all are known to be right.
        TrainingError: runs failed; the line names each with the end of its log. The others are made first.
    """
    runs = list(planned(sweep))
    for run in runs:
        make_run_config(sweep, run)
    first = [run for run in runs if sweep.match in (None, run.arm)]
    rest = [run for run in runs if run not in first]
    processes = _Processes(sweep, say, len(runs), programs or {})
    failed = processes.make(first)
    # A run whose arm's model failed has nothing to be matched to.
    failed |= processes.make([run for run in rest if f"{sweep.match}-{run.seed}" not in failed])
    if failed:
        lines = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        raise TrainingError(f"{len(failed)} of {len(runs)} runs failed: {lines}")


def matched_loss(config: Config, records: Records) -> dict[str, Any]:
    """Return the loss section of a configuration, its limits scaled until they would really clip the share of
    ``records`` with an advantage that their own run clipped: what A pushes further out. A dual clip of the
    loss is not counted. FSPO's then does not calibrate itself; an L* to be measured is that of ``records``.

    Raises:
        InputError: the loss has no band on S.
    """
    judged = records.select(records.advantage != 0)
    sums, lengths = torch.from_numpy(judged.log_ratio_sum), torch.from_numpy(judged.length).double()
    loss = config.loss.fitted(sums, lengths)
    band = loss.band()
    if band is None or loss.by_turn():
        raise InputError(
            f"loss.name = {loss.name} has no band on S of responses that could be matched: leave `match` out"
        )
    pushed = (sums - band.drift * lengths) * torch.from_numpy(judged.advantage) > 0
    rate = float((judged.clipped & pushed.numpy()).mean())  # a dual clip is on the other side
    factor = factor_for(torch.where(pushed, reach_of_sums(band, sums, lengths), 0.0), rate)
    if factor > loss.widest():
        raise InputError(f"loss.name = {loss.name}: no limits clip {rate:.1%}; S is beyond ±36 nats")
    return loss.scaled(factor).model_dump(mode="json", exclude_none=True)


class _Processes:
    def __init__(
        self, sweep: Sweep, say: Callable[[str], None], total: int, programs: Mapping[str, Sequence[str]]
    ) -> None:
        self._sweep, self._say, self._total, self._programs = sweep, say, total, programs
        self._done, self._made, self._began = 0, 0, time.monotonic()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = False
        # The share of the cores of a run, unless the user has said.
        threads = max(1, (os.cpu_count() or 1) // (sweep.jobs * sweep.nproc))
        self._environment = {"OMP_NUM_THREADS": str(threads), **os.environ}

    def make(self, runs: Sequence[Planned]) -> dict[str, str]:
        """Name → the end of the log of each that failed."""
        failed: dict[str, str] = {}
        with ThreadPoolExecutor(self._sweep.jobs) as pool, _term_is_interrupt():
            waiting = {pool.submit(self._run, run): run.name for run in runs}
            try:
                for future in as_completed(waiting):
                    if (problem := future.result()) is not None:
                        failed[waiting[future]] = problem
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                # Runs under way stop at their next safe point, with a checkpoint if they keep any.
                self._stopping = True
                for process in [*self._running.values()]:
                    process.terminate()
                for process in [*self._running.values()]:
                    process.wait()
                raise
        return failed

    def _run(self, run: Planned) -> str | None:
        """Make one run; returns None, or why it failed."""
        sweep = self._sweep
        loss = None
        if sweep.match not in (None, run.arm) and run.arm not in sweep.unmatched:
            model = sweep.folder / f"{sweep.match}-{run.seed}"
            loss = matched_loss(make_run_config(sweep, run)[0], steady(read_records(model), History(model)))
        config, files = make_run_config(sweep, run, loss)
        if changes := config_changes(config):
            raise InputError(
                f"{config.run_folder} was made with other keys ({', '.join(changes)}): remove it, or give "
                "the sweep another folder"
            )
        if (config.run_folder / "report" / "index.html").exists():  # the last that a run makes
            steps = History(config.run_folder).series("critic/rewards/mean").steps
            if len(steps) and steps[-1] >= config.run.steps:
                self._done += 1
                self._say(f"[{self._done}/{self._total}] {run.name}: is there already")
                return None
        if self._stopping:
            return "was not begun"
        words = [word for file in files for word in ("--config", str(file))]
        program = self._programs.get(run.arm, ("-m", "megatron_fspo", "train"))
        command = [sys.executable, *program, *words, *sweep.words, "--resume", "auto"]
        command += ["--nproc", str(sweep.nproc)] if sweep.nproc > 1 else []
        log = sweep.folder / f"{run.name}.log"
        began = time.monotonic()
        with log.open("wb") as output:
            # Where one runs at a time, its lines are shown as they come.
            out = None if sweep.jobs == 1 else output
            process = subprocess.Popen(command, stdout=out, stderr=out, env=self._environment)
            self._running[run.name] = process
            status = process.wait()
        del self._running[run.name]
        if status:
            text = log.read_text(encoding="utf-8", errors="replace").strip()
            said = f"{text.splitlines()[-1].strip()} ({log})" if text else "see above"
            return f"exit status {status}: {said}"
        self._done, self._made = self._done + 1, self._made + 1
        left = (time.monotonic() - self._began) / self._made * (self._total - self._done)
        more = f", about {left:.0f} s left" if left else ""
        self._say(f"[{self._done}/{self._total}] {run.name}: {time.monotonic() - began:.0f} s{more}")
        return None


@contextmanager
def _term_is_interrupt() -> Iterator[None]:
    """Have SIGTERM end a sweep as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
