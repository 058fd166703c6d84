"""Creates the client of the servers from the configuration's ``[vllm]`` section."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from megatron_fspo.config import VLLM
from megatron_fspo.errors import InputError, InputErrors
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.rollout.client.engine import Leader
from megatron_fspo.rollout.client.memory_phases import sleep, wake
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.send_weights import BroadcastSender, DiskSender, Sender
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.common import announced, api_key, is_loopback
from megatron_fspo.rollout.links import listen


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Features that every server must have been started with."""

    length: int = 0
    """Take sequences of so many tokens."""
    routes: bool = False
    """Return the experts of each token."""
    lora_rank: int = 0
    """Serve adapters of this rank; 0: the whole model is sent."""


_INFO = "server_info?config_format=json"
LARGEST_TEMPERATURE = 2.0  # vLLM's limit


def check_options(options: VLLM, temperatures: Mapping[str, float], *, cuda: bool) -> None:
    """Raise ``InputErrors`` for options that cannot work, without contacting servers. ``temperatures``:
    configuration key → sampling temperature; ``cuda``: the trainer's tensors are on a GPU."""
    problems = []
    urls = [server.url for server in _servers(options.urls, http_client())]
    twice = next((url for i, url in enumerate(urls) if url in urls[:i]), None)
    if twice is not None:
        problems.append(f"vllm.urls names {twice} twice")
    if options.transfer == "disk" and options.folder is None:
        problems.append("vllm.transfer = disk needs vllm.folder, a folder that trainer and servers share")
    if options.transfer == "nccl" and not cuda:
        problems.append("vllm.transfer = nccl needs a trainer on GPUs: use gloo or disk")
    far = _far(urls)
    if options.transfer != "disk" and far and options.address and is_loopback(options.address):
        problems.append(f"vllm.address = {options.address}: set an address that {far} can reach")
    for key, temperature in temperatures.items():
        if temperature > LARGEST_TEMPERATURE:
            problems.append(f"{key} = {temperature}: vLLM allows at most {LARGEST_TEMPERATURE:g}")
    if problems:
        raise InputErrors(problems)


async def absent_servers(options: VLLM, needs: Needs, *, seconds: float = 0.0) -> list[str]:
    """Return a line for each server that still does not answer after ``seconds``, or lacks ``needs``."""
    folder, end = options.discovery, time.monotonic() + seconds
    key = "vllm.discovery" if folder else "vllm.urls"
    async with http_client() as http:
        while True:
            servers = _servers(announced(folder) if folder else options.urls, http)
            answered = await asyncio.gather(*(server.healthy() for server in servers))
            there = [server for server, well in zip(servers, answered, strict=True) if well]
            # A server that is gone may still be announced.
            absent = [] if there and folder else [one.url for one in servers if one not in there]
            if not absent or time.monotonic() >= end:
                break
            print(f"waiting for {', '.join(absent[:4])}, {end - time.monotonic():.0f} s at most", flush=True)
            await asyncio.sleep(5)
        lacking = await _lacking(there, needs)
    return lacking + [
        f"{key}: no server answers at {url}: start one with `megatron-fspo serve`" for url in absent
    ]


async def _lacking(servers: Sequence[Server], needs: Needs) -> list[str]:
    """Return a line for each need that a server does not meet."""
    lines = []
    for server in servers if needs.length else ():
        if (limit := await server.longest()) < needs.length:
            lines.append(f"{server.url} takes {limit} tokens: use `serve -- --max-model-len {needs.length}`")
    asked = servers if needs.routes or needs.lora_rank else []
    answers: list[Any] = await asyncio.gather(*(server.get(_INFO) for server in asked))
    for server, answer in zip(asked, answers, strict=True):
        routes = _told(answer, "vllm_config", "aux_output_config", "enable_return_routed_experts")
        rank = _told(answer, "vllm_config", "lora_config", "max_lora_rank")
        if needs.routes and routes is not True:
            lines.append(f"moe.replay = rollout: {server.url} returns no routes: use `serve --routes` there")
        if needs.lora_rank > (rank if isinstance(rank, int) else 0):
            serve = f"`megatron-fspo serve --lora-rank {needs.lora_rank}`"
            lines.append(f"lora.rank: {server.url} serves no adapters of this rank: start it with {serve}")
    return lines


def _told(answer: Any, *path: str) -> Any:
    """Return the value of an answer under these nested keys; None if there is none."""
    for key in path:
        answer = answer.get(key) if isinstance(answer, dict) else None
    return answer


def connect(options: VLLM, vocab_size: int) -> Leader:
    """Create the first rank's client. The API key comes from ``VLLM_API_KEY`` and is sent to servers only."""
    http, folder = http_client(), options.discovery
    server_at = cache(lambda url: _servers([url], http)[0])

    def find() -> list[Server]:
        return [server_at(url) for url in (options.urls if folder is None else announced(folder))]

    pool = Pool(
        find(),
        find=None if folder is None else find,
        vocab_size=vocab_size,
        max_in_flight_per_server=options.in_flight,
        recovery_seconds=options.recovery_seconds,
    )
    return Leader(loop=Loop("rollout"), http=http, pool=pool, sender=_sender(options))


async def settle(leader: Leader, needs: Needs, *, colocated: bool) -> None:
    """Prepare reachable servers for a trainer that allocates memory. If GPUs are shared, they release theirs;
    otherwise servers that an earlier job left asleep wake up. Raises ``TrainingError`` if a server does not
    release its memory, and ``InputError`` if it cannot or does not meet ``needs``."""
    servers = await leader.pool.reachable()
    if lines := await _lacking(servers, needs):
        raise InputErrors(lines)
    await sleep(servers) if colocated else await wake(servers)


def _servers(urls: Sequence[str], http: httpx.AsyncClient) -> list[Server]:
    key = api_key()
    return [Server(url, http, api_key=key) for url in urls]


def _sender(options: VLLM) -> Sender:
    """Create the sender of weights. Raises ``InputError`` if this machine cannot listen at ``vllm.address``,
    or servers on other machines cannot reach it."""
    if options.transfer == "disk":
        assert options.folder is not None
        return DiskSender(options.folder)
    if options.address is not None:
        key = f"vllm.address = {options.address}"
        try:
            with listen(options.address) as listener:
                ip = listener.getsockname()[0]
        except OSError as error:
            raise InputError(f"{key} is no address of this machine: {error.strerror or error}") from None
        far = _far(options.urls)
        if far is not None and is_loopback(ip):
            raise InputError(f"{key} is {ip} here: set an address that {far} can reach")
    return BroadcastSender(options.transfer, address=options.address, delta=options.delta)


def _far(urls: Sequence[str]) -> str | None:
    """Return the first URL on another machine, if any."""
    return next((url for url in urls if not is_loopback(httpx.URL(url).host)), None)
