"""Training runs, tensor parallel over two ranks; and updates by disk that fail."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from launch import why
from metrics_page import unknown
from real_server import FAR, TOLERANCE, Routes, weights
from runs import rows, run, trained
from serving import Served, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def disk(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that takes weights from files, and gives up its memory."""
    flags = ("--dtype", "float32", "--backend", "disk", "--colocated")
    with serving(checkpoint, tmp_path_factory.mktemp("disk"), *flags) as (server,):
        yield server


def words(checkpoint: Path, server: Served, steps: int, *more: str) -> list[str]:
    text = f"--model.checkpoint {checkpoint} --rollout.engine vllm --run.steps {steps}"
    # Hardly any response is right: the entropy bonus moves the weights.
    short = (
        "--rollout.max-response-tokens 24 --checkpoint.every 0 --evaluation.every 0 --loss.entropy-coef 0.1"
    )
    # vLLM's threads spin: on two cores a rank was seen to get no time for 40 s.
    short += " --reward.max-zero-variance-steps 0 --parallel.silence-seconds 300"
    return [*text.split(), "--vllm.urls", str([server.url]), *short.split(), *more]


def steps(folder: Path, count: int) -> list[dict[str, Any]]:
    """The rows of the steps, each with proven weights of its own."""
    logged = [row for row in rows(folder, "run") if row["step"] > 0]
    assert [row["training/weight_version"] for row in logged] == list(range(1, count + 1))
    assert all(0 < row["rollout/canary_abs_diff"] <= TOLERANCE for row in logged)
    assert all(row["rollout/weights_proven"] == 1 and row["actor/grad_norm"] > 0 for row in logged)
    assert unknown({name for row in logged for name in row}) == []
    return logged


def update_by_disk(routes: Routes, version: str, *paths: Path) -> int:
    """Status of the update."""
    routes.do("/start_weight_update", {})
    status, _ = routes.ask("/update_weights", {"update_info": {"paths": list(map(str, paths))}})
    if status == 200:
        routes.do("/finish_weight_update", {"weight_version": version})
    return status


def test_a_failed_update_leaves_whole_layers(
    disk: Served, checkpoint: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
    """Of the fused query, key and value one arrives: the layer keeps what it had."""
    routes = disk.routes
    routes.do("/init_weight_transfer_engine", {"init_info": {}})
    assert routes.distance(checkpoint) < TOLERANCE and routes.version == "default"
    old, new = checkpoints
    assert update_by_disk(routes, "v1", new / "model.safetensors") == 200
    assert routes.distance(new) < TOLERANCE < FAR < routes.distance(old)
    assert routes.proof(new)[0] is True and routes.proof(old)[0] is False

    query = "model.layers.0.self_attn.q_proj.weight"
    save_file({query: weights(old)[query]}, tmp_path / "query.safetensors")
    assert update_by_disk(routes, "v2", tmp_path / "query.safetensors", tmp_path / "none.safetensors") == 500
    assert routes.distance(new) < TOLERANCE and routes.version == "v1"

    rounded = {name: tensor.bfloat16() for name, tensor in weights(old).items()}
    save_file(rounded, tmp_path / "rounded.safetensors")
    assert update_by_disk(routes, "v3", tmp_path / "rounded.safetensors") == 200
    assert TOLERANCE < routes.distance(old) < FAR and routes.version == "v3"


def test_updates_by_disk_on_shared_gpus(checkpoint: Path, disk: Served, tmp_path: Path) -> None:
    """Colocated: the ranks lend their memory while the server samples, and it sleeps while they train, save
    and export. Here only that of the ranks moves."""
    folder = tmp_path / "weights"
    more = f"--vllm.transfer disk --vllm.folder {folder} --vllm.colocated true --rollout.temperature 0.7"
    more += " --evaluation.every 2 --checkpoint.every 2"
    trained(tmp_path, "run", *words(checkpoint, disk, 4, *more.split()), DRAW_REPORT="1")
    asleep = disk.routes.ask("/is_sleeping")
    assert asleep == (200, {"is_sleeping": True}), "the last to take memory was the export"
    for row in steps(tmp_path, 4):
        assert row["rollout/logprob_abs_diff/mean"] <= 1e-4
        assert 0 < row["rollout/memory_phases_seconds"] < 30
    evaluated = [row["step"] for row in rows(tmp_path, "run") if any("mean@" in name for name in row)]
    assert evaluated == [0, 2, 4]
    assert not list(folder.iterdir())


@pytest.mark.long
def test_a_server_killed_in_the_middle_comes_back_with_current_weights(
    checkpoint: Path, pair: list[Served], tmp_path: Path
) -> None:
    """The only one: the run waits for it."""
    server = pair[0]
    starts = server.starts

    def kill() -> None:
        while not rows(tmp_path, "run"):
            time.sleep(0.05)
        server.engine.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    more = ("--rollout.prompts", "32", "--rollout.max-response-tokens", "100")
    done = run(tmp_path, "run", *words(checkpoint, server, 3, *more))
    killer.join()
    assert done.returncode == 0, why(done.stderr)
    assert server.starts == starts + 1
    # A response of older weights, or of the checkpoint the server was started with, would show here.
    assert all(row["rollout/logprob_abs_diff/max"] <= 1e-3 for row in steps(tmp_path, 3))
    # Of 32 prompts, 4 each; the first of four mini-batches is on policy and not in the file.
    assert {len(row["length"]) for row in rows(tmp_path, "run", "sequences.jsonl")} == {3 * 32}


@pytest.mark.long
def test_ahead_of_training_no_token_is_older_than_allowed(
    checkpoint: Path, pair: list[Served], tmp_path: Path
) -> None:
    """Sampling that takes longer than training is met half-way by about every second update."""
    more = (
        "--rollout.max-staleness 1 --rollout.max-response-tokens 60 --vllm.in-flight 1 --rollout.samples 12"
    )
    more += " --batch.mini-batches 1 --loss.calibrate 0"
    trained(tmp_path, "run", *words(checkpoint, pair[0], 8, *more.split()))
    logged = steps(tmp_path, 8)
    # Batches are asked for while earlier steps train. On a loaded machine an update may overtake one of them.
    ages = [row["rollout/staleness/max"] for row in logged]
    assert ages[0] == 0 and max(ages) == 1, ages
    assert all(0 <= row["rollout/staleness/mean"] <= 1 for row in logged)
    assert any(row["rollout/partial"] > 0 for row in logged), "no update met a response half-way"
    # Fresh responses agree with the trainer; older ones differ by what was learned since.
    assert logged[0]["rollout/logprob_abs_diff/max"] <= 1e-3
