"""Weight updates and pending batches against servers that answer like vLLM, and fail on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import PARAMS, PROMPTS, check_all, running, versions
from fake_server import KEY, MAX_TOKENS, UPDATE

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.parallel.control import Control
from megatron_fspo.rollout.checksum import checksum
from megatron_fspo.rollout.client.proof import WrongWeights
from megatron_fspo.types import Completion, VersionSpan

pytestmark = pytest.mark.usefixtures("one_rank", "short_waits")


def test_every_server_is_updated_and_proven(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, fakes, weights):
        engine.update_weights(3)
        found = engine.submit(PROMPTS, PARAMS)()
        check_all(found)
        assert versions(found) == {3}
        assert all(fake.arrived for fake in fakes)
        for fake in fakes:
            assert fake.updates == [*UPDATE]
        assert weights.gathered == 1
        assert engine.metrics() == {
            "rollout/canary_abs_diff": 0.0,
            "rollout/weights_proven": 1.0,
            "rollout/canary_tolerance": 1e-4,
            "rollout/sent_bytes": 8.0,
            "rollout/servers": 2.0,
        }
        assert not list(tmp_path.iterdir())


def test_every_route_gets_the_key_and_a_wrong_one_is_the_users_error(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, fakes, _):
        for fake in fakes:
            fake.key = KEY
        engine.update_weights(3)
        check_all(engine.submit(PROMPTS, PARAMS)())
        assert all(f"Bearer {KEY}" in head for fake in fakes for head in fake.headers)
        for fake in fakes:
            fake.key = "another"
        with pytest.raises(InputError, match=r"/pause: refused with 401") as raised:
            engine.update_weights(4)
        assert KEY not in str(raised.value)


@pytest.mark.parametrize("route", UPDATE)
def test_a_server_that_dies_or_cannot_be_updated_is_done_without(tmp_path: Path, route: str) -> None:
    with running(tmp_path, count=3) as (engine, fakes, weights):
        fakes[0].fatal = {route}
        engine.update_weights(1)
        assert weights.gathered == 2  # all, then the others together
        assert engine.metrics()["rollout/servers"] == 2
        assert versions(engine.submit(PROMPTS, PARAMS)()) == {1}
        fakes[1].broken = {route}
        engine.update_weights(2)
        assert weights.gathered == 2 + 3  # both, then one by one
        asked = len(fakes[1].arrived)
        found = engine.submit(PROMPTS, PARAMS)()
        check_all(found)
        assert versions(found) == {2}
        assert len(fakes[1].arrived) == asked
        fakes[1].broken = set()
        engine.update_weights(3)
        assert versions(engine.submit(PROMPTS, PARAMS)()) == {3}
        assert engine.metrics()["rollout/servers"] == 2


def test_a_server_whose_cache_keeps_old_weights_is_not_served(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, fakes, _):
        fakes[0].answers = {UPDATE[-2]: {"success": False}}  # with status 200
        engine.update_weights(1)
        assert engine.metrics()["rollout/servers"] == 1


def test_no_server_takes_the_weights(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, fakes, _):
        for fake in fakes:
            fake.broken = {"/update_weights"}
        with pytest.raises(TrainingError, match=r"version 7 failed 3 times: .*500: broken"):
            engine.update_weights(7)


def test_a_server_one_bf16_step_behind_in_one_tensor_is_refused(tmp_path: Path) -> None:
    """At every update. The canary would not see it: an update at lr 1e-5 moves it by 0.22 nats of 0.25."""
    with running(tmp_path, tolerance=None, dtype=torch.bfloat16) as (engine, fakes, weights):
        weights.w = torch.linspace(-1, 1, 2**16).bfloat16()
        engine.update_weights(1)
        weights.w = weights.w.clone()
        weights.w[7] = torch.nextafter(weights.w[7], torch.tensor(9.0).bfloat16())
        fakes[1].keeps = {"w"}
        fakes[1].score -= 0.22
        with pytest.raises(WrongWeights, match=rf"{fakes[1].url} does not have .* version 2: 1 of 1 tensors"):
            engine.update_weights(2)
        assert not fakes[1].serving.is_set(), "it serves"


def tells(name: str) -> dict[str, object]:
    """What a server answers that has the tensor under this name."""
    return {"/collective_rpc": {"results": [{name: checksum(torch.ones(2)).to_words()}]}}


@pytest.mark.parametrize(("rounding", "tolerance"), [(0.0, 1e-4), (4e-5, 3.2e-4), (5e-4, 4e-3), (5e-3, 1e-2)])
def test_the_tolerance_is_of_the_model(tmp_path: Path, rounding: float, tolerance: float) -> None:
    with running(tmp_path, tolerance=None) as (engine, fakes, _):
        fakes[1].score = -1 - rounding
        engine.update_weights(0)
        metrics = engine.metrics()
        assert metrics["rollout/canary_abs_diff"] == pytest.approx(rounding, rel=1e-2)
        assert metrics["rollout/canary_tolerance"] == pytest.approx(tolerance, rel=1e-2)
        fakes[0].score = -1 - 0.9 * tolerance
        engine.update_weights(1)
        assert engine.metrics()["rollout/canary_tolerance"] == metrics["rollout/canary_tolerance"]
        fakes[0].score = -1 - 1.1 * tolerance
        with pytest.raises(WrongWeights, match=f"; {metrics['rollout/canary_tolerance']:.3g} is allowed"):
            engine.update_weights(2)


def test_the_mean_is_judged_not_the_largest(tmp_path: Path) -> None:
    """Sound servers in bfloat16 are far off at single tokens."""
    with running(tmp_path, tolerance=None) as (engine, fakes, _):
        fakes[0].last = -1.5e-4
        engine.update_weights(0)
        assert 0 < engine.metrics()["rollout/canary_abs_diff"] <= 1e-4


@pytest.mark.parametrize(
    ("difference", "answers", "passes"),
    [
        (2e-2, tells("w"), False),
        (2e-4, tells("w"), True),
        (2e-4, tells("v"), False),
        (2e-4, {"/collective_rpc": {}}, False),
        (2e-4, {"/collective_rpc": {"results": []}}, False),
        (9e-5, {"/collective_rpc": {}}, True),
    ],
)
def test_what_is_not_known_to_be_equal_gets_no_more_than_any_model(
    tmp_path: Path, difference: float, answers: dict[str, object], passes: bool
) -> None:
    with running(tmp_path, tolerance=None) as (engine, fakes, _):
        for fake in fakes:
            fake.answers = answers
            fake.score = -1 - difference
        if passes:
            engine.update_weights(0)
            assert engine.metrics()["rollout/weights_proven"] == (answers == tells("w"))
        else:
            with pytest.raises(WrongWeights, match="is allowed"):
                engine.update_weights(0)


def test_nobody_to_update_and_nobody_comes(tmp_path: Path) -> None:
    with running(tmp_path) as (engine, fakes, weights):
        for fake in fakes:
            fake.kill_from_outside()
        engine.leader.pool.recovery_seconds = 0.2
        engine.update_weights(1)
        assert weights.gathered == 0
        with pytest.raises(TrainingError, match=r"no rollout server for 0\.2 s: .*ConnectError"):
            engine.submit(PROMPTS, PARAMS)()


@pytest.mark.parametrize("failing", ["", *UPDATE])
def test_responses_go_on_over_an_update_also_where_it_is_tried_again(tmp_path: Path, failing: str) -> None:
    with running(tmp_path, count=1) as (engine, (fake,), _):
        engine.update_weights(1)
        fake.once = failing
        fake.serving.clear()  # the responses freeze after their first token
        asked = len(fake.arrived)
        pending = engine.submit(PROMPTS, PARAMS)
        while len(fake.arrived) < asked + 8:  # as many as the pool keeps open
            time.sleep(0.01)
        engine.update_weights(2)
        done: list[int] = []
        found = pending(done.append)
        check_all(found)
        assert sum(done) == 12
        met = (VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=MAX_TOKENS))
        after = (VersionSpan(version=2, start=0, end=MAX_TOKENS),)
        assert [c.version_spans for row in found for c in row] == [met] * 8 + [after] * 4
        assert versions(found) == {1, 2}
        assert engine.metrics()["rollout/servers"] == 1.0


def test_a_later_batch_may_be_collected_first(tmp_path: Path) -> None:
    """As the further rounds of a step are, with batches of later steps pending."""
    with running(tmp_path) as (engine, fakes, _):
        for fake in fakes:
            fake.delay = 0.02
        engine.update_weights(1)
        earlier = engine.submit(PROMPTS, PARAMS)
        check_all(engine.submit(PROMPTS, PARAMS)())
        engine.update_weights(2)
        check_all(earlier())


@pytest.mark.parametrize("looks_late", [True, False])
def test_each_completion_is_told_when_it_is_done(tmp_path: Path, looks_late: bool) -> None:
    """Progress from when anyone waits for the batch; the completions also before."""
    with running(tmp_path) as (engine, fakes, _):
        for fake in fakes:
            fake.delay = 0.0 if looks_late else 0.6
        arrived: dict[int, Completion] = {}
        pending = engine.submit(PROMPTS, PARAMS, None, arrived.__setitem__)
        while looks_late and len(arrived) < 12:
            time.sleep(0.1)
        done: list[int] = []
        rows = pending(done.append)
        check_all(rows)
        assert done == [12] if looks_late else sum(done) == 12 and min(done) > 0
        assert [arrived[number] for number in range(12)] == [c for row in rows for c in row]


def test_an_update_readmits_a_server_that_waits_for_one(tmp_path: Path) -> None:
    """It came back while the trainer was busy: nobody was there to give it weights."""
    with running(tmp_path) as (engine, fakes, weights):
        engine.update_weights(1)
        fakes[0].script.extend(["close"] * 8)
        pending = engine.submit(PROMPTS, PARAMS)
        time.sleep(0.5)
        assert engine.metrics()["rollout/servers"] == 1
        engine.update_weights(2)
        assert engine.metrics()["rollout/servers"] == 2
        check_all(pending())
        assert weights.gathered == 2  # not once more for the one that waited
        assert versions(engine.submit(PROMPTS, PARAMS)()) == {2}


class Recorded(Control):
    """What the first rank says to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.heard: Callable[[], object] = lambda: None

    def broadcast(self, message: str) -> None:
        self.said.append(message)
        self.heard()

    def fail(self, error: BaseException) -> None:
        self.said.append(type(error).__name__)


def test_what_the_other_ranks_hear(tmp_path: Path) -> None:
    """They gather when the servers are ready: they would wait in a collective for one that takes its time."""
    control = Recorded()
    with running(tmp_path, control=control) as (engine, fakes, _):
        fakes[0].score = -3.0
        with pytest.raises(WrongWeights, match=rf"{fakes[0].url} does not have .* version 1: .* 2 nats"):
            engine.update_weights(1)
        assert control.said == ["score", "tensors", "WrongWeights"]
        fakes[0].score = -1.0
        fakes[0].updates.clear()
        asked: list[int] = []
        control.heard = lambda: asked.append(len(fakes[0].updates))
        engine.update_weights(2)
        assert control.said[3:] == ["score", "tensors", "done"]
        assert asked == [0, UPDATE.index("/update_weights"), len(UPDATE)]
        engine.submit(PROMPTS, PARAMS)()
        fakes[0].always = fakes[1].always = "garbage"
        with pytest.raises(TrainingError, match="0 choices"):
            engine.submit(PROMPTS, PARAMS)()
        assert control.said[6:] == ["done", "BadAnswer"]
