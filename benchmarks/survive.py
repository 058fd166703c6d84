"""Take something away from a job on two nodes at random moments, and see that it goes on.

    python benchmarks/survive.py [--each 20] [--kinds rank agent node server full read-only] [--seed 1]
        [--results benchmarks/results/survive.jsonl]

Two nodes (see ``nodes.py``) with a rank each train the tiny model by the launch script, with
``MAX_RESTARTS=3`` and ``--resume auto``; for ``server`` with a vLLM on a third. What is taken away comes back
once the job has said a line about it, and an agent that ended is started again, as Kubernetes and Slurm do.
At its end every run is compared with an undisturbed one: numbers, responses, checkpoints, export. The result
is a table, of all that the file of results has: 20 of each kind take hours, in parts if need be, each with a
seed of its own.

A job has to go on by itself, or to say within two minutes in one line what it lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "trainer"), str(TESTS / "cluster")]

from kill_checks import at_end  # noqa: E402
from launch import REPO, environment  # noqa: E402
from nodes import Nodes, environment_of_a_node, why_not  # noqa: E402
from runs import rows  # noqa: E402
from serving_node import serving_on, wide_checkpoint  # noqa: E402

TRAINERS, SERVER = ("node-a", "node-b"), "vllm-0"
KINDS = ("rank", "agent", "node", "server", "full", "read-only")
WITHIN = 120.0
"""Seconds until a job goes on or says what it lost."""
STEPS = 8
SETTINGS = (
    f"--smoke --parallel.tensor 1 --parallel.sequence false --run.steps {STEPS} --checkpoint.every 2 "
    "--checkpoint.keep 2 --rollout.prompts 8 --rollout.samples 4 --rollout.max_response_tokens 40 "
    "--batch.mini_batches 4 --optimizer.warmup_steps 0 --evaluation.every 4 --resume auto"
).split()
# Before its ranks have met, a job is torchrun's alone.
NAMES = re.compile(r"^(megatron-fspo: |torch\.distributed\.\S+Error: ).*", re.MULTILINE)


@dataclass(kw_only=True)
class Incident:
    """Something taken away once."""

    kind: str
    victim: str
    step: int
    """Steps done by then."""
    line: str = ""
    """The first that the job said of it; a rank that torchrun starts again needs none."""
    seconds: float = 0.0
    """Seconds until the line, or the next step where there is none."""
    went_on: float = 0.0
    """Seconds until the next step."""
    started_again: int = 0
    """Agents that had ended, and that the scheduler of a cluster would start again."""
    wrong: list[str] = field(default_factory=list)
    """Differences of its run from the undisturbed one."""
    seed: int = 0


@dataclass
class Job:
    """A run on two nodes, and what starts its agents."""

    nodes: Nodes
    folder: Path
    name: str
    extra: tuple[str, ...] = ()
    agents: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def start(self, node: str) -> None:
        given = {"NNODES": "2", "NODE_RANK": str(TRAINERS.index(node)), "NPROC": "1", "MAX_RESTARTS": "3"}
        given |= {"MASTER_ADDR": TRAINERS[0], "PYTHON": sys.executable}
        words = ["bash", str(REPO / "examples/run_fspo_qwen3_8b.sh"), *SETTINGS]
        words += ["--run.folder", str(self.folder), "--run.name", self.name, *self.extra]
        with self.log(node).open("a") as log:
            self.agents[node] = self.nodes.start(
                node, words, env=environment_of_a_node(environment()) | given, stdout=log, stderr=log
            )

    def log(self, node: str) -> Path:
        """The log of all agents of a node, outside the storage that may be taken away."""
        return self.folder.parent / f"{self.name}.{node}.log"

    def start_ended(self) -> int:
        """Start agents that have ended, as a scheduler does; returns how many."""
        ended = [node for node, agent in self.agents.items() if agent.poll() not in (None, 0)]
        for node in ended:
            self.start(node)
        return len(ended)

    @property
    def done(self) -> bool:
        return all(agent.poll() == 0 for agent in self.agents.values())

    def finish(self) -> None:
        """Wait for the end of the run, and a minute more for that of its agents: those that lost a rank or an
        agent in the last second wait for each other up to 10 minutes (torchrun's time-outs)."""
        while not self.at_its_end:
            self.start_ended()
            time.sleep(0.2)
        end = time.monotonic() + 60
        while not self.done and time.monotonic() < end:
            time.sleep(0.2)
        self.end()

    @property
    def at_its_end(self) -> bool:
        """True if the run is done, and only processes are left to end."""
        return self.done or "done. The run is in" in self.log(TRAINERS[0]).read_text(errors="replace")

    @property
    def steps(self) -> int:
        return max((row["step"] for row in rows(self.folder, self.name)), default=0)

    def said(self) -> dict[Path, int]:
        """Lengths of the logs in bytes."""
        return {log: log.stat().st_size for log in map(self.log, TRAINERS)}

    def since(self, before: dict[Path, int]) -> str:
        """The text of the logs since they had these lengths."""
        return "\n".join(log.read_bytes()[size:].decode(errors="replace") for log, size in before.items())

    def ranks(self, node: str) -> list[psutil.Process]:
        found = []
        with suppress(psutil.Error):
            for child in psutil.Process(self.agents[node].pid).children(recursive=True):
                with suppress(psutil.Error):
                    if "RANK" in child.environ():
                        found.append(child)
        return found

    def end(self) -> None:
        for agent in self.agents.values():
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, 9)
            agent.wait()


Undo = Callable[[], None]


def take_away(kind: str, job: Job, storage: Path, chance: random.Random) -> tuple[str, Undo] | None:
    """Returns what was taken, and what brings it back; None where there is nothing to take just now."""
    node = chance.choice(TRAINERS)
    if kind == "rank":
        if not (ranks := job.ranks(node)):
            return None
        ranks[0].kill()
        return f"the rank on {node}", lambda: None
    if kind == "agent":
        if job.agents[node].poll() is not None:
            return None
        job.agents[node].kill()
        return f"the agent of {node}", lambda: None
    if kind == "node":
        job.nodes.cut(node)
        return node, lambda: job.nodes.mend(node)
    if kind == "server":
        # The parent of vLLM's engine is its HTTP server; a new one of both is started by `serve`.
        engines = (p for p in psutil.process_iter(["name"]) if "EngineCore" in (p.info["name"] or ""))
        if (engine := next(engines, None)) is None:
            return None
        with suppress(psutil.NoSuchProcess):
            if (server := engine.parent()) is not None and chance.random() < 0.5:
                server.kill()
                return "vLLM's HTTP server", lambda: None
            engine.kill()
            return "vLLM's engine", lambda: None
        return None
    if kind == "full":
        filler = storage / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"0" * 2**16)
                file.flush()
        return "the space on the disk", filler.unlink
    _remount(storage, "ro")
    return "the right to write", lambda: _remount(storage, "rw")


def _remount(storage: Path, mode: str) -> None:
    """Not while a file is open for writing, so it is tried until it works."""
    while subprocess.run(["mount", "-o", f"remount,{mode}", storage], capture_output=True).returncode:
        time.sleep(0.01)


def watch(job: Job, incident: Incident, before: dict[Path, int], undo: Undo) -> None:
    """Wait until the job is at work again: bring back what it missed, and start what has ended.

    Raises:
        TimeoutError: it is not.
    """
    began = time.monotonic()
    kept = incident.kind in ("node", "full", "read-only")  # what does not come back by itself
    while True:
        time.sleep(0.1)
        seconds = time.monotonic() - began
        text = job.since(before)
        if not incident.line and (found := NAMES.search(text)):
            said = found.group().removeprefix("megatron-fspo: ")
            incident.line, incident.seconds = said.replace(str(job.checkpoints), "/shared/runs"), seconds
        if kept and (incident.line or seconds > WITHIN):
            kept = False
            undo()
        if not kept:
            incident.started_again += job.start_ended()
        if job.at_its_end or (not kept and re.search(rf"^step +{incident.step + 1}/", text, re.MULTILINE)):
            if kept:  # the run was at its end
                undo()
            incident.went_on = seconds
            incident.seconds = incident.seconds or seconds
            return
        if seconds > 900:
            raise TimeoutError(f"{incident}: not at work again; the logs are {[*before]}:\n{text[-3000:]}")


def strike(kind: str, job: Job, storage: Path, chance: random.Random, longest: float) -> Incident | None:
    """Take something away at a random moment, after a random step; None if the run ended before."""
    # Starting takes longer than the steps do: a moment of all of the time would mostly be one of the start.
    step = chance.randrange(job.steps, STEPS + 1)
    while job.steps < step and not job.done:
        if kind == "server":  # still starting after the last strike, it is refused by a job that begins
            job.start_ended()
        time.sleep(0.05)
    wait = time.monotonic() + chance.uniform(0, longest / (STEPS if step else 2))
    while time.monotonic() < wait:
        if job.at_its_end:
            return None
        time.sleep(0.05)
    while not job.at_its_end:
        before, step = job.said(), job.steps
        if (taken := take_away(kind, job, storage, chance)) is None:
            time.sleep(0.2)
            continue
        incident = Incident(kind=kind, victim=taken[0], step=step)
        watch(job, incident, before, taken[1])
        return incident
    return None


@contextmanager
def storage_of(folder: Path, mebibytes: int = 256) -> Iterator[Path]:
    """A disk of its own, small enough to be filled."""
    storage = folder / "storage"
    storage.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", storage], check=True)
    try:
        yield storage
    finally:
        subprocess.run(["umount", "--lazy", storage], check=True)


def undisturbed(nodes: Nodes, runs: Path, extra: tuple[str, ...]) -> tuple[Path, float]:
    """The run to compare with, which keeps its checkpoints, and its seconds."""
    began = time.monotonic()
    whole = Job(nodes, runs, "whole", (*extra, "--checkpoint.keep", "100"))
    for node in TRAINERS:
        whole.start(node)
    for agent in whole.agents.values():
        assert agent.wait(600) == 0, "\n".join(whole.log(node).read_text() for node in TRAINERS)
    return whole.run, time.monotonic() - began


def survive(kind: str, args: argparse.Namespace, nodes: Nodes, folder: Path) -> None:
    """Cause so many incidents of a kind, over as many runs as it takes; those of a run are written when it is
    compared."""
    chance = random.Random(f"{args.seed} {kind}")
    with ExitStack() as stack:
        storage = stack.enter_context(storage_of(folder))
        # What bounds the wait for a rank that never joined, its node being lost before: 10 min by default.
        extra: tuple[str, ...] = ("--parallel.collective_seconds", "60")
        if kind == "server":
            checkpoint = wide_checkpoint(folder / "model")
            servers = stack.enter_context(serving_on(nodes, SERVER, checkpoint, folder, again=True))
            extra = ("--rollout.engine", "vllm", "--vllm.discovery", str(servers))
            extra += ("--model.checkpoint", str(checkpoint), "--loss.entropy_coef", "0.1")
            extra += ("--parallel.silence_seconds", "300", "--reward.max_zero_variance_steps", "0")
        whole, seconds = undisturbed(nodes, storage, extra)
        total = number = 0
        while total < args.each:
            number += 1
            job = Job(nodes, storage, f"run-{number}", extra)
            stack.callback(job.end)
            for node in TRAINERS:
                job.start(node)
            found: list[Incident] = []
            while total < args.each and (incident := strike(kind, job, storage, chance, seconds)):
                found.append(replace(incident, seed=args.seed))
                total += 1
                print(json.dumps(asdict(incident)), flush=True)
            job.finish()
            wrong = at_end(job.run, whole, keep=2, exact=kind != "server")
            print(f"  run {number}: {'; '.join(wrong) or 'as the undisturbed run'}", flush=True)
            with args.results.open("a") as file:
                file.writelines(json.dumps(asdict(replace(one, wrong=wrong))) + "\n" for one in found)
            for path in (job.run, *(job.log(node) for node in TRAINERS)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def problems_of(found: Sequence[Incident]) -> list[str]:
    late = [f"not within {WITHIN:.0f} s: {one.victim}" for one in found if one.seconds > WITHIN]
    return [*(problem for one in found for problem in one.wrong), *late]


def row(kind: str, found: Sequence[Incident]) -> str:
    """A row of the table in docs/cluster.md."""
    alone = sum(not one.started_again for one in found)
    lines = sorted((one.line for one in found if one.line), key=len) or [""]
    cells = [
        kind,
        str(len(found)),
        str(alone),
        f"{max(one.seconds for one in found):.0f}",
        f"{max(one.went_on for one in found):.0f}",
        "; ".join(problems_of(found)) or "equal",
        f"`{lines[len(lines) // 2]}`" if lines[0] else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=20, help="incidents of a kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=REPO / "benchmarks/results/survive.jsonl")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        parser.error(reason)
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with Nodes([*TRAINERS, SERVER], folder / "hosts") as nodes:
                survive(kind, args, nodes, folder)
    found = [Incident(**json.loads(line)) for line in args.results.read_text().splitlines()]
    for kind in KINDS:
        if of_kind := [one for one in found if one.kind == kind]:
            print(row(kind, of_kind))
    return 1 if problems_of(found) else 0


if __name__ == "__main__":
    sys.exit(main())
