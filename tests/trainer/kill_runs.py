"""Kill -9 at random moments, resume, and compare with an uninterrupted run.

    python tests/trainer/kill_runs.py --kills 20 [--seed 1] [--vllm | --turns | --lora]

A run of six small steps is killed, resumed, killed again, until it ends; then the next begins, until all
kills are done. A kill has a point of the code (see ``kill_worker.py``), a step, and victims: all processes of
the job at once, one rank, or torchrun. After each the files are compared with the uninterrupted run's as far
as the newest checkpoint says they go; at the end everything is. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kill_checks import LIMIT, after_kill, at_end, newest, prompts_differ
from kill_worker import PLAN, PROMPTS
from launch import REPO, environment
from runs import command

STEPS, EVERY = 6, 2
WORKER = str(Path(__file__).with_name("kill_worker.py"))
TOKEN = "KILL_TOKEN"

# In the order in which a run comes to them: calls to choose from.
_START = {"start": 1, "weights": 1, "config": 1}
_STEP = {"asking": 1, "rollout": 60, "answering": 40, "grading": 32, "packing": 1, "old pass": 1}
_STEP |= {"update": 4, "sequences": 1, "sending": 1}
_SAVE = {"validating": 1, "evaluation": 60, "samples": 8, "files": 60, "row": 1, "row written": 1}
_SAVE |= {"unnamed": 1, "state": 1, "named": 1}
_RESUME = {"loading": 60, "cut": 3}
_LATE = {"removal": 1}
_END = {"export": 20, "exported": 1, "report": 1}
FIRST_ONLY = {
    "config",
    "answering",
    "grading",
    "sequences",
    "samples",
    "row",
    "row written",
    "unnamed",
    "state",
    "named",
}
FIRST_ONLY |= {"cut", *_LATE, *_END}
"""Where only the first rank gets."""
ORDER = (*_RESUME, *_STEP, *_SAVE, *_LATE, *_END)
EMBEDDED = tuple(
    point for point in (*_START, *ORDER) if point not in ("asking", "answering", "sending", "validating")
)
TURNS = ("rollout", "answering", "grading", "answering", "update")
TURNS_WORDS = (
    "--environment.name own_environment:two_digits --environment.workers 1 --reward.name environment "
    '--rollout.stop ["9"]'
).split()
LORA_WORDS = "--lora.rank 4 --loss.calibrate 0 --optimizer.lr 1e-3".split()
AHEAD = ("asking", "grading", "update", "sending", "validating", "files", "named", "loading", "export")
_ALL = _START | _STEP | _SAVE | _RESUME | _LATE | _END


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill to come."""

    point: str
    step: int
    """The first in which it may happen, or whose resume; 0: any."""
    count: int
    rank: int
    """Whose moment it is."""
    victims: str
    """``all``, ``rank 0``, ``rank 1`` or ``torchrun``."""
    delay: float
    """Seconds from the point to the kill."""
    asynchronous: bool
    """Checkpoints are written in the background."""

    @property
    def place(self) -> tuple[int, int]:
        """Kills of one run come in this order."""
        if self.point in _END:
            return STEPS + 1, ORDER.index(self.point)
        return (self.step, ORDER.index(self.point) if self.point in ORDER else -1)

    @property
    def plan(self) -> dict[str, Any]:
        """For the worker; a resume happens before any step."""
        return asdict(self) | ({"step": 0} if self.point in _RESUME else {})

    def __str__(self) -> str:
        saving = "asynchronous" if self.asynchronous else "synchronous"
        when = f"{self.point}, call {self.count}, step >= {self.step}, +{self.delay:.2f} s"
        return f"{when}, rank {self.rank}; kill {self.victims}; {saving} saving"


def draw(points: Sequence[str], number: int, random: random.Random) -> list[Kill]:
    """So many kills; every point comes before one comes again."""
    chosen: list[str] = []
    while len(chosen) < number:
        chosen += random.sample(points, len(points))
    return [_draw(point, random) for point in chosen[:number]]


def _draw(point: str, random: random.Random) -> Kill:
    if point in _START or point in _END:
        step = 0
    elif point in _SAVE:
        step = random.randrange(EVERY, STEPS + 1, EVERY)
    elif point in _RESUME or point in _LATE:
        step = random.randrange(EVERY + 1, STEPS + 1)
    else:
        step = random.randint(1, STEPS)
    return Kill(
        point=point,
        step=step,
        count=random.randint(1, _ALL[point]),
        rank=0 if point in FIRST_ONLY else random.randint(0, 1),
        victims=random.choices(["all", "rank 0", "rank 1", "torchrun"], [5, 1, 1, 1])[0],
        delay=random.uniform(0, 0.3),
        asynchronous=random.random() < 0.5,
    )


@dataclass
class Harness:
    """Runs that are killed, and an uninterrupted one, ``whole``."""

    folder: Path
    """Of all of them."""
    extra: tuple[str, ...] = ()
    """Arguments of all of them."""
    exact: bool = True
    """Every number must be that of the uninterrupted run; else prompts are compared in place of numbers."""
    steps: int = STEPS
    every: int = EVERY
    keep: int = 1
    problems: list[str] = field(default_factory=list)

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def reference(self) -> None:
        """Run without a kill, and keep every checkpoint."""
        status = self._launch("whole", None, "--checkpoint.keep", "100").wait(600)
        assert status == 0, self._said("whole")

    def run(self, name: str, kills: Iterable[Kill]) -> list[Kill]:
        """One run to its end through these kills; returns those that it did not come to."""
        left = sorted(kills, key=lambda kill: kill.place)
        missed = []
        while True:
            kill = self._next(name, left)
            process = self._launch(name, kill)
            if kill is not None and self._killed(process, kill):
                left.remove(kill)
                self._compare(f"{name}: {kill}", after_kill(self.folder / name, self.whole, exact=self.exact))
                continue
            status = process.wait(600)
            if kill is not None:
                left.remove(kill)
                missed.append(kill)
            if status != 0:
                self._compare(f"{name}, resumed", [f"exit status {status}: {self._said(name)[-3000:]}"])
                return missed + left
            break
        found = at_end(self.folder / name, self.whole, keep=self.keep, exact=self.exact)
        if not self.exact:
            found += prompts_differ(self._prompts(name), self._prompts("whole"))
        self._compare(f"{name} to its end", found)
        return missed + left

    def _next(self, name: str, left: Sequence[Kill]) -> Kill | None:
        """The next that can happen: there is nothing to load without a checkpoint."""
        resumes = newest(self.folder / name) is not None
        return next((kill for kill in left if resumes or kill.point not in _RESUME), None)

    def _launch(self, name: str, kill: Kill | None, *extra: str) -> subprocess.Popen[bytes]:
        words = [*f"--run.steps {self.steps} --checkpoint.every {self.every}".split(), *self.extra]
        words += ["--checkpoint.keep", str(self.keep)]
        words += ["--checkpoint.asynchronous", str(kill.asynchronous).lower()] if kill else []
        words += ["--resume"] if (self.folder / name).exists() else []
        plan = {PLAN: json.dumps(kill.plan | {"marker": str(self._marker)})} if kill else {}
        self._marker.unlink(missing_ok=True)
        self._token = uuid.uuid4().hex
        env = environment(**plan, **{TOKEN: self._token, PROMPTS: str(self._prompts(name))})
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command(self.folder, name, *words, *extra, program=[WORKER]),
                cwd=REPO,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _killed(self, process: subprocess.Popen[bytes], kill: Kill) -> bool:
        """Wait for the point and kill; False if the run ended before it."""
        while not self._marker.exists():
            if process.poll() is not None:
                return False
            time.sleep(0.01)
        family = _carrying(self._token)
        time.sleep(kill.delay)
        victims = [one for one in family if kill.victims in ("all", _role(one))]
        for victim in victims or family:  # a rank may have left
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        began = time.monotonic()
        status = process.wait(120)
        while left := _carrying(self._token):
            if time.monotonic() - began > 120:
                self._compare(str(kill), [f"processes are left: {[child.cmdline() for child in left]}"])
                for child in left:
                    child.kill()
            time.sleep(0.1)
        seconds = time.monotonic() - began
        print(f"{kill}: all ended within {seconds:.0f} s, exit status {status}", flush=True)
        return True

    def _compare(self, what: str, found: Sequence[str]) -> None:
        print(f"  {what}: {'; '.join(found) or 'as the uninterrupted run'}", flush=True)
        self.problems += [f"{what}: {problem}" for problem in found]

    @property
    def _marker(self) -> Path:
        return self.folder / "marker"

    def _prompts(self, name: str) -> Path:
        return self.folder / f"{name}.prompts"

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


def _carrying(token: str) -> list[psutil.Process]:
    """Processes of a launch, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TOKEN) == token:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _role(process: psutil.Process) -> str:
    try:
        rank = process.environ().get("RANK")
    except psutil.Error:
        return "gone"
    return "torchrun" if rank is None else f"rank {rank}"


def run_all(harness: Harness, kills: Sequence[Kill], *, per_run: int = 10) -> list[Kill]:
    """All kills, so many to a run; what a run did not come to is left to the next.

    Returns:
        those that did not happen at all.
    """
    harness.reference()
    left, number, never = list(kills), 0, []
    while left:
        number += 1
        now, left = left[:per_run], left[per_run:]
        missed = harness.run(f"run-{number}", now)
        (never if len(missed) == len(now) else left).extend(missed)
    return never


def run_ahead(folder: Path, kills: Sequence[Kill]) -> tuple[list[str], list[Kill]]:
    """Of runs that sample ahead of the training, from one real vLLM server that outlives them.

    Which weights sample which token depends on the clock, so no number is compared: prompts and their order,
    steps and rows, what is logged, and how old the tokens are.

    Returns:
        the problems of all kills, and those that did not happen.
    """
    sys.path += [str(REPO / "tests/real_vllm"), str(REPO / "tests/cluster")]
    from serving import serving
    from serving_node import wide_checkpoint

    checkpoint = wide_checkpoint(folder / "model")
    server_words = "--dtype float32 -- --max-model-len 128 --max-num-seqs 16 --max-num-batched-tokens 160"
    with serving(checkpoint, folder, *server_words.split()) as (server,):
        # Hardly any response is right: the entropy bonus moves the weights.
        words = f"--model.checkpoint {checkpoint} --rollout.engine vllm --rollout.max-staleness {LIMIT} "
        words += "--rollout.max-response-tokens 24 --loss.entropy-coef 0.1"
        harness = Harness(folder, (*words.split(), "--vllm.urls", str([server.url])), exact=False)
        never = run_all(harness, kills)
        print(f"the server started {server.starts} time(s)")
        alive = server.process.poll() is None and server.starts == 1
    return harness.problems + ([] if alive else ["the server died"]), never


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", nargs="+", choices=sorted(_ALL), help="default: all")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--vllm", action="store_true", help="sampling ahead, from a vLLM that VLLM_BIN names")
    kind.add_argument("--turns", action="store_true", help="trajectories of several turns, embedded engine")
    kind.add_argument("--lora", action="store_true", help="adapters are trained")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder to leave the runs in")
    args = parser.parse_args()
    points = args.points or (AHEAD if args.vllm else TURNS if args.turns else EMBEDDED)
    kills = draw(points, args.kills, random.Random(args.seed))
    if args.turns:
        os.environ["PYTHONPATH"] = str(REPO / "tests/environments")
    with tempfile.TemporaryDirectory() as folder:
        if args.vllm:
            problems, never = run_ahead(args.keep or Path(folder), kills)
        else:
            words = TURNS_WORDS if args.turns else LORA_WORDS if args.lora else []
            harness = Harness(args.keep or Path(folder), tuple(words))
            never, problems = run_all(harness, kills), harness.problems
    for kill in never:
        print(f"did not happen: {kill}")
    print(f"{len(kills) - len(never)} kills, {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems or never else 0


if __name__ == "__main__":
    sys.exit(main())
