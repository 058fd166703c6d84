"""Trainer and servers on the same GPUs: who holds memory when, whatever is asked and whatever fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import PARAMS, PROMPTS, Weights, check_all, running, versions
from fake_server import UPDATE, FakeServer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.config import VLLM
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.client.connect import Needs, connect, settle
from megatron_fspo.rollout.client.engine import VLLMEngine

pytestmark = pytest.mark.usefixtures("one_rank", "short_waits")

CAPACITY = 10
"""Weights are 4, on both sides; the trainer's rest and a KV cache are 6."""


class Gpus:
    """Of each server one, which it shares with the trainer's rank; that rank's memory is the same on all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.trainer = {"weights", "rest"}
        self.servers: dict[int, set[str]] = {}
        self.most = 0
        self.phases: list[str] = []
        self.asked: list[list[str]] = []

    def attach(self, fakes: list[FakeServer], *, awake: bool = False) -> None:
        for fake in fakes:
            fake.awake = {"weights", "kv_cache"} if awake else set()
            fake.serving.set() if awake else fake.serving.clear()
            fake.memory = lambda awake, port=fake.port: self._server(port, awake)  # type: ignore[misc]
            self._server(fake.port, fake.awake)

    def _server(self, port: int, awake: set[str]) -> None:
        with self.lock:
            self.servers[port] = set(awake)
            self._count()

    def hold(self, *, weights: bool, rest: bool) -> None:
        with self.lock:
            self.trainer = {name for name, held in (("weights", weights), ("rest", rest)) if held}
            self._count()
        self.phases.append("".join(sorted(self.trainer)) or "nothing")

    def _count(self) -> None:
        mine = 4 * ("weights" in self.trainer) + 6 * ("rest" in self.trainer)
        for awake in self.servers.values():
            self.most = max(self.most, mine + 4 * ("weights" in awake) + 6 * ("kv_cache" in awake))

    @property
    def trains(self) -> bool:
        return self.trainer == {"weights", "rest"} and not any(self.servers.values())


@contextmanager
def sharing(folder: Path, **options: Any) -> Iterator[tuple[Gpus, VLLMEngine, list[FakeServer], Weights]]:
    """An engine whose servers sleep on the trainer's GPUs."""
    gpus = Gpus()
    with running(folder, memory=gpus, **options) as (engine, fakes, weights):
        gpus.attach(fakes)
        yield gpus, engine, fakes, weights


def test_a_step_is_one_round_of_phases(tmp_path: Path) -> None:
    with sharing(tmp_path, tolerance=None) as (gpus, engine, fakes, weights):
        weights.asked = lambda: gpus.asked.append(sorted(gpus.trainer))
        engine.update_weights(1)
        assert gpus.asked == [["weights"]] * 2, "scored and gathered while it has them"
        check_all(engine.submit(PROMPTS, PARAMS)())
        check_all(engine.submit(PROMPTS, PARAMS)())  # such as those of an evaluation
        engine.rest()
        assert gpus.trains
        engine.rest()
        assert gpus.phases == ["weights", "nothing", "restweights"]
        sleep, wake = "/sleep?level=1&mode=keep", "/wake_up"
        for fake in fakes:
            assert fake.updates == [sleep, f"{wake}?tags=weights", *UPDATE[:-1], wake, UPDATE[-1], sleep]
        check_all(engine.submit(PROMPTS, PARAMS)())  # with the weights that they have
        assert gpus.phases[3:] == ["nothing"]
        assert weights.gathered == 1
        assert gpus.most == CAPACITY
        spent = engine.metrics()["rollout/memory_phases_seconds"]
        assert 0 < spent < 10
        assert engine.metrics()["rollout/memory_phases_seconds"] == 0


def test_a_server_that_comes_back_gets_the_weights_in_a_phase_of_their_own(tmp_path: Path) -> None:
    """It comes back awake, with all of its memory, while others sample: all sleep, and what they were asked
    freezes meanwhile."""
    with sharing(tmp_path) as (gpus, engine, fakes, weights):
        engine.update_weights(4)
        for fake in fakes:
            fake.always = "hang"
        pending = engine.submit(PROMPTS, PARAMS)

        def restart() -> None:
            for fake in fakes:
                fake.version, fake.always = "default", "answer"
                fake.kill_from_outside()
            fakes[1].start_from_outside()

        threading.Timer(0.2, restart).start()
        found = pending()
        check_all(found)
        assert versions(found) == {4}
        assert weights.gathered == 2 and engine.metrics()["rollout/servers"] == 1
        assert gpus.phases == ["weights", "nothing"] * 2
        assert gpus.most == CAPACITY
        engine.rest()
        assert gpus.trainer == {"weights", "rest"}


def test_what_is_under_way_at_a_stop_freezes(tmp_path: Path) -> None:
    """A checkpoint is written then, which needs the trainer's memory."""
    with sharing(tmp_path) as (gpus, engine, fakes, _):
        engine.update_weights(1)
        for fake in fakes:
            fake.delay = 0.3
        pending = engine.submit(PROMPTS, PARAMS)
        while not sum(fake.open for fake in fakes):
            time.sleep(0.01)
        engine.rest()
        assert gpus.trains
        time.sleep(0.5)
        assert not [seed for fake in fakes for seed in fake.answered]
        engine.submit(PROMPTS[:1], PARAMS)()
        check_all(pending())


@pytest.mark.parametrize("broken", ["/sleep?level=1&mode=keep", "/is_sleeping"])
def test_a_server_that_keeps_its_memory_stops_the_run(tmp_path: Path, broken: str) -> None:
    with sharing(tmp_path) as (gpus, engine, fakes, _):
        engine.update_weights(1)
        fakes[1].broken = {broken}
        with pytest.raises(TrainingError, match=rf"{fakes[1].url}/.* still holds GPU memory"):
            engine.rest()
        fakes[1].broken, fakes[1].answers = set(), {"/is_sleeping": {"is_sleeping": False}}
        with pytest.raises(TrainingError, match="request to sleep"):
            engine.rest()
        assert gpus.trainer == set(), "it took memory that is not free"


def test_a_server_without_the_route_is_the_users_error(tmp_path: Path) -> None:
    with running(tmp_path, memory=Gpus()) as (engine, fakes, _):
        fakes[0].key = "another"  # any refusal
        with pytest.raises(InputError, match="serve --colocated"):
            engine.update_weights(1)


@pytest.mark.parametrize(
    "failing", ["/wake_up?tags=weights", "/wake_up", "/start_weight_update", "/update_weights", "/resume"]
)
@pytest.mark.parametrize("how", ["broken", "fatal"])
def test_what_fails_in_an_update_costs_a_server_and_no_memory(tmp_path: Path, failing: str, how: str) -> None:
    with sharing(tmp_path) as (gpus, engine, fakes, _):
        setattr(fakes[0], how, {failing})
        engine.update_weights(1)
        found = engine.submit(PROMPTS, PARAMS)()
        check_all(found)
        assert versions(found) == {1}
        engine.rest()
        assert gpus.trains
        assert gpus.most == CAPACITY


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(["update", "sample", "rest", "die", "come back"]), max_size=12))
def test_in_any_order_no_gpu_holds_more_than_a_phase(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    version = 0
    with sharing(tmp_path_factory.mktemp("weights")) as (gpus, engine, fakes, _):
        engine.update_weights(version)
        alive = True
        for call in calls:
            if call == "update":
                engine.rest()
                version += 1
                engine.update_weights(version)
            elif call == "sample":
                found = engine.submit(PROMPTS, PARAMS)()
                check_all(found)
                assert versions(found) == {version}
            elif call == "rest":
                engine.rest()
                assert gpus.trains
            elif call == "die" and alive:
                fakes[0].kill_from_outside()
                fakes[0].awake = set()
                alive = False
            elif call == "come back" and not alive:
                fakes[0].start_from_outside()  # asleep: one that is awake takes memory as it likes
                alive = True
        assert gpus.most <= CAPACITY


@pytest.mark.parametrize("colocated", [True, False])
def test_at_the_start_of_a_job_servers_sleep_or_are_woken(tmp_path: Path, colocated: bool) -> None:
    """Whatever a job before it left them in."""
    with running(tmp_path, count=3) as (_, fakes, _weights):
        gpus = Gpus()
        gpus.attach(fakes[:1], awake=False)
        gpus.attach(fakes[1:], awake=True)
        fakes[2].kill_from_outside()
        leader = connect(VLLM(urls=tuple(fake.url for fake in fakes)), 50)
        try:
            leader.loop.run(settle(leader, Needs(), colocated=colocated))
        finally:
            leader.loop.run(leader.http.aclose())
            leader.loop.close()
        assert [len(fake.awake) for fake in fakes[:2]] == ([0, 0] if colocated else [2, 2])
        assert [fake.serving.is_set() for fake in fakes[:2]] == [not colocated] * 2
