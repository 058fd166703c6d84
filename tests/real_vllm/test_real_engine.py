"""Updates of two servers: that responses meet, in which one stands still, and of which the trainer ends."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_job import TIMEOUT, Job
from fake_vllm import until
from megatron_fspo.rollout.client import memory_phases
from megatron_fspo.rollout.client import send_weights as client_weights
from megatron_fspo.rollout.client.send_weights import in_buckets
from megatron_fspo.types import SamplingParams
from real_server import FAR, TOLERANCE, scores, send, weights
from serving import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STANDSTILL = 12  # seconds


@pytest.mark.usefixtures("rank")
def test_one_stands_still_in_the_middle_of_an_update(
    pair: list[Served], checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the sender waits. The other goes on, and both have the new weights in the end."""
    goes_on, stops = pair
    old, new = checkpoints
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=2**15))
    job, short = Job(pair, new), SamplingParams(n=4, max_tokens=20, seed=3)
    job.engine.update_weights(1)
    assert len(job.live) == 2
    core = stops.engine
    left = iter(range(10))
    stopped = []

    def stop() -> None:
        if next(left, None) is None and not stopped:
            core.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())
            threading.Timer(STANDSTILL, core.send_signal, (signal.SIGCONT,)).start()

    job.checkpoint, job.on_tensor = old, stop
    job.engine.update_weights(2)
    took = time.monotonic() - stopped[0]
    assert took > TIMEOUT, "no standstill, no test"
    assert goes_on.url in job.live
    until(lambda: time.monotonic() - stopped[0] > STANDSTILL + 1, "the end of the standstill")
    rows = job.generate(short)
    assert {completion.weight_version for _, row in rows for completion in row} == {2}
    until(lambda: job.generate(short) and len(job.live) == 2, "the way back", seconds=120)
    for server in pair:
        assert server.routes.distance(old) < TOLERANCE < FAR < server.routes.distance(new)
        assert server.routes.version == "2"
    job.engine.close()


@pytest.mark.usefixtures("rank")
def test_responses_go_on_after_updates_and_a_sleep(pair: list[Served], checkpoints: list[Path]) -> None:
    """Every token has the log-prob that its version gives it after the whole of what came before: also the
    cache of what the old weights had read is new. No memory moves in the sleep: vLLM on a CPU has the routes,
    and its engine obeys, but its workers ignore them."""
    job = Job(pair, checkpoints[0])
    of_version = {20 + i: checkpoints[i % 2] for i in range(4)}

    def update(version: int) -> None:
        job.checkpoint = of_version[version]
        job.engine.update_weights(version)

    def sampled() -> list[float]:
        return [server.count("generation_tokens") for server in pair]

    def meanwhile() -> None:
        before = sampled()
        until(lambda: all(now > old + 20 for now, old in zip(sampled(), before, strict=True)), "some tokens")
        for version in (21, 22, 23):
            update(version)
        job.loop.run(memory_phases.sleep(job.pool.live()))
        assert all(server.routes.ask("/is_sleeping") == (200, {"is_sleeping": True}) for server in pair)
        asleep = sampled()
        time.sleep(1.0)
        assert sampled() == asleep, "it sampled in its sleep"
        job.loop.run(memory_phases.wake(job.pool.live()))

    update(20)
    group = job.sender._group
    # So many that no update comes too late, however slowly a busy server tells its metrics; and of different
    # lengths: else all that a server has at once would end together, and an update could fall between them.
    rows = job.generate(SamplingParams(n=20, max_tokens=120, seed=3, stop_token_ids=(5,)), meanwhile)
    completions = [completion for _, row in rows for completion in row]
    assert len({len(completion.token_ids) for completion in completions}) > 10
    assert any(len(completion.version_spans) > 1 for completion in completions), "some were met half-way"
    for prompt, row in rows:
        for completion in row:
            told, ids = torch.tensor(completion.log_probs), (*prompt.token_ids, *completion.token_ids)
            for span in completion.version_spans:
                error = told - scores(of_version[span.version], ids)[-len(told) :]
                assert error[span.start : span.end].abs().max() < TOLERANCE
    assert job.sender._group is group, "one for all updates"
    job.engine.close()


@pytest.mark.usefixtures("rank")
def test_updates_of_what_changed(pair: list[Served], checkpoints: list[Path], tmp_path: Path) -> None:
    old, new = checkpoints[0], tmp_path / "new"
    moved = weights(old)
    for name in ("model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        moved[name].view(-1)[::7] *= 3.0
    shutil.copytree(old, new)
    save_file(moved, new / "model.safetensors", {"format": "pt"})
    whole, job = sum(tensor.nbytes for tensor in moved.values()), Job(pair, old, delta=True)
    sent = []
    for version, job.checkpoint in enumerate([old, new, new, old], start=1):
        job.engine.update_weights(version)
        metrics = job.engine.metrics()
        assert metrics["rollout/weights_proven"] == 1 and metrics["rollout/servers"] == 2
        sent.append(metrics["rollout/sent_bytes"])
        other = old if job.checkpoint == new else new
        for server in pair:
            assert server.routes.distance(job.checkpoint) < TOLERANCE < FAR < server.routes.distance(other)
    assert sent[0] == whole and sent[2] == 0
    assert 0 < sent[1] < whole / 10 and 0 < sent[3] < whole / 10
    job.engine.close()


def test_a_trainer_that_ends_in_the_middle_of_an_update_leaves_no_half_of_it(
    pair: list[Served], checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers nobody until the next trainer has sent a whole one."""
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=2**15))
    routes, (old, new) = pair[0].routes, checkpoints
    assert send(routes.url, weights(old).items(), 5) is None

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights(new).items())[:12]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send(routes.url, interrupted(), 7)
    assert routes.ask("/is_paused") == (200, {"is_paused": True})
    assert routes.version == "5"

    assert send(routes.url, weights(new).items(), 6) is None
    assert routes.distance(new) < TOLERANCE < FAR < routes.distance(old)
    assert routes.version == "6"
