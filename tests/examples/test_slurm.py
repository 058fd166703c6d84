"""examples/slurm with programs in Slurm's place that write down what they are asked.

tests/cluster/slurm_local.py runs it on a real Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from launch import REPO

SRUN = r"""#!/bin/bash
echo "srun NNODES=$NNODES NPROC=$NPROC MASTER_ADDR=$MASTER_ADDR \
GPU=${FIRST_GPU:-} SERVERS=$SERVERS $*" >> "$CALLS"
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
TIMEOUT = "#!/bin/bash\n[ -e $CALLS.silent ] || echo HTTP/1.0 200 OK\n"  # `ready` asks by it
SQUEUE = '#!/bin/bash\necho "${LIMIT:-24:00:00}"\n'
SCANCEL = '#!/bin/bash\necho "scancel $*" >> "$CALLS"; rm -f "$CALLS.wait"\n'


def start(folder: Path, nodes: int, status: int = 0, **given: str) -> subprocess.Popen[str]:
    programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "squeue": SQUEUE, "timeout": TIMEOUT}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "STATUS": str(status)}
    env |= {
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "n[1-]",
    }
    words = ["bash", "examples/slurm/job.sbatch", "--run.steps", "3"]
    with (folder / "err").open("w") as err:
        return subprocess.Popen(words, cwd=REPO, env=env | given, start_new_session=True, stderr=err)


def calls(folder: Path, *arguments: int, **given: str) -> list[str]:
    job = start(folder, *arguments, **given)
    job.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)  # Slurm ends the servers with the job
    return (folder / "calls").read_text().splitlines()


def test_without_servers_all_nodes_train(tmp_path: Path) -> None:
    (train,) = calls(tmp_path, 2)
    assert "NNODES=2 NPROC=8 MASTER_ADDR=n1" in train and "--nodelist=n1,n2" in train
    assert train.endswith(" bash examples/slurm/task.sh train --run.steps 3 --resume auto")
    assert " --cpus-per-task=2 --cpu-bind=none " in train, "a step has one core otherwise"


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("verify", "--run.steps 3"),
        ("trial", "--rollout.max_response_tokens 512 --run.steps 3 --run.steps 2 --run.name trial-7"),
    ],
)
def test_other_verbs_are_no_runs_to_go_on_with(verb: str, words: str, tmp_path: Path) -> None:
    (train,) = calls(tmp_path, 1, VERB=verb, MODEL="m" if verb == "verify" else "")
    assert train.endswith(f"task.sh train {words}")


def test_a_verb_that_is_none(tmp_path: Path) -> None:
    assert start(tmp_path, 1, VERB="fly").wait(30) == 2
    assert (tmp_path / "err").read_text() == "VERB=fly: must be train, trial or verify\n"


@pytest.mark.parametrize(("limit", "status"), [("30:00", 2), ("5:00", 2), ("31:00", 0), ("1:30:00", 0)])
def test_a_limit_that_has_no_time_before_the_signal(limit: str, status: int, tmp_path: Path) -> None:
    """It would come at once, be answered by a requeue, and so on for ever."""
    assert start(tmp_path, 1, LIMIT=limit).wait(30) == status
    assert (tmp_path / "err").read_text().startswith("--time: the job's limit is" if status else "")
    assert start(tmp_path, 1, LIMIT=limit, VERB="verify").wait(30) == 0


def test_a_trial_goes_on_at_the_signal_and_is_not_requeued(tmp_path: Path) -> None:
    (tmp_path / "calls.wait").touch()
    job = start(tmp_path, 1, status=143, VERB="trial")
    while not (tmp_path / "calls.trains").exists():
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert job.poll() is None
    (tmp_path / "calls.wait").unlink()
    assert job.wait(30) == 143
    assert not any("requeue" in call for call in (tmp_path / "calls").read_text().splitlines())


def test_in_a_container(tmp_path: Path) -> None:
    given = {"CONTAINER": "apptainer exec --nv fspo.sif", "SRUN": "--container-image=fspo", "MODEL": "m"}
    for step in calls(tmp_path, 2, **given)[:2]:
        assert " --container-image=fspo " in step and " apptainer exec --nv fspo.sif bash examples/" in step


def test_servers_that_never_answer(tmp_path: Path) -> None:
    (tmp_path / "calls.silent").touch()
    job = start(tmp_path, 1, MODEL="m", READY_SECONDS="0")
    assert job.wait(30) == 1
    os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "err").read_text().startswith("not all servers answer after 0 s (READY_SECONDS)")


@pytest.mark.parametrize(("path", "ready"), [("/", True), ("/none", False)])
def test_ready_asks_every_server(path: str, ready: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" and ready else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = f"'http://localhost:{server.server_port}','http://127.0.0.1:{server.server_port}',"
        asked = subprocess.run(["bash", "examples/slurm/task.sh", "ready", urls], cwd=REPO)
        server.shutdown()
    assert (asked.returncode == 0) == ready
    assert subprocess.run(["bash", "examples/slurm/task.sh", "ready", urls], cwd=REPO).returncode == 1, "gone"


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


@pytest.mark.parametrize(
    ("nodes", "given", "first", "servers", "words"),
    [
        (1, {"SERVER_GPUS": "2"}, 4, 2, "--gpus 4-5 --gpus-per-server 2 --log L --backend nccl"),
        (2, {"SERVER_GPUS": "2"}, 0, 4, "--gpus 0-1 --gpus-per-server 2 --log L --backend nccl"),
        (
            2,
            {"SERVER_GPUS": "2", "COLOCATED": "1"},
            0,
            4,
            "--gpus 0-1 --gpus-per-server 2 --colocated --log L --backend gloo",
        ),
    ],
)
def test_servers_of_two_gpus_and_colocated(
    nodes: int, given: dict[str, str], first: int, servers: int, words: str, tmp_path: Path
) -> None:
    _, *steps = sorted(calls(tmp_path, nodes, MODEL="m", **given))
    serve, train = sorted(steps, key=lambda call: " train " in call)
    assert f"GPU={first} SERVERS={servers} " in serve
    colocated = "COLOCATED" in given
    assert (" --vllm.colocated true " in train) == colocated
    assert train.count("http://") == servers * (nodes if colocated else 1)
    assert f"NNODES={nodes if colocated else 1} " in train

    python = tmp_path / "python"  # the task itself
    python.write_text('#!/bin/bash\necho "$@" >> "$CALLS.serve"\n')
    python.chmod(0o755)
    env = {
        "PATH": os.environ["PATH"],
        "CALLS": str(tmp_path / "calls"),
        "MODEL": "m",
        "COLOCATED": "",
    } | given
    env |= {"PYTHON": str(python), "FIRST_GPU": str(first), "SERVERS": "1", "SLURMD_NODENAME": "n1"}
    subprocess.run(["bash", "examples/slurm/task.sh", "servers"], cwd=REPO, env=env, check=True)
    log, one = "runs/vllm-n1-8000.log", f"{tmp_path}/calls.serve"
    want = f"-m megatron_fspo serve --model m --host n1 --port 8000 {words.replace(' L ', f' {log} ')}\n"
    assert Path(one).read_text() == want


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
