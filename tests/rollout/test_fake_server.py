"""The server that stands in for vLLM in other tests."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest
from fake_server import FakeServer


@pytest.mark.parametrize("moments", range(6))
def test_a_killed_server_leaves_no_connection_open(moments: int) -> None:
    """Also one that asyncio has accepted and not yet handed over, which is so in one of these moments."""

    async def main() -> None:
        async with FakeServer() as fake:
            with socket.create_connection(("127.0.0.1", fake.port)) as client:
                client.setblocking(False)
                for _ in range(moments):
                    await asyncio.sleep(0)
                fake.kill()
                with suppress(ConnectionResetError):
                    async with asyncio.timeout(5):
                        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    asyncio.run(main())


@pytest.mark.parametrize("moments", range(6))
def test_a_start_that_is_cancelled_leaves_nothing_open(moments: int) -> None:
    async def main() -> None:
        async with FakeServer() as fake:
            fake.kill()
            start = asyncio.create_task(fake.start())
            for _ in range(moments):
                await asyncio.sleep(0)
            start.cancel()
            await asyncio.wait([start])
            fake.kill()
            await asyncio.sleep(0)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", fake.port)).close()

    asyncio.run(main())
