"""Servers that crash, hang, lie and come back: every request is answered once, or the caller is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_server import PARAMS, VOCAB_SIZE, FakeServer, check_all, requests, run, with_servers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.client.answers import BadAnswer
from megatron_fspo.rollout.client.pool import MAX_DISCONNECTS, CompletionRequest, Pool
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.sampling import stream_seed
from megatron_fspo.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("short_waits")


async def refuse(server: Server) -> bool:
    return False


@with_servers(count=3)
async def test_order_counts_and_limits(pool: Pool, fakes: list[FakeServer]) -> None:
    for fake in fakes:
        fake.delay = 0.002
    arrived: dict[int, Completion] = {}
    completions = await pool.generate(requests(60), arrived.__setitem__)
    check_all(completions, 60)
    assert [arrived[number] for number in range(60)] == completions and len(arrived) == 60
    assert sorted(seed for fake in fakes for seed in fake.arrived) == list(range(60))
    assert [fake.most_open for fake in fakes] == [4, 4, 4]


@with_servers()
async def test_the_least_loaded_server_is_first(pool: Pool, fakes: list[FakeServer]) -> None:
    for fake in fakes:
        fake.delay = 0.05
    await pool.generate(requests(5))
    assert sorted(len(fake.arrived) for fake in fakes) == [2, 3]
    # A slow server gets less, because its requests stay open.
    fakes[0].delay, fakes[1].delay = 0.5, 0.001
    await pool.generate(requests(60))
    assert len(fakes[0].arrived) * 3 < len(fakes[1].arrived)


@pytest.mark.parametrize("failure", ["close", "drop", 500, "hang", "die"])
@with_servers(request_seconds=0.3, attempts=2)
async def test_the_work_of_a_lost_server_goes_to_the_other(
    pool: Pool, fakes: list[FakeServer], failure: str | int
) -> None:
    fakes[0].script.extend(["answer"] * 5)
    fakes[0].always, fakes[0].healthy = failure, False
    calls: list[int] = []
    check_all(await pool.generate(requests(40), lambda number, _: calls.append(number)), 40)
    assert sorted(calls) == list(range(40))
    assert [server.url for server in pool.live()] == [fakes[1].url]
    arrived = len(fakes[0].arrived)
    check_all(await pool.generate(requests(10)), 10)  # and it stays out in the next batch
    assert len(fakes[0].arrived) == arrived


@with_servers(attempts=1, recovery_seconds=0.2)
async def test_nobody_comes_back(
    pool: Pool, fakes: list[FakeServer], capfd: pytest.CaptureFixture[str]
) -> None:
    for fake in fakes:
        fake.kill()
    with pytest.raises(TrainingError, match=r"no rollout server for 0\.2 s: http.*ConnectError.*; http"):
        await pool.generate(requests(3))
    await fakes[0].start()
    check_all(await pool.generate(requests(3)), 3)  # the next batch waits anew
    assert capfd.readouterr().err.count("no vLLM server is available: http") == 2
    assert await pool.generate([]) == []


@with_servers(count=1, attempts=1, max_in_flight_per_server=1)
async def test_a_server_is_admitted_before_it_serves_again(pool: Pool, fakes: list[FakeServer]) -> None:
    (fake,) = fakes
    fake.script.extend(["answer", "close"])
    asked: list[int] = []

    async def admit(server: Server) -> bool:
        assert server.url == fake.url
        asked.append(len(fake.arrived))
        if len(asked) == 2:
            raise ServerLost("gone again")
        await asyncio.sleep(0.02)
        return len(asked) > 3

    pool.admit = admit
    check_all(await pool.generate(requests(6)), 6)
    assert len(asked) == 4
    assert len(set(asked)) == 1  # nothing was sent before it was admitted


@with_servers(count=1, attempts=1, max_in_flight_per_server=2, request_seconds=0.3)
async def test_a_failure_from_before_the_admission_is_old_news(pool: Pool, fakes: list[FakeServer]) -> None:
    asked: list[Server] = []

    async def admit(server: Server) -> bool:
        asked.append(server)
        return True

    pool.admit = admit
    fakes[0].script.extend(["hang", "close"])
    check_all(await pool.generate(requests(4)), 4)
    assert len(asked) == 1


@with_servers(count=1, max_in_flight_per_server=1)
async def test_a_place_that_a_cancelled_request_was_given_goes_to_the_next(
    pool: Pool, fakes: list[FakeServer]
) -> None:
    (server,) = pool.live()
    found = await pool.generate(requests(1))
    for moments in range(10):  # in one of them the place is given and not yet taken
        answer = asyncio.Event()

        async def generate(*_: Any, answer: asyncio.Event = answer, **__: Any) -> Completion:
            await answer.wait()
            return found[0]

        server.generate = generate
        ended = asyncio.create_task(pool.generate(requests(2)))
        await asyncio.sleep(0.001)
        other = asyncio.create_task(pool.generate(requests(1)))
        await asyncio.sleep(0.001)
        answer.set()
        for _ in range(moments):
            await asyncio.sleep(0)
        ended.cancel()
        assert await other == found
        await asyncio.wait([ended])


@with_servers(attempts=1)
async def test_a_refused_server_stays_out(pool: Pool, fakes: list[FakeServer]) -> None:
    pool.admit = refuse
    fakes[0].script.append("close")
    fakes[1].delay = 0.01
    check_all(await pool.generate(requests(40)), 40)
    assert [server.url for server in pool.live()] == [fakes[1].url]


@with_servers(attempts=1)
async def test_an_error_of_an_admission_ends_the_batch(pool: Pool, fakes: list[FakeServer]) -> None:
    async def admit(server: Server) -> bool:
        raise TrainingError("other weights than the trainer's")

    pool.admit = admit
    fakes[0].always, fakes[1].always = "close", "hang"
    with pytest.raises(TrainingError, match="other weights"):
        await pool.generate(requests(8))


@with_servers(attempts=1)
async def test_an_admission_that_outlasts_the_batch_is_dropped(pool: Pool, fakes: list[FakeServer]) -> None:
    under_way = []

    async def admit(server: Server) -> bool:
        under_way.append(asyncio.get_running_loop().create_future())
        return await under_way[-1]

    pool.admit = admit
    fakes[0].script.append("close")
    fakes[1].delay = 0.02
    check_all(await pool.generate(requests(20)), 20)
    await asyncio.sleep(0)
    (admitted,) = under_way
    assert admitted.cancelled()
    assert len(pool.live()) == 1
    await pool.serve(await pool.reachable())  # an update meanwhile reached it
    assert len(pool.live()) == 2


@with_servers()
async def test_what_a_server_without_the_new_weights_holds_is_asked_again(
    pool: Pool, fakes: list[FakeServer]
) -> None:
    """It is paused in the middle of an update, and would never answer."""
    fakes[0].always = "hang"

    pool.admit = refuse
    batch = asyncio.create_task(pool.generate(requests(20)))
    while len(fakes[0].arrived) < 4 or len(fakes[1].arrived) < 16:
        await asyncio.sleep(0.01)
    assert not batch.done()
    await pool.serve([server for server in pool.live() if server.url == fakes[1].url])
    check_all(await batch, 20)


@with_servers()
async def test_a_server_with_old_weights_is_lost(pool: Pool, fakes: list[FakeServer]) -> None:
    """It was killed and restarted while nothing was open, so nobody saw it go."""
    fakes[0].version = "7"

    async def admit(server: Server) -> bool:
        fakes[1].version = "7"
        return True

    pool.admit = admit
    completions = await pool.generate(requests(30), oldest_version=7)
    check_all(completions, 30)
    assert {completion.weight_version for completion in completions} == {7}


@with_servers(attempts=1)
async def test_a_request_that_kills_every_server_stops_the_run(pool: Pool, fakes: list[FakeServer]) -> None:
    for fake in fakes:
        fake.always = "close"
    with pytest.raises(TrainingError, match=f"request 0 lost its server {MAX_DISCONNECTS} times: http"):
        await pool.generate(requests(1))
    assert sum(len(fake.arrived) for fake in fakes) == MAX_DISCONNECTS


@pytest.mark.parametrize(
    ("prompt_ids", "stop", "message"),
    [
        ((1, VOCAB_SIZE), (), "prompt token 50 is outside the model's"),
        ((-1,), (), "prompt token -1 is outside"),
        ((), (), "request 1 has an empty prompt"),
        ((1,), (99,), "request 1: stop token 99 is outside"),
    ],
)
@with_servers()
async def test_what_would_kill_a_server_is_not_sent(
    pool: Pool, fakes: list[FakeServer], prompt_ids: tuple[int, ...], stop: tuple[int, ...], message: str
) -> None:
    prompt = Prompt(index=0, token_ids=prompt_ids, text="", answer="")
    wrong = CompletionRequest(prompt=prompt, params=replace(PARAMS, stop_token_ids=stop), seed=0)
    with pytest.raises(InputError, match=message):
        await pool.generate([*requests(1), wrong])
    assert fakes[0].arrived == fakes[1].arrived == []


@with_servers(count=1)
async def test_what_is_sent(pool: Pool, fakes: list[FakeServer]) -> None:
    params = replace(PARAMS, n=5, seed=11, temperature=0.7, top_p=0.9)
    prompt = Prompt(index=3, token_ids=(1, 2), text="", answer="")
    request = CompletionRequest.of(prompt, params, 4)
    assert request.seed == stream_seed(11, 3, 4)
    await pool.generate([request])
    (body,) = fakes[0].bodies
    assert (body["model"], body["token_ids"]) == ("policy", [1, 2])
    sampling = body["sampling_params"]
    assert (sampling["n"], sampling["seed"], sampling["logprobs"]) == (1, request.seed, 0)
    assert (sampling["max_tokens"], sampling["temperature"], sampling["top_p"]) == (3, 0.7, 0.9)


TROUBLE = st.lists(st.sampled_from(["answer", "close", "drop", 500, 503, "die"]), max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TROUBLE, min_size=1, max_size=3), st.integers(1, 12))
def test_any_trouble_that_ends_loses_nothing(trouble: list[list[str | int]], count: int) -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        for fake, script in zip(fakes, trouble, strict=True):
            fake.script.extend(script)

        async def restart() -> None:
            while True:
                await asyncio.sleep(0.01)
                for fake in fakes:
                    if fake._server is None:
                        await fake.start()

        calls: list[int] = []
        async with asyncio.TaskGroup() as group:  # which ends, should a restart fail
            restarts = group.create_task(restart())
            check_all(await pool.generate(requests(count), lambda number, _: calls.append(number)), count)
            restarts.cancel()
        assert sorted(calls) == list(range(count))
        assert all(fake.most_open <= 3 for fake in fakes)

    # Five attempts, so that no request is lost MAX_DISCONNECTS times.
    run(work, count=len(trouble), attempts=5, max_in_flight_per_server=3)


def test_servers_come_and_go_while_there_is_work() -> None:
    """Who is found serves once it is admitted; who is lost and found no more is forgotten."""
    found: list[Server] = []
    admitted: list[str] = []

    async def admit(server: Server) -> bool:
        admitted.append(server.url)
        return True

    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        first, second = pool.live()
        await pool.serve([])
        assert await pool.reachable() == [], "none has announced itself"
        for fake in fakes:
            fake.delay = 0.01
        answers = asyncio.create_task(pool.generate(requests(40)))
        await asyncio.sleep(0.1)
        found.append(first)
        while len(fakes[0].arrived) < 10:
            await asyncio.sleep(0.01)
        found[:] = [second]
        fakes[0].kill()
        check_all(await answers, 40)
        assert admitted == [first.url, second.url] and pool.live() == [second]
        assert await pool.reachable() == [second]

    run(work, find=lambda: [*found], admit=admit)


@with_servers(find=list, recovery_seconds=0.1)
async def test_no_server_is_ever_found(pool: Pool, fakes: list[FakeServer]) -> None:
    await pool.serve([])
    with pytest.raises(TrainingError, match=r"no rollout server for 0\.1 s: none has announced itself"):
        await pool.generate(requests(1))
    with pytest.raises(InputError, match="no rollout servers"):
        Pool([], max_in_flight_per_server=1, vocab_size=5)


@with_servers(count=1)
async def test_batches_share_the_servers_and_the_first_goes_first(
    pool: Pool, fakes: list[FakeServer]
) -> None:
    fakes[0].delay = 0.005
    done: list[str] = []
    first = asyncio.create_task(pool.generate(requests(10), lambda *_: done.append("first")))
    await asyncio.sleep(0)
    second = asyncio.create_task(pool.generate(requests(10), lambda *_: done.append("second")))
    check_all(await first, 10)
    assert not second.done()
    check_all(await second, 10)
    assert fakes[0].most_open == 4
    # The second began while the last of the first were open: no server waits for a batch to end.
    assert done[:8] == ["first"] * 8
    assert done.count("first") == done.count("second") == 10


@with_servers()
async def test_a_bad_answer_is_raised_and_the_rest_cancelled(pool: Pool, fakes: list[FakeServer]) -> None:
    fakes[0].always = fakes[1].always = "hang"
    fakes[1].script.append("garbage")
    with pytest.raises(BadAnswer, match=f"{fakes[1].url}: 0 choices"):
        await pool.generate(requests(20))
    assert asyncio.all_tasks() - fakes[0]._handlers - fakes[1]._handlers == {asyncio.current_task()}
    for fake in fakes:
        fake.always = "answer"
    check_all(await pool.generate(requests(20)), 20)  # and the pool is as good as new
