"""From the configuration's ``[vllm]`` section to what talks to the servers."""

from __future__ import annotations

import os

from megatron_fspo.config import VLLM
from megatron_fspo.errors import InputError
from megatron_fspo.rollout.vllm.engine import Leader
from megatron_fspo.rollout.vllm.loop import Loop
from megatron_fspo.rollout.vllm.pool import Pool
from megatron_fspo.rollout.vllm.senders import BroadcastSender, DiskSender, Sender
from megatron_fspo.rollout.vllm.server import Server, http_client


def connect(options: VLLM, vocab_size: int) -> Leader:
    """For the first rank. The API key comes from ``VLLM_API_KEY``, and goes nowhere else."""
    http = http_client()
    servers = [Server(url, http, api_key=os.environ.get("VLLM_API_KEY")) for url in options.urls]
    pool = Pool(
        servers,
        vocab_size=vocab_size,
        max_in_flight_per_server=options.in_flight,
        recovery_seconds=options.recovery_seconds,
    )
    return Leader(loop=Loop(), http=http, pool=pool, sender=_sender(options))


def _sender(options: VLLM) -> Sender:
    if options.transfer == "disk":
        if options.folder is None:
            raise InputError("vllm.transfer = disk needs vllm.folder, which trainer and servers share")
        return DiskSender(options.folder)
    return BroadcastSender(options.transfer, address=options.address)
