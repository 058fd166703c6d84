"""The routes of a real vLLM on the CPU, little random checkpoints for it, and updates of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.rollout.checksum import Checksum
from megatron_fspo.rollout.client.pool import CompletionRequest, Pool
from megatron_fspo.rollout.client.proof import Proof, prove, with_checksums
from megatron_fspo.rollout.client.send_weights import BroadcastSender, resume, send_weights
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.common import api_key
from megatron_fspo.types import Completion, Prompt, SamplingParams

TOLERANCE, FAR = 1e-4, 0.1
"""Log-probs in nats: of the same weights, and of others."""
HTTP = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
"""One for all: it takes a while to make. It keeps no connection to a server that a test may kill."""
FLAGS = ("--max-model-len", "128", "--max-num-seqs", "4")
PROMPT = torch.randint(0, 14, (48,), generator=torch.Generator().manual_seed(0)).tolist()


def random_like(checkpoint: Path, folder: Path, *, seed: int, **changes: Any) -> Path:
    """A checkpoint of the same architecture, but for ``changes``."""
    torch.manual_seed(seed)
    config = Qwen3Config.from_pretrained(checkpoint, initializer_range=0.15, **changes)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def weights(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


_read = cache(partial(Qwen3ForCausalLM.from_pretrained, dtype=torch.float32))


@torch.no_grad()
def all_log_probs(checkpoint: Path, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """By transformers: [N - 1, V], of what comes after each of N tokens but the last."""
    return (_read(checkpoint)(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def scores(checkpoint: Path, ids: Sequence[int] = PROMPT, temperature: float = 1.0) -> Tensor:
    """By transformers: the log-probs of all tokens but the first, in nats."""
    return all_log_probs(checkpoint, ids, temperature).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def bearer() -> dict[str, str]:
    """The header with the key, if there is one in the environment."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def sampled(
    url: str, prompts: Sequence[Prompt], params: SamplingParams, *, vocab_size: int = 14, **options: Any
) -> list[Completion]:
    """``params.n`` completions of each prompt, by the production client."""
    requests = [CompletionRequest.of(prompt, params, i) for prompt in prompts for i in range(params.n)]

    async def main() -> list[Completion]:
        async with http_client() as http:
            server = Server(url, http, api_key=api_key())
            pool = Pool([server], max_in_flight_per_server=16, vocab_size=vocab_size, **options)
            return await pool.generate(requests)

    return asyncio.run(main())


class Routes:
    """The routes of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict | None = None) -> tuple[int, Any]:
        """Status and answer; GET without a body."""
        method = "GET" if body is None else "POST"
        answer = HTTP.request(method, self.url + path, json=body, headers=bearer())
        return answer.status_code, answer.json() if answer.status_code == 200 else answer.text

    def do(self, path: str, body: dict | None = None) -> Any:
        status, answer = self.ask(path, body)
        assert status == 200, (path, status, answer)
        return answer

    def score(self) -> Tensor:
        """As :func:`scores`, by the server."""
        self.do("/reset_prefix_cache", {})
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}
        rows = self.do("/inference/v1/generate", body)["prompt_logprobs"]
        return torch.tensor([rows[i][str(PROMPT[i])]["logprob"] for i in range(1, len(PROMPT))])

    def distance(self, checkpoint: Path) -> float:
        """Largest difference of a log-prob in nats between the server and transformers."""
        return (self.score() - scores(checkpoint)).abs().max().item()

    @property
    def version(self) -> str:
        return self.do("/weight_info")["weight_version"]

    def proof(self, checkpoint: Path) -> Proof:
        """What a trainer with these weights is told of the server's."""

        async def main() -> Proof:
            async with http_client() as http:
                mine: dict[str, Checksum] = {}
                list(with_checksums(weights(checkpoint).items(), mine))
                return await prove(Server(self.url, http, api_key=api_key()), mine, {})

        return asyncio.run(main())


def send(url: str, tensors: Iterable[tuple[str, Tensor]], version: int) -> Exception | None:
    """A whole update by the trainer's own sender, over gloo; what went wrong."""
    with Loop("rollout") as loop:
        http = http_client()
        server = Server(url, http, api_key=api_key())
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=60)
        try:
            problem = send_weights([server], sender, loop, tensors, version)
            loop.run(resume([server]))
        finally:
            sender.close()
            loop.run(http.aclose())
        return problem
