"""Training runs, tensor parallel over two ranks."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch import why
from metrics_page import unknown
from runs import rows, run
from serving import Served, serving, without_repack

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLOAT32 = ("--dtype", "float32")


def words(checkpoint: Path, servers: list[Served], steps: int, *more: str) -> list[str]:
    text = f"--model.checkpoint {checkpoint} --rollout.engine vllm --run.steps {steps}"
    # Hardly any response is right: the entropy bonus moves the weights.
    short = (
        "--rollout.max-response-tokens 24 --checkpoint.every 0 --evaluation.every 0 --loss.entropy-coef 0.1"
    )
    # vLLM's threads spin: on two cores a rank was seen to get no time for 40 s.
    short += " --reward.max-steps-without-spread 0 --parallel.silence-seconds 300"
    urls = ["--vllm.urls", str([server.url for server in servers])]
    return [*text.split(), *urls, *short.split(), *more]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "run") if row["step"] > 0]


def check_updates(found: list[dict[str, Any]], count: int) -> None:
    assert [row["training/weight_version"] for row in found] == list(range(1, count + 1))
    assert all(0 < row["rollout/canary_abs_diff_max"] <= 1e-4 for row in found)
    assert all(row["rollout/logprob_abs_diff/mean"] <= 1e-4 for row in found)
    assert all(row["actor/grad_norm"] > 0 for row in found)
    assert unknown({name for row in found for name in row}) == []


def test_eight_updates_of_two_servers_by_gloo(checkpoint: Path, pair: list[Served], tmp_path: Path) -> None:
    before = [server.answered for server in pair]
    done = run(tmp_path, "run", *words(checkpoint, pair, 8))
    assert done.returncode == 0, why(done.stderr)
    check_updates(steps(tmp_path), 8)
    assert all(row["rollout/servers"] == 2 for row in steps(tmp_path))
    assert all(server.answered > count + 40 for server, count in zip(pair, before, strict=True))


def test_eight_updates_by_disk_in_turns(checkpoint: Path, tmp_path: Path) -> None:
    """Colocated: the ranks lend their memory while the server samples, and it sleeps while they train, save
    and export. Here only that of the ranks moves."""
    with serving(checkpoint, tmp_path, *FLOAT32, "--backend", "disk", "--colocated") as servers:
        more = ("--vllm.transfer", "disk", "--vllm.folder", str(tmp_path / "weights"))
        more += ("--vllm.colocated", "true", "--evaluation.every", "3", "--checkpoint.every", "4")
        done = run(tmp_path, "run", *words(checkpoint, servers, 8, *more, "--rollout.temperature", "0.7"))
        assert done.returncode == 0, why(done.stderr)
        asleep = servers[0].routes.ask("/is_sleeping")
    check_updates(steps(tmp_path), 8)
    assert asleep == (200, {"is_sleeping": True}), "the last to take memory was the export"
    assert all(0 < row["rollout/turns_seconds"] < 30 for row in steps(tmp_path))
    evaluated = [row["step"] for row in rows(tmp_path, "run") if any("mean@" in name for name in row)]
    assert evaluated == [0, 3, 6, 8]
    assert not [path for path in (tmp_path / "weights").glob("*")]


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
    done = run(tmp_path, "run", *words(checkpoint, [server], 3, *more))
    killer.join()
    assert done.returncode == 0, why(done.stderr)
    assert server.starts == starts + 1
    found = rows(tmp_path, "run")
    assert [row["training/weight_version"] for row in found] == [1, 2, 3]
    assert all(row["rollout/canary_abs_diff_max"] <= 1e-4 for row in found)
    # A response of older weights, or of the checkpoint the server was started with, would show here.
    assert all(row["rollout/logprob_abs_diff/max"] <= 1e-3 for row in found)
    # Of 32 prompts, 4 each; the first of four mini-batches is on policy and not in the file.
    assert {len(row["length"]) for row in rows(tmp_path, "run", "sequences.jsonl")} == {3 * 32}


def test_a_head_that_stays_behind_stops_the_run(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM on a CPU packs the head of a tied model once and for all, were it not for our plugin."""
    flags = ("--vllm", without_repack(tmp_path), *FLOAT32)
    with serving(checkpoint, tmp_path, *flags) as servers:
        done = run(tmp_path, "run", *words(checkpoint, servers, 3))
        version = servers[0].routes.version
    assert done.returncode != 0
    # The update to version 0 brings what the server was started with: nothing is wrong yet.
    assert version == "1"
    lines = done.stderr.splitlines()
    (first,) = {n for n, line in enumerate(lines) if "does not have the trainer's weights" in line}
    assert lines[first].startswith(
        f"megatron-fspo: {servers[0].url} does not have the trainer's weights after "
    )
    assert "after the update to version 1: 1 of " in lines[first]
    assert lines[first + 1].startswith("  model.embed_tokens.weight (packed): ")
    assert [row["step"] for row in rows(tmp_path, "run")] in ([], [0]), "no step of which it is not known"


def test_ahead_of_training_no_token_is_older_than_allowed(
    checkpoint: Path, pair: list[Served], tmp_path: Path
) -> None:
    """Sampling that takes longer than training is met half-way by about every second update."""
    more = (
        "--rollout.max-staleness 1 --rollout.max-response-tokens 60 --vllm.in-flight 1 --rollout.samples 12"
    )
    more += " --batch.mini-batches 1 --loss.calibrate 0"
    done = run(tmp_path, "run", *words(checkpoint, pair[:1], 12, *more.split()))
    assert done.returncode == 0, why(done.stderr)
    found = steps(tmp_path)
    assert [row["training/weight_version"] for row in found] == [*range(1, 13)]
    # Batches are asked for while earlier steps train. On a loaded machine an update may overtake one of them.
    ages = [row["rollout/staleness/max"] for row in found]
    assert ages[0] == 0 and max(ages) == 1, ages
    assert all(0 <= row["rollout/staleness/mean"] <= 1 for row in found)
    assert any(row["rollout/partial"] > 0 for row in found), "no update met a response half-way"
    assert all(row["rollout/canary_abs_diff_max"] <= 1e-4 for row in found)
    # Fresh responses agree with the trainer; older ones differ by what was learned since.
    assert found[0]["rollout/logprob_abs_diff/max"] <= 1e-3
    assert all(row["actor/grad_norm"] > 0 for row in found)
