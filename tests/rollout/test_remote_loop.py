"""The loop in a thread: interrupts, and its end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest

from launch import python
from megatron_fspo.job.remote import Loop, http_client, request


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_an_interrupt_cancels_and_waits() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append("cleaned up")

    with Loop("rollout") as loop:
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])  # as a terminal sends it
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        timer.join()
        assert ended == ["cleaned up"]
        assert loop.run(double(1)) == 2


def test_close_cancels_and_is_final() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    loop = Loop("rollout")
    future = loop.submit(work())
    loop.run(double(1))
    loop.close()
    loop.close()
    assert ended.is_set()
    assert future.cancelled()
    with pytest.raises(RuntimeError, match="loop is closed"):
        loop.run(double(1))


def test_its_own_coroutines_may_not_wait_for_it() -> None:
    with Loop("rollout") as loop:

        async def nested() -> int:
            return loop.run(double(1))

        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(nested())


def test_the_interpreter_ends_with_work_under_way() -> None:
    program = """
import asyncio
from megatron_fspo.job.remote import Loop
async def work():
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)
async def nothing(): ...
loop = Loop("rollout")
loop.submit(work())
loop.run(nothing())
"""
    done = python("-X", "dev", "-c", program, timeout=30)
    # Of a loaded machine asyncio says that a callback took long.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <Handle ")]
    assert (done.returncode, done.stdout, said) == (0, "cleaned up\n", [])


@pytest.mark.parametrize("answers", [False, True])
def test_a_limit_that_ends_at_any_moment_leaves_no_connection_open(answers: bool) -> None:
    """httpcore kept those for ever that were cancelled between their connection and their request, or when
    they closed after the answer."""
    chance = random.Random(1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if answers:
                await asyncio.sleep(chance.uniform(0, 0.03))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.read()  # until the client closes
        writer.close()

    async def bursts() -> set[str]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server, http_client() as http:
            before, problems = psutil.Process().num_fds(), set()
            for number in range(60):
                least = 0.03 if answers else 0.0
                asked = [request(http, "POST", url, seconds=least + number * 5e-4) for _ in range(30)]
                problems |= {one.problem.partition(" ")[0] for one in await asyncio.gather(*asked)}
            end = time.monotonic() + 10
            while psutil.Process().num_fds() > before and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert psutil.Process().num_fds() <= before
        return problems

    with Loop("requests") as loop:
        assert loop.run(bursts()) <= {"ConnectTimeout", "no", *([""] if answers else [])}
