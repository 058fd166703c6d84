"""What reading the servers' answers costs the trainer's first rank, which trains in the same process.

    python benchmarks/rollout_client.py

A second process answers every request with the same completion, as vLLM 0.32 writes one. The client asks,
receives, decodes and checks, as in training. Its CPU time is a multiple of what `json.loads` takes to decode
the same bytes, alone: nothing received, nothing checked.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import ROOT, machine, markdown, options_of
from megatron_fspo.job.remote import http_client
from megatron_fspo.rollout.client.pool import CompletionRequest, Pool
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.common import MODEL
from megatron_fspo.types import SamplingParams

LENGTHS = (256, 1024, 8192)
VOCAB_SIZE = 150_000
PROMPT = 512  # tokens
IN_FLIGHT = 64


def answer(length: int) -> bytes:
    """A completion of so many tokens. vLLM says the log-prob of each twice."""
    numbers = random.Random(length)
    tokens = [numbers.randrange(VOCAB_SIZE) for _ in range(length)]
    said = [{"token_id": token, "logprob": -numbers.expovariate(1.0), "rank": 1} for token in tokens]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "1", "start": 0, "end": length}],
        "logprobs": {"content": [entry | {"top_logprobs": [entry]} for entry in said]},
    }
    whole = {"request_id": "0" * 32, "model": MODEL, "usage": {}, "choices": [choice]}
    return json.dumps(whole, separators=(",", ":")).encode()


def serve(body: bytes, port: Connection) -> None:
    """Answer every request with ``body``; tells the port that it listens on."""
    message = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.write(message)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def ask(port: int, length: int, count: int) -> float:
    """Seconds of CPU for a completion."""
    async with http_client() as http:
        server = Server(f"http://127.0.0.1:{port}", http)
        pool = Pool([server], max_in_flight_per_server=IN_FLIGHT, vocab_size=VOCAB_SIZE)
        params = SamplingParams(max_tokens=length)
        requests = [CompletionRequest(prompt_ids=(1,) * PROMPT, params=params, seed=i) for i in range(count)]
        await pool.generate(requests[:IN_FLIGHT])
        began = time.process_time()
        await pool.generate(requests)
        return (time.process_time() - began) / count


def decode(body: bytes, count: int) -> float:
    """Seconds of CPU for the standard library to decode a completion."""
    gc.collect()
    began = time.process_time()
    for _ in range(count):
        json.loads(body)
    return (time.process_time() - began) / count


def measure(length: int, count: int, repeats: int) -> dict[str, float]:
    body = answer(length)
    mine, its = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(body, its), daemon=True)
    server.start()
    its.close()  # so that the end of a server that never listened is seen
    try:
        port = mine.recv()
        client = min(asyncio.run(ask(port, length, count)) for _ in range(repeats))
    finally:
        server.kill()
        server.join()
    baseline = min(decode(body, count) for _ in range(repeats))
    return {
        "tokens": length,
        "bytes_per_token": len(body) / length,
        "of_json_loads": client / baseline,
        "tokens_per_cpu_second": length / client,
    }


def table(report: dict[str, Any]) -> str:
    """As in docs/performance.md."""
    rows = [[f"{row['tokens']:,}", f"{row['of_json_loads']:.2f}"] for row in report["lengths"]]
    return markdown(["tokens of a response", "client, `json.loads` = 1"], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--count", type=int, default=300, help="responses of each length")
    parser.add_argument("--repeats", type=int, default=5, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rollout_client.json")
    options = parser.parse_args()
    if min(options.count, options.repeats) < 1:
        parser.error("--count and --repeats: 1 or more")
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: no such folder")
    lengths = [measure(length, options.count, options.repeats) for length in LENGTHS]
    report = {"command": "python benchmarks/rollout_client.py", **machine(), "lengths": lengths}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
