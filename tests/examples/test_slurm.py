"""examples/slurm with programs in Slurm's place that write down what they are asked.

tests/cluster/slurm_local.py runs it on a real Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launch import REPO

SRUN = """\
#!/bin/bash
echo "srun NNODES=$NNODES NPROC=$NPROC MASTER_ADDR=$MASTER_ADDR GPU=${FIRST_GPU:-} $*" >> "$CALLS"
case "$*" in
  *" servers") exec sleep 60 ;;
  *) touch "$CALLS.trains"; while [ -e "$CALLS.wait" ]; do sleep 0.1; done; exit "$STATUS" ;;
esac
"""
SCONTROL = """\
#!/bin/bash
if [ "$1" = show ]; then exec printf 'n%s\\n' $(seq "$SLURM_JOB_NUM_NODES"); fi
echo "scontrol $*" >> "$CALLS"
"""
SCANCEL = '#!/bin/bash\necho "scancel $*" >> "$CALLS"; rm -f "$CALLS.wait"\n'


def start(folder: Path, nodes: int, status: int = 0, **given: str) -> subprocess.Popen[str]:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "STATUS": str(status)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[1-]"}
    words = ["bash", "examples/slurm/job.sbatch", "--run.steps", "3"]
    return subprocess.Popen(words, cwd=REPO, env=env | {"PYTHON": "true"} | given, start_new_session=True)


def calls(folder: Path, *arguments: int, **given: str) -> list[str]:
    job = start(folder, *arguments, **given)
    job.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)  # Slurm ends the servers with the job
    return (folder / "calls").read_text().splitlines()


def test_without_servers_all_nodes_train(tmp_path: Path) -> None:
    (train,) = calls(tmp_path, 2)
    assert "NNODES=2 NPROC=8 MASTER_ADDR=n1" in train and "--nodelist=n1,n2" in train
    assert train.endswith("task.sh train --run.steps 3 --resume auto")


@pytest.mark.parametrize(
    ("nodes", "servers", "trains", "urls"),
    [
        (1, "--nodelist=n1", "NNODES=1 NPROC=4", [f"http://n1:{8000 + i}" for i in range(4)]),
        (2, "--nodelist=n2", "NNODES=1 NPROC=8", [f"http://n2:{8000 + i}" for i in range(8)]),
        (
            4,
            "--nodelist=n3,n4",
            "NNODES=2 NPROC=8",
            [f"http://n{n}:{8000 + i}" for n in (3, 4) for i in range(8)],
        ),
    ],
)
def test_where_the_servers_are(
    nodes: int, servers: str, trains: str, urls: list[str], tmp_path: Path
) -> None:
    kill, *steps = sorted(calls(tmp_path, nodes, MODEL="m"))
    serve, train = sorted(steps, key=lambda call: " train " in call)
    assert kill == "scancel --signal=KILL 7.0"
    assert servers in serve and trains in serve and f"GPU={4 if nodes == 1 else 0} " in serve
    assert trains in train and f"--nodelist={'n1,n2' if nodes == 4 else 'n1'} " in train
    given = train.partition("--vllm.urls ")[2].strip("[]").rstrip(",").split(",")
    assert [one.strip("'") for one in given] == urls


@pytest.mark.parametrize(("status", "requeued"), [(143, True), (1, False), (0, False)])
def test_a_run_that_was_stopped_is_requeued(status: int, requeued: bool, tmp_path: Path) -> None:
    assert ("scontrol requeue 7" in calls(tmp_path, 1, status)) == requeued


def test_a_signal_to_the_batch_script_goes_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "calls.wait").touch()
    job = start(tmp_path, 1, 143)
    while not (tmp_path / "calls.trains").exists():
        time.sleep(0.05)
    job.terminate()
    assert job.wait(30) == 143
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [
        "scancel --signal=TERM 7.0",
        "scontrol requeue 7",
    ]
