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

from fake_vllm import FakeVLLM, Serve, free_port, is_running, until
from launch import environment
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.common import announced
from megatron_fspo.rollout.server import flags, process
from megatron_fspo.rollout.server.flags import ServerOptions
from megatron_fspo.rollout.server.process import ServerProcess
from megatron_fspo.rollout.server.supervise import assign_gpus, gpu_numbers

KEY = "a-secret-of-32-letters-and-digits"
Make = Callable[..., ServerOptions]
Start = Callable[..., Serve]


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


@pytest.fixture
def options(fake: FakeVLLM, model: Path, tmp_path: Path) -> Make:
    def make(**changes: object) -> ServerOptions:
        log = tmp_path / "logs" / "vllm.log"
        return ServerOptions(**{"model": model, "port": free_port(), "log": log, **changes})

    return make


@contextmanager
def started(options: ServerOptions) -> Iterator[ServerProcess]:
    server = ServerProcess(options)
    try:
        server.launch()
        server.wait()
        yield server
    finally:
        server.stop()


CPU, GPU = (flags.Installation(Path("vllm"), version) for version in ("0.32.0+cpu", "0.32.0"))


def test_the_checkpoint_names_the_dtype_and_has_the_tokenizer(model: Path) -> None:
    """vLLM's own choice for float32 is half of it, and it does not start with a tokenizer that is missing."""
    for key in ("dtype", "torch_dtype"):
        write_config(model, **{key: "float32"})
        for asked, want in (("auto", "float32"), ("bfloat16", "bfloat16")):
            words = flags.command(ServerOptions(model, dtype=asked), CPU)
            assert words[words.index("--dtype") + 1] == want
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        assert "--skip-tokenizer-init" in flags.command(ServerOptions(model), CPU)
        (model / name).write_text("{}")
        assert "--skip-tokenizer-init" not in flags.command(ServerOptions(model), CPU)
        (model / name).unlink()


def test_flags_and_environment(fake: FakeVLLM, options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH")
    gone += ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ours = {"VLLM_SERVER_DEV_MODE": "0", "VLLM_USE_RUST_FRONTEND": "1", "VLLM_API_KEY": KEY}
    kept = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "3"}
    for name, value in (dict.fromkeys(gone, "1") | ours | kept).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    settings = options(backend="disk", dtype="float32", extra=("--max-num-seqs", "8"))
    with started(settings) as server:
        assert server.alive and server.healthy()
        shown = [psutil.Process(pid).cmdline() for pid in [*fake.running, server._guard.pid]]
    assert not server.alive and not server.healthy()
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
    assert environ["VLLM_SERVER_DEV_MODE"] == environ["VLLM_NO_USAGE_STATS"] == "1"
    assert environ["VLLM_USE_RUST_FRONTEND"] == "0", "it would not know of the guard"
    assert environ.items() >= kept.items(), "what the user sets stays"
    assert not set(gone) & environ.keys(), "vLLM is no rank of ours"
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
    shared = flags.command(replace(options, colocated=True, extra=("--gpu-memory-utilization", "0.7")), GPU)
    assert [word for word in shared if word.startswith("0.")] == ["0.8", "0.7"], "vLLM takes the last"


def test_head_dim_on_a_cpu(model: Path) -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 4}
    for config in ({"head_dim": 128}, sizes | {"hidden_size": 256}, {}):
        write_config(model, **config)
        flags.check(ServerOptions(model), CPU)
    for config in ({"head_dim": 24}, sizes):
        write_config(model, **config)
        with pytest.raises(InputError, match="head_dim 24: vLLM on a CPU supports 32, 64"):
            flags.check(ServerOptions(model), CPU)
    latent = {"head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 24}
    for rope in ({}, {"rope_parameters": {"rope_type": "default"}}):
        write_config(model, **latent | rope)
        flags.check(ServerOptions(model), GPU)
        with pytest.raises(InputError, match="without YaRN vLLM on a CPU rotates the queries"):
            flags.check(ServerOptions(model), CPU)
    latent["rope_scaling"] = {"type": "yarn"}
    write_config(model, **latent)
    flags.check(ServerOptions(model), CPU)
    write_config(model, **latent | {"kv_lora_rank": 16})
    with pytest.raises(InputError, match=r"kv_lora_rank \+ qk_rope_head_dim 80: vLLM on a CPU supports 576"):
        flags.check(ServerOptions(model), CPU)


def test_refusals(fake: FakeVLLM, options: Make, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(**changes: object) -> str:
        with pytest.raises(InputError) as refused:
            ServerProcess(options(**changes))
        return str(refused.value)

    for word in ("--api-key", f"--api-key={KEY}", "--api_key", f"--api_ke={KEY}"):
        said = refusal(extra=(word, KEY))
        assert "VLLM_API_KEY" in said and KEY not in said
    for word in ("--host", "--ho", "--host=0.0.0.0", "--port"):
        assert f"{word.split('=')[0]} after --" in refusal(extra=(word, "0.0.0.0"))
    assert f"--model {model / 'none'}" in refusal(model=model / "none")
    (model / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal()
    fake.write(plugin=False)
    assert "lacks our plugin" in refusal()
    (fake.folder / "python").write_text("#!/bin/sh\necho 'PackageNotFoundError: vllm' >&2; exit 1\n")
    assert "PackageNotFoundError: vllm" in refusal()
    (fake.folder / "python").unlink()
    assert "no python" in refusal()
    assert f"{fake.folder}/elsewhere" in refusal(program=str(fake.folder / "elsewhere"))
    monkeypatch.delenv("VLLM_BIN")
    monkeypatch.setenv("PATH", str(model))
    assert "no program vllm" in refusal()


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
    with pytest.raises(InputError, match="the API key in VLLM_API_KEY") as refused:
        flags.check(options, GPU)
    assert KEY not in str(refused.value)


def test_the_guard_comes_after_the_users_middleware(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM lets the last one see a request first."""
    options = ServerOptions(model, extra=("--middleware", "a.B"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert flags.command(options, GPU)[-2:] == ["--middleware", "a.B"]
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert flags.command(options, GPU)[-4:] == ["--middleware", "a.B", "--middleware", flags.GUARD]


def test_a_guard_that_does_not_guard(fake: FakeVLLM, options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    fake.set_mode("open")
    with pytest.raises(TrainingError, match="/is_paused answers 404"), started(options()):
        pass
    assert len(fake.starts) == 1 and fake.running == []


def test_the_port_of_another(fake: FakeVLLM, options: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: Address already in use"):
            ServerProcess(options(port=port)).launch()
    with pytest.raises(InputError, match=r"--host no\.such\.host\.invalid"):
        ServerProcess(options(host="no.such.host.invalid")).launch()
    assert fake.starts == []


def test_a_name_that_is_this_machine_to_itself_alone(
    fake: FakeVLLM, options: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Debian's /etc/hosts: others would be told a name at which nobody answers them."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))]
    )
    with pytest.raises(InputError, match=r"--host node-3 is 127\.0\.1\.1 here"):
        ServerProcess(options(host="node-3")).launch()
    assert fake.starts == []


def test_a_crash_at_the_start_shows_the_end_of_the_log(fake: FakeVLLM, options: Make) -> None:
    settings = options()
    settings.log_file.parent.mkdir()
    settings.log_file.write_text("of another day\n")
    fake.set_mode("crash")
    with pytest.raises(TrainingError) as crash, started(settings):
        pass
    first, *lines = str(crash.value).splitlines()
    assert first.endswith(f"{settings.log_file}:")
    assert lines[:2] == ["  loading", "  RuntimeError: no room for the weights"]
    assert "status 3" in lines[2]


def test_a_server_that_is_never_ready(fake: FakeVLLM, options: Make) -> None:
    fake.set_mode("slow")
    with pytest.raises(TrainingError, match="not ready after 1 s"), started(options(start_seconds=1)):
        pass
    assert fake.running == []


def test_a_deaf_server_is_killed(fake: FakeVLLM, options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.3)
    fake.set_mode("deaf")
    with started(options()) as server:
        assert len(fake.running) == 2
        server.stop()
        assert fake.running == []


def test_nothing_stays_when_the_guard_is_killed(fake: FakeVLLM, options: Make) -> None:
    with started(options()) as server:
        os.kill(server._guard.pid, signal.SIGKILL)
        until(lambda: not server.alive, "the end is noticed")
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


@pytest.fixture
def serve(fake: FakeVLLM, model: Path, tmp_path: Path) -> Iterator[Start]:
    commands: list[Serve] = []

    def start(*words: str, as_child: bool = False) -> Serve:
        commands.append(Serve(model, tmp_path / "vllm.log", *words, as_child=as_child))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.wait()
    for pid in fake.running:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_all(
    number: int, status: int, serve: Start, fake: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    command = serve("--host", "0.0.0.0", "--", "--max-num-seqs", "8")
    command.until_ready()
    assert command.said == [f"vLLM is ready at {command.url}, its log is {command.log}"]
    assert fake.starts[0]["argv"][-4:-2] == ["--max-num-seqs", "8"]
    assert len(fake.running) == 2
    ours = [psutil.Process(command.process.pid), *command.family]
    assert KEY not in str([process.cmdline() for process in ours])
    command.process.send_signal(number)
    assert command.process.wait(60) == status
    assert fake.running == []
    assert len(command.said) == 1 + bool(status)
    assert KEY not in command.log.read_text() + command.out.read_text()


@pytest.mark.slow
def test_a_start_that_is_stopped_or_crashes_is_not_tried_again(serve: Start, fake: FakeVLLM) -> None:
    fake.set_mode("slow")
    command = serve()
    until(lambda: fake.starts, "a start")
    command.process.terminate()
    assert command.process.wait(60) == 0
    assert fake.running == []
    fake.set_mode("crash")
    command = serve()
    assert command.process.wait(60) == 1
    assert "restart" not in str(command.said)
    assert "  RuntimeError: no room for the weights" in command.said


@pytest.mark.slow
@pytest.mark.parametrize("keep_alive", [False, True])
def test_the_end_of_the_parent(keep_alive: bool, serve: Start, fake: FakeVLLM) -> None:
    """With --keep-alive nothing ends, until the command itself is killed."""
    command = serve(*["--keep-alive"] * keep_alive, as_child=True)
    command.until_ready()
    family = [process.pid for process in command.family]
    command.process.kill()
    command.process.wait()
    if keep_alive:
        with pytest.raises(AssertionError):
            until(lambda: not is_running(family[0]), "an end that must not come", seconds=2)
        assert len(fake.running) == 2
        os.kill(family[0], signal.SIGKILL)
    until(lambda: not any(map(is_running, [*family, *fake.running])), "the end of all")


@pytest.mark.slow
def test_restarts_and_their_limit(serve: Start, fake: FakeVLLM) -> None:
    """Two that serve again, and one that does not."""
    command = serve()
    for crash in range(3):
        command.until_ready(starts=crash + 1)
        fake.set_mode("crash" if crash == 2 else "serve")
        os.kill(fake.starts[-1]["pids"][0], signal.SIGKILL)
    assert command.process.wait(60) == 1
    assert fake.running == []
    assert len(fake.starts) == 3
    again = f"vLLM is ready again at {command.url}, with the checkpoint's weights"
    restarts = [f"megatron-fspo: vLLM ended; restart {n}, of at most 3 in 10 min" for n in (1, 2, 3)]
    assert command.said[1:6] == [restarts[0], again, restarts[1], again, restarts[2]]
    assert f"4 times in 10 min; the end of {command.log}:" in command.said[6]
    assert "  RuntimeError: no room for the weights" in command.said[7:]


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
        with pytest.raises(InputError, match=f"--gpus-per-server {count} "):
            assign_gpus(options, gpu_numbers("0-3"), count)
    with pytest.raises(InputError, match="4 servers cannot share one"):
        assign_gpus(ServerOptions(model, log=Path("log")), gpu_numbers("0-3"), 1)


@pytest.mark.slow
def test_several_servers_announce_themselves_and_end_together(
    fake: FakeVLLM, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    port, folder = free_port(2), tmp_path / "servers"
    words = ["--gpus", "4,5", "--port", str(port), "--announce", str(folder)]
    words += ["--host", "0.0.0.0", "--anyone-may-run-code"]
    command = [sys.executable, "-m", "megatron_fspo", "serve", "--model", str(model), *words]
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    urls = sorted(f"http://{socket.gethostname()}:{port + i}" for i in range(2))
    until(lambda: sorted(announced(folder)) == urls, "both")
    assert sorted(start["environ"]["CUDA_VISIBLE_DEVICES"] for start in fake.starts) == ["4", "5"]
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert announced(folder) == [] and not fake.running
    assert all(f"port {port + i} can run code here" in said for i in range(2))
