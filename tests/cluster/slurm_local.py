"""examples/slurm on a Slurm of this machine: stopped, requeued, and equal to an undisturbed job.

    apt-get install slurm-wlm munge iproute2
    python tests/cluster/slurm_local.py [--stops term batch requeue] [--kinds container verify] [--vllm MODEL]

One slurmctld and two slurmd, each a node with a port of its own, cores that steps are bound to, and no
cgroups. Needs root. Jobs train the tiny model by the launch script, a rank on each node. Four times:
undisturbed; `scancel --signal=TERM` (the job requeues itself); the same to the batch script, as the time
limit does; and `scontrol requeue`, which gives the ranks no time to save. With --vllm one node trains, and a
vLLM server is on the other. --kinds are jobs of other kinds, to their ends.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "trainer")]

from kill_checks import at_end  # noqa: E402
from launch import REPO, environment  # noqa: E402
from runs import rows  # noqa: E402

NODES = ("slurm-a", "slurm-b")
CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=Cores
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
PlugStackConfig={folder}/plugstack.conf
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
SETTINGS = (
    "--smoke --run.steps 8 --checkpoint.every 2 --rollout.prompts 8 --rollout.samples 4 "
    "--checkpoint.keep 2 --rollout.max_response_tokens 40 --optimizer.warmup_steps 0 --evaluation.every 4"
).split()


def why_not() -> str | None:
    """The reason why this cannot run here, if there is one."""
    if os.geteuid() != 0:
        return "slurmd starts jobs as their users: needs root"
    for program in ("slurmctld", "slurmd", "munged", "unshare", "ip"):
        if subprocess.run(["which", program], capture_output=True).returncode:
            return f"needs `{program}`: apt-get install slurm-wlm munge iproute2"
    return None


@contextmanager
def program(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Something that runs in the foreground until it is left."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def slurm(folder: Path) -> Iterator[None]:
    """A cluster of two nodes; its commands find it by the environment."""
    hosts = folder / "hosts"
    names = "".join(f"10.77.0.{n} {node}\n" for n, node in enumerate(NODES, 1))
    for words in ("set lo up", "add nodes type bridge", "set nodes up"):  # in a namespace of ours, both
        subprocess.run(["ip", "link", *words.split()], check=True)
    for n in range(len(NODES)):
        subprocess.run(["ip", "address", "add", f"10.77.0.{n + 1}/24", "dev", "nodes"], check=True)
    hosts.write_text(Path("/etc/hosts").read_text() + names)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 Port={26820 + n} CPUs=2"
        for n, node in enumerate(NODES)
    )
    (folder / "plugstack.conf").touch()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=os.uname().nodename, folder=folder, nodes=nodes))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    os.environ["SLURM_CONF"] = str(conf)
    with ExitStack() as running:
        words = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge]
        running.enter_context(program(words, folder / "munged.out"))
        wait_for(lambda: (folder / "munge.socket").exists(), 20, "munged")
        (folder / "state").mkdir()
        running.enter_context(program(["slurmctld", "-D", "-f", str(conf)], folder / "slurmctld.out"))
        for node in NODES:
            (folder / f"{node}.spool").mkdir()
            running.enter_context(
                program(["slurmd", "-D", "-N", node, "-f", str(conf)], folder / f"{node}.out")
            )
        wait_for(lambda: ask("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 60, "two idle nodes")
        try:
            yield
        finally:
            ask("scancel", "--user=root")
            wait_for(lambda: not ask("squeue", "-h"), 120, "the end of all jobs")


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def wait_for(done: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:g} s for {what}")
        time.sleep(0.3)


class Job:
    """A run of examples/slurm/job.sbatch."""

    def __init__(self, folder: Path, name: str, model: str | None, nodes: int = 2, **given: str) -> None:
        self.folder, self.name = folder / "runs", name
        self.log = folder / f"{name}.out"
        env = {"NPROC": "1", "PYTHON": sys.executable, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
        words = [*SETTINGS, "--run.folder", str(self.folder), "--run.name", name]
        if model:
            env |= {
                "MODEL": model,
                "SERVERS": "1",
                "SERVE": "--dtype float32 -- --max-model-len 128 --max-num-seqs 32",
            }
            words += ["--model.checkpoint", model, "--parallel.tensor", "1", "--parallel.sequence", "false"]
        script = str(REPO / "examples/slurm/job.sbatch")
        submit = ["sbatch", "--parsable", f"--nodes={nodes}", "--output", str(self.log), script, *words]
        done = subprocess.run(
            submit, cwd=REPO, env=environment() | env | given, capture_output=True, text=True, check=True
        )
        self.id = done.stdout.strip()

    @property
    def steps(self) -> int:
        there = (self.folder / self.name / "metrics.jsonl").exists()
        return max((row["step"] for row in rows(self.folder, self.name)), default=0) if there else 0

    def field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S+)", ask("scontrol", "show", "job", self.id))
        return found[1] if found else ""

    def reach(self, steps: int) -> None:
        wait_for(lambda: self.steps >= steps or self.ended, 300, f"step {steps} of {self.name}")
        if self.ended:
            raise SystemExit(f"{self.name} is {self.field('JobState')}:\n{self.log.read_text()}")

    @property
    def ended(self) -> bool:
        return self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def start_again(self) -> None:
        """Start the job as soon as it is requeued; Slurm itself waits two minutes."""
        wait_for(lambda: self.field("Restarts") == "1" or self.ended, 180, f"{self.name} to be requeued")
        wait_for(lambda: self.field("JobState") == "PENDING", 60, f"{self.name} to be pending")
        ask("scontrol", "update", f"JobId={self.id}", "StartTime=now")

    def finish(self) -> None:
        wait_for(lambda: self.ended, 400, f"the end of {self.name}")
        if self.field("JobState") != "COMPLETED":
            raise SystemExit(f"{self.name} is {self.field('JobState')}:\n{self.log.read_text()}")


STOPS = {
    "term": ["scancel", "--signal=TERM"],
    "batch": ["scancel", "--batch", "--signal=TERM"],
    "requeue": ["scontrol", "requeue"],
}


def check(folder: Path, model: str | None, stops: Sequence[str]) -> None:
    whole = Job(folder, "whole", model)
    whole.finish()
    print(f"undisturbed: {whole.steps} steps", flush=True)
    for number, name in enumerate(stops):
        words = STOPS[name]
        job = Job(folder, name, model)
        job.reach(3 + number)
        subprocess.run([*words, job.id], check=True)
        job.start_again()
        kept = job.steps
        job.finish()
        wrong = at_end(folder / "runs" / name, folder / "runs/whole", keep=2, exact=model is None)
        print(f"{' '.join(words)}: requeued after step {kept}", flush=True)
        print(f"  {'; '.join(wrong) or 'ends as the undisturbed one'}", flush=True)
        if wrong:
            raise SystemExit(1)


KINDS: dict[str, dict[str, Any]] = {
    "pairs": {"SERVER_GPUS": "2"},
    "colocated": {"COLOCATED": "1", "NPROC": "2", "nodes": 1},
    "container": {"VERB": "trial"},
    "verify": {"VERB": "verify"},
}
"""What is given to the job; the first two have servers."""


def check_kind(folder: Path, kind: str, model: str | None) -> None:
    """A job of this kind runs to its end, and its ranks have all cores, in a container, too."""
    container = folder / "container"
    container.write_text(
        '#!/bin/bash\necho "container: $(env -u OMP_NUM_THREADS nproc) cores: $*"\nexec "$@"\n'
    )
    container.chmod(0o755)
    given = KINDS[kind] | {"CONTAINER": str(container)}
    job = Job(folder, kind, model if kind in ("pairs", "colocated") else None, **given)
    job.finish()
    said = job.log.read_text()
    tasks = re.findall(r"^container: (\d+) cores: bash examples/slurm/task.sh (\w+)", said, re.MULTILINE)
    ends = [line for line in said.splitlines() if re.search("^done. |the same gradient", line)]
    print(f"{kind}: {', '.join(f'{task} on {cores} cores' for cores, task in tasks)}; {ends}", flush=True)
    if {cores for cores, _ in tasks} != {"2"}:
        raise SystemExit(f"not all cores:\n{said[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", metavar="MODEL", help="one node trains, the other has a server of this model"
    )
    parser.add_argument("--stops", nargs="*", choices=STOPS, default=[*STOPS], help="(default: all)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[], help="(default: none)")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    if "SLURM_LOCAL" not in os.environ:
        os.execvpe(
            "unshare",
            ["unshare", "--mount", "--net", sys.executable, *sys.argv],
            os.environ | {"SLURM_LOCAL": "1"},
        )
    with tempfile.TemporaryDirectory(prefix="slurm") as name, slurm(Path(name)):
        said = Path(name, "bound.out")
        wrap = ["--wrap", "srun env -u OMP_NUM_THREADS nproc"]
        ask("sbatch", "--wait", "--exclusive", "--ntasks-per-node=1", f"--output={said}", *wrap)
        print(f"cores of a step that asks for none: {said.read_text().strip()}, of 2", flush=True)
        for kind in args.kinds:
            check_kind(Path(name), kind, args.vllm)
        if args.stops:
            check(Path(name), args.vllm, args.stops)


if __name__ == "__main__":
    main()
