"""Starting, watching and ending vLLM, with a small program in its place."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fake_vllm import FakeVLLM, is_running, until
from launch import environment
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.common import announced
from megatron_fspo.rollout.server import flags, process
from megatron_fspo.rollout.server.flags import ServerOptions
from megatron_fspo.rollout.server.process import ServerProcess
from megatron_fspo.rollout.server.supervise import assign_gpus, gpu_numbers

KEY = "a-secret-of-32-letters-and-digits"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVLLM:
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = FakeVLLM(folder)
    fake.write()
    monkeypatch.setenv("VLLM_BIN", str(fake.program))
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder, head_dim=32)
    return folder


def write_config(folder: Path, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def options(fake: FakeVLLM, model: Path, tmp_path: Path) -> Callable[..., ServerOptions]:
    def make(**changes: object) -> ServerOptions:
        log = tmp_path / "logs" / "vllm.log"
        return ServerOptions(**{"model": model, "port": free_port(), "log": log, **changes})

    return make


def start(options: ServerOptions) -> ServerProcess:
    """A server that serves; one that does not is stopped."""
    server = ServerProcess(options)
    try:
        server.launch()
        server.wait()
    except BaseException:
        server.stop()
        raise
    return server


@contextmanager
def started(options: ServerOptions) -> Iterator[ServerProcess]:
    server = start(options)
    try:
        yield server
    finally:
        server.stop()


CPU, GPU = (flags.Installation(Path("vllm"), version) for version in ("0.32.0+cpu", "0.32.0"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_the_checkpoints_unless_told(model: Path, key: str) -> None:
    """vLLM's own choice for float32 is half of it."""
    write_config(model, **{key: "float32"})
    for asked, want in (("auto", "float32"), ("bfloat16", "bfloat16")):
        words = flags.command(ServerOptions(model, dtype=asked), CPU)
        assert words[words.index("--dtype") + 1] == want


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
def test_a_server_has_the_tokenizer_of_its_checkpoint(model: Path, name: str) -> None:
    """With one it stops at strings; vLLM does not start with one that is not there."""
    assert "--skip-tokenizer-init" in flags.command(ServerOptions(model), CPU)
    (model / name).write_text("{}")
    assert "--skip-tokenizer-init" not in flags.command(ServerOptions(model), CPU)


def test_flags_and_environment(
    fake: FakeVLLM, options: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    settings = options(backend="disk", dtype="float32", extra=("--max-num-seqs", "8"))
    with started(settings) as server:
        assert server.alive
        assert server.healthy()
        assert server.url == f"http://127.0.0.1:{settings.port}"
        shown = [psutil.Process(pid).cmdline() for pid in [*fake.running, server._guard.pid]]
    assert not server.alive
    assert not server.healthy()
    (start,) = fake.starts
    assert start["argv"] == [
        *("serve", str(settings.model), "--host", "127.0.0.1", "--port", str(settings.port)),
        *("--dtype", "float32", "--served-model-name", "policy", "--enable-scale-out"),
        *("--skip-tokenizer-init", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--weight-transfer-config", '{"backend": "disk"}', "--worker-extension-cls", flags.EXTENSION),
        *("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-seqs", "8"),
        *("--middleware", "megatron_fspo.rollout.server.inside.require_key.RequireKey"),
    ]
    environ = start["environ"]
    assert (
        environ["VLLM_SERVER_DEV_MODE"] == environ["VLLM_NO_USAGE_STATS"] == environ["HF_HUB_OFFLINE"] == "1"
    )
    assert environ["VLLM_USE_RUST_FRONTEND"] == "0", "it would not know of the guard"
    assert environ["VLLM_CPU_KVCACHE_SPACE"] == "3", "what the user sets stays"
    gone = {"RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH"}
    assert not gone & environ.keys(), "vLLM is no rank of ours"
    assert environ["VLLM_API_KEY"] == KEY
    assert KEY not in str(shown)
    assert KEY not in settings.log_file.read_text()


def test_a_gpu_build_gets_no_cpu_flags(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(model, head_dim=24)
    options = ServerOptions(model, backend="nccl")
    flags.check(options, GPU)
    words = flags.command(options, GPU)
    assert "--enforce-eager" not in words
    assert '{"backend": "torch_nccl"}' in words, "vLLM's own backend of that name is another"
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert "VLLM_CPU_KVCACHE_SPACE" not in flags.environment(on_cpu=False)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({"head_dim": 24}, 24),
        ({"hidden_size": 96, "num_attention_heads": 4}, 24),
        ({"head_dim": 128}, None),
        ({"hidden_size": 256, "num_attention_heads": 4}, None),
        ({}, None),
    ],
)
def test_head_dim_on_a_cpu(config: dict, head_dim: int | None, model: Path) -> None:
    write_config(model, **config)
    if head_dim is None:
        flags.check(ServerOptions(model), CPU)
        return
    with pytest.raises(InputError, match=f"head_dim {head_dim}: vLLM on a CPU can do 32, 64, 80, 96"):
        flags.check(ServerOptions(model), CPU)


def test_refusals(
    fake: FakeVLLM, options: Callable[..., ServerOptions], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("--api-key", f"--api-key={KEY}", "--api_key", f"--api_ke={KEY}"):
        with pytest.raises(InputError, match="set VLLM_API_KEY") as refused:
            ServerProcess(options(extra=(word, KEY)))
        assert KEY not in str(refused.value)
    for word in ("--host", "--ho", "--host=0.0.0.0", "--port"):
        with pytest.raises(InputError, match=r"--(ho|host|port) after --: .* name it before"):
            ServerProcess(options(extra=(word, "0.0.0.0")))
    with pytest.raises(InputError, match=r"no Hugging Face checkpoint there"):
        ServerProcess(options(model=model / "none"))
    (model / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        ServerProcess(options())
    fake.write(plugin=False)
    with pytest.raises(InputError, match="lacks our plugin; run"):
        ServerProcess(options())
    (fake.folder / "python").write_text("#!/bin/sh\necho 'PackageNotFoundError: vllm' >&2; exit 1\n")
    with pytest.raises(InputError, match="knows of no package vllm: PackageNotFoundError: vllm"):
        ServerProcess(options())
    (fake.folder / "python").unlink()
    with pytest.raises(InputError, match="no python beside it"):
        ServerProcess(options())
    with pytest.raises(InputError, match=r"no program .*elsewhere; name one with --vllm"):
        ServerProcess(options(program=str(fake.folder / "elsewhere")))
    monkeypatch.delenv("VLLM_BIN")
    monkeypatch.setenv("PATH", str(model))
    with pytest.raises(InputError, match="no program vllm; "):
        ServerProcess(options())


@pytest.mark.parametrize("host", ["0.0.0.0", "", "10.0.0.7", "node7"])
def test_beyond_this_machine_only_with_a_key(host: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(model, host=host)
    for key in ("", None):
        monkeypatch.setenv("VLLM_API_KEY", key) if key is not None else monkeypatch.delenv("VLLM_API_KEY")
        with pytest.raises(InputError, match=f"--host {host}: without a key .*set VLLM_API_KEY") as refused:
            flags.check(options, GPU)
        assert "--anyone-may-run-code" in str(refused.value)
    flags.check(replace(options, anyone_may_run_code=True), GPU)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    flags.check(options, GPU)
    monkeypatch.setenv("VLLM_API_KEY", f"not a {KEY}")
    with pytest.raises(InputError, match="the API key in VLLM_API_KEY has to be") as refused:
        flags.check(options, GPU)
    assert KEY not in str(refused.value)


def test_the_guard_comes_after_the_users_middleware(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM lets the last one see a request first."""
    options = ServerOptions(model, extra=("--middleware", "a.B"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert flags.command(options, GPU)[-2:] == ["--middleware", "a.B"]
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert flags.command(options, GPU)[-4:] == ["--middleware", "a.B", "--middleware", flags.GUARD]


def test_a_guard_that_does_not_guard(
    fake: FakeVLLM, options: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    fake.set_mode("open")
    with pytest.raises(TrainingError, match=r"should ask for the key and does not: .*/is_paused answers 404"):
        start(options())
    assert len(fake.starts) == 1 and fake.running == []


def test_the_port_of_another(fake: FakeVLLM, options: Callable[..., ServerOptions]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
            start(options(port=port))
    with pytest.raises(InputError, match=r"--host no\.such\.host\.invalid"):
        start(options(host="no.such.host.invalid"))
    assert fake.starts == []


def test_a_crash_at_the_start_shows_the_end_of_the_log(
    fake: FakeVLLM, options: Callable[..., ServerOptions]
) -> None:
    settings = options()
    settings.log_file.parent.mkdir()
    settings.log_file.write_text("of another day\n")
    fake.set_mode("crash")
    with pytest.raises(TrainingError, match="vLLM ended while it started") as crash:
        start(settings)
    assert str(crash.value).splitlines() == [
        f"vLLM ended while it started; the end of {settings.log_file}:",
        "  loading",
        "  RuntimeError: no room for the weights",
        "  megatron-fspo: vLLM ended, status 3",
    ]


def test_a_server_that_is_never_ready(fake: FakeVLLM, options: Callable[..., ServerOptions]) -> None:
    fake.set_mode("slow")
    with pytest.raises(TrainingError, match="not ready after 1 s"):
        start(options(start_seconds=1))
    assert fake.running == []


def test_a_deaf_server_is_killed(
    fake: FakeVLLM, options: Callable[..., ServerOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.3)
    fake.set_mode("deaf")
    server = start(options())
    assert len(fake.running) == 2
    server.stop()
    assert fake.running == []
    server.stop()


def test_nothing_stays_when_the_guard_is_killed(
    fake: FakeVLLM, options: Callable[..., ServerOptions]
) -> None:
    server = start(options())
    os.kill(server._guard.pid, signal.SIGKILL)
    until(lambda: not server.alive, "the end is noticed")
    server.stop()
    assert fake.running == []


@pytest.mark.parametrize(
    ("host", "url", "public", "loopback"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.1.2.3", "127.1.2.3", "127.1.2.3", True),
        ("localhost", "localhost", "localhost", True),
        ("::1", "[::1]", "[::1]", True),
        ("::", "[::1]", socket.gethostname(), False),
        ("0.0.0.0", "127.0.0.1", socket.gethostname(), False),
        ("node7", "node7", "node7", False),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1", False),
    ],
)
def test_urls(host: str, url: str, public: str, loopback: bool) -> None:
    options = ServerOptions(model=Path(), host=host)
    assert options.url == f"http://{url}:8000" and options.public_url == f"http://{public}:8000"
    assert options.loopback_only == loopback
    assert options.log_file == Path("runs/vllm-8000.log")


class Command:
    """``megatron-fspo serve``, running."""

    def __init__(self, tmp_path: Path, model: Path, *words: str, as_child: bool = False) -> None:
        self.port = free_port()
        self.log = tmp_path / "vllm.log"
        self.out = tmp_path / "out"
        serve = [sys.executable, "-m", "megatron_fspo", "serve", "--model", str(model)]
        serve += ["--port", str(self.port), "--log", str(self.log), *words]
        if as_child:  # of a program that knows nothing of it
            serve = [sys.executable, "-c", f"import subprocess; subprocess.run({serve})"]
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(serve, stdout=file, stderr=subprocess.STDOUT, env=environment())

    @property
    def said(self) -> list[str]:
        return self.out.read_text().splitlines()

    @property
    def all(self) -> list[int]:
        """Our own processes: the command's, and its parent's if it has one."""
        if not is_running(self.process.pid):
            return []
        return [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]

    def until_ready(self, times: int = 1) -> None:
        until(lambda: "".join(self.said).count("is ready") == times or not self.all, "ready")
        assert self.all, self.said


@pytest.fixture
def serve(fake: FakeVLLM, model: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*words: str, as_child: bool = False) -> Command:
        started.append(Command(tmp_path, model, *words, as_child=as_child))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.wait()
    for pid in fake.running:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_all(
    number: int, status: int, serve: Callable[..., Command], fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    command = serve("--", "--max-num-seqs", "8")
    command.until_ready()
    assert command.said == [f"vLLM is ready at http://127.0.0.1:{command.port}, its log is {command.log}"]
    assert fake.starts[0]["argv"][-4:-2] == ["--max-num-seqs", "8"]
    assert len(fake.running) == 2
    assert KEY not in str([psutil.Process(pid).cmdline() for pid in command.all])
    command.process.send_signal(number)
    assert command.process.wait(60) == status
    assert fake.running == []
    assert command.said[1:] == (["megatron-fspo: interrupted"] if status else [])
    assert KEY not in command.log.read_text() + command.out.read_text()


@pytest.mark.slow
def test_a_signal_while_it_starts(serve: Callable[..., Command], fake: FakeVLLM) -> None:
    fake.set_mode("slow")
    command = serve()
    until(lambda: fake.starts, "a start")
    command.process.terminate()
    assert command.process.wait(60) == 0
    assert fake.running == []


@pytest.mark.slow
def test_killing_it_leaves_nothing(serve: Callable[..., Command], fake: FakeVLLM) -> None:
    command = serve("--keep-alive")
    command.until_ready()
    command.process.kill()
    until(lambda: not fake.running, "the end of vLLM")


@pytest.mark.slow
@pytest.mark.parametrize("keep_alive", [False, True])
def test_the_end_of_the_parent(keep_alive: bool, serve: Callable[..., Command], fake: FakeVLLM) -> None:
    command = serve(*["--keep-alive"] * keep_alive, as_child=True)
    command.until_ready()
    parent, ours, *_ = processes = command.all
    os.kill(parent, signal.SIGKILL)
    command.process.wait()
    if keep_alive:
        with pytest.raises(AssertionError):
            until(lambda: not is_running(ours), "an end that must not come", seconds=2)
        assert len(fake.running) == 2
        os.kill(ours, signal.SIGTERM)
    until(lambda: not any(map(is_running, [*processes, *fake.running])), "the end of all")


@pytest.mark.slow
def test_restarts_and_their_limit(serve: Callable[..., Command], fake: FakeVLLM) -> None:
    command = serve()
    for crash in range(4):
        command.until_ready(times=crash + 1)
        os.kill(fake.starts[-1]["pids"][0], signal.SIGKILL)
    assert command.process.wait(60) == 1
    assert fake.running == []
    assert len(fake.starts) == 4
    said = command.said
    again = f"vLLM is ready again at http://127.0.0.1:{command.port}, with the checkpoint's weights"
    assert said[1:7] == [
        line
        for n in (1, 2, 3)
        for line in (f"megatron-fspo: vLLM ended; restart {n}, of at most 3 in 10 min", again)
    ]
    assert said[7] == f"megatron-fspo: vLLM ended 4 times in 10 minutes; the end of {command.log}:"
    assert said[-1] == "  megatron-fspo: vLLM ended, status -9"


@pytest.mark.slow
def test_a_restart_that_fails_counts(serve: Callable[..., Command], fake: FakeVLLM) -> None:
    command = serve()
    command.until_ready()
    fake.set_mode("crash")
    os.kill(fake.starts[-1]["pids"][0], signal.SIGKILL)
    assert command.process.wait(60) == 1
    assert len([line for line in command.said if "ended; restart" in line]) == 3
    assert "  RuntimeError: no room for the weights" in command.said


@pytest.mark.slow
def test_a_crash_at_the_start_is_not_tried_again(serve: Callable[..., Command], fake: FakeVLLM) -> None:
    fake.set_mode("crash")
    command = serve()
    assert command.process.wait(60) == 1
    assert command.said[0].startswith("megatron-fspo: vLLM ended while it started; the end of ")
    assert "  RuntimeError: no room for the weights" in command.said


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", KEY])
def test_another_host(
    key: str, serve: Callable[..., Command], fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    if not key:
        refused = serve("--host", "0.0.0.0")
        assert refused.process.wait(60) == 2
        (line,) = refused.said
        assert line.startswith("megatron-fspo: --host 0.0.0.0: without a key whoever reaches port ")
        assert fake.starts == [] and not refused.log.exists()
    command = serve("--host", "0.0.0.0", *(() if key else ("--anyone-may-run-code",)))
    command.until_ready()
    *warning, ready = command.said
    assert ready.startswith(f"vLLM is ready at http://127.0.0.1:{command.port}, ")
    assert [f"port {command.port} runs any code here" in line for line in warning] == [True] * (not key)


def test_gpu_numbers() -> None:
    assert gpu_numbers("0-3,6") == ("0", "1", "2", "3", "6") and gpu_numbers("5,1") == ("5", "1")
    for text in ("", "a", "0,", "3-", "-1", "0,0", "1-3,2", "3-1", "0-1-2"):
        with pytest.raises(InputError, match=f"--gpus {text}: "):
            gpu_numbers(text)


def test_every_server_has_gpus_and_a_port_of_its_own(model: Path) -> None:
    options = ServerOptions(model, port=8100)
    placed = assign_gpus(options, gpu_numbers("0-3"), 2)
    assert [(one.gpus, one.port, one.log_file.name) for one in placed] == [
        (("0", "1"), 8100, "vllm-8100.log"),
        (("2", "3"), 8101, "vllm-8101.log"),
    ]
    words = flags.command(placed[1], GPU)
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "--tensor-parallel-size" not in flags.command(options, GPU)
    for count in (0, 3):
        with pytest.raises(InputError, match=f"--gpus-per-server {count} does not divide the 4"):
            assign_gpus(options, gpu_numbers("0-3"), count)
    with pytest.raises(InputError, match="4 servers cannot share one"):
        assign_gpus(ServerOptions(model, log=Path("log")), gpu_numbers("0-3"), 1)


@pytest.mark.slow
def test_several_servers_announce_themselves_and_end_together(
    fake: FakeVLLM, model: Path, tmp_path: Path
) -> None:
    port, folder = free_port(), tmp_path / "servers"
    words = ["--gpus", "4,5", "--port", str(port), "--announce", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_fspo", "serve", "--model", str(model), *words],
        env=environment(),
        cwd=tmp_path,
    )
    urls = sorted(f"http://127.0.0.1:{port + i}" for i in range(2))
    until(lambda: sorted(announced(folder)) == urls, "both")
    assert sorted(start["environ"]["CUDA_VISIBLE_DEVICES"] for start in fake.starts) == ["4", "5"]
    process.terminate()
    assert process.wait(30) == 0
    assert announced(folder) == [] and not fake.running
