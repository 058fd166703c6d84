"""Batches that share servers: their order, their failures, and their ends."""

from __future__ import annotations

import asyncio

import pytest
from fake_server import FakeServer, check_all, requests, run, tokens_of

from megatron_fspo.rollout.client.answers import BadAnswer
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.types import Completion


def test_batches_share_the_servers_and_the_first_goes_first() -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
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

    run(work, count=1)


def test_a_failed_batch_leaves_the_others_alone() -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        fakes[0].delay = 0.02
        fakes[0].script.append("garbage")
        bad = asyncio.create_task(pool.generate(requests(1)))
        await asyncio.sleep(0)
        good = asyncio.create_task(pool.generate(requests(10)))
        with pytest.raises(BadAnswer):
            await bad
        check_all(await good, 10)

    run(work, count=1)


def test_a_cancelled_batch_frees_its_places() -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        fakes[0].script.extend(["hang"] * 4)
        batch = asyncio.create_task(pool.generate(requests(20)))
        while len(fakes[0].arrived) < 4:
            await asyncio.sleep(0.01)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        check_all(await pool.generate(requests(20)), 20)

    run(work, count=1)


@pytest.mark.parametrize("steps", range(8))
def test_a_batch_cancelled_while_it_is_handed_a_place_gives_it_back(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        answered = asyncio.Event()

        async def generate(*_: object, **__: object) -> Completion:
            await answered.wait()
            return Completion(
                token_ids=tokens_of(0), log_probs=(-1.0,) * 3, finish_reason="length", weight_version=0
            )

        monkeypatch.setattr(Server, "generate", generate)
        first, second = (asyncio.create_task(pool.generate(requests(1))) for _ in range(2))
        await asyncio.sleep(0.01)
        answered.set()  # some steps of the loop later the second has the first's place
        for _ in range(steps):
            await asyncio.sleep(0)
        second.cancel()
        check_all(await first, 1)
        await asyncio.wait([second])
        check_all(await pool.generate(requests(1)), 1)

    run(work, count=1, max_in_flight_per_server=1)


def test_a_bad_answer_is_raised_and_the_rest_cancelled() -> None:
    async def work(pool: Pool, fakes: list[FakeServer]) -> None:
        fakes[0].script.extend(["hang", "hang"])
        fakes[0].always = fakes[1].always = "hang"
        fakes[1].script.append("garbage")
        with pytest.raises(BadAnswer, match=f"{fakes[1].url}: 0 choices"):
            await pool.generate(requests(20))
        assert asyncio.all_tasks() - fakes[0]._handlers - fakes[1]._handlers == {asyncio.current_task()}
        for fake in fakes:
            fake.always = "answer"
        check_all(await pool.generate(requests(20)), 20)  # and the pool is as good as new

    run(work)
