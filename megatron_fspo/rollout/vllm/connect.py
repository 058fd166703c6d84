"""From the configuration's ``[vllm]`` section to what talks to the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

import httpx

from megatron_fspo.api_key import api_key
from megatron_fspo.config import VLLM
from megatron_fspo.errors import InputError
from megatron_fspo.parallel.links import address_towards, listen
from megatron_fspo.rollout.vllm.engine import Leader
from megatron_fspo.rollout.vllm.loop import Loop
from megatron_fspo.rollout.vllm.pool import Pool
from megatron_fspo.rollout.vllm.senders import BroadcastSender, DiskSender, Sender
from megatron_fspo.rollout.vllm.server import Server, http_client

LARGEST_TEMPERATURE = 2.0  # vLLM refuses more


def check_options(options: VLLM, temperatures: Mapping[str, float], *, cuda: bool) -> None:
    """Before any server is asked.

    Args:
        temperatures: that will be sampled at, by key of the configuration.
        cuda: whether the trainer's tensors are on a GPU.

    Raises:
        InputError: the first thing that is wrong.
    """
    urls = [server.url for server in _servers(options, http_client())]
    twice = next((url for i, url in enumerate(urls) if url in urls[:i]), None)
    if twice is not None:
        raise InputError(f"vllm.urls names {twice} twice")
    if options.transfer == "disk" and options.folder is None:
        raise InputError("vllm.transfer = disk needs vllm.folder, which trainer and servers share")
    if options.transfer == "nccl" and not cuda:
        raise InputError("vllm.transfer = nccl needs a trainer on GPUs; gloo and disk work everywhere")
    far = _far(urls)
    if options.transfer != "disk" and far and options.address and _is_loopback(options.address):
        raise InputError(
            f"vllm.address = {options.address} is this machine to itself only: name it as {far} sees it"
        )
    for key, temperature in temperatures.items():
        if temperature > LARGEST_TEMPERATURE:
            raise InputError(f"{key} = {temperature}: vLLM takes at most {LARGEST_TEMPERATURE:g}")


def absent_servers(options: VLLM) -> list[str]:
    """Per server that does not answer within seconds, a line that names it."""
    return asyncio.run(_absent_servers(options))


async def _absent_servers(options: VLLM) -> list[str]:
    async with http_client() as http:
        servers = _servers(options, http)
        answered = await asyncio.gather(*(server.healthy() for server in servers))
    return [
        f"vllm.urls: no server answers at {server.url}; `megatron-fspo serve` starts one"
        for server, there in zip(servers, answered, strict=True)
        if not there
    ]


def connect(options: VLLM, vocab_size: int) -> Leader:
    """For the first rank. The API key comes from ``VLLM_API_KEY``, and goes nowhere else."""
    http = http_client()
    pool = Pool(
        _servers(options, http),
        vocab_size=vocab_size,
        max_in_flight_per_server=options.in_flight,
        recovery_seconds=options.recovery_seconds,
    )
    return Leader(loop=Loop(), http=http, pool=pool, sender=_sender(options))


def _servers(options: VLLM, http: httpx.AsyncClient) -> list[Server]:
    key = api_key()
    return [Server(url, http, api_key=key) for url in options.urls]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _sender(options: VLLM) -> Sender:
    if options.transfer == "disk":
        assert options.folder is not None
        return DiskSender(options.folder)
    return BroadcastSender(options.transfer, address=_address(options))


def _address(options: VLLM) -> str:
    """What the group of the weights listens on; asked on the machine that will listen.

    Raises:
        InputError: this machine does not have the address given, or is all that it reaches; or there is no
            way to the servers.
    """
    far = _far(options.urls)
    if options.address is None:
        return "127.0.0.1" if far is None else _address_towards(far)
    try:
        with listen(options.address) as listener:
            found = listener.getsockname()[0]
    except OSError as error:
        raise InputError(
            f"vllm.address = {options.address}: {error.strerror or error}; it has to be a name or address of "
            "this machine"
        ) from None
    if far is not None and _is_loopback(found):
        raise InputError(
            f"vllm.address = {options.address} is {found} here, this machine to itself only: give the "
            f"address that {far} sees"
        )
    return options.address


def _address_towards(url: str) -> str:
    server = httpx.URL(url)
    try:
        return address_towards(server.host, server.port or 80)
    except OSError as error:
        raise InputError(f"vllm.urls: there is no way to {url}: {error.strerror or error}") from None


def _far(urls: Sequence[str]) -> str | None:
    """The first server that is on another machine, if any."""
    return next((url for url in urls if not _is_loopback(httpx.URL(url).host)), None)
