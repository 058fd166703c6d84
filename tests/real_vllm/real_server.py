"""A real vLLM on the CPU: random little checkpoints for it, and its routes."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.rollout.checksum import Checksum
from megatron_fspo.rollout.client.proof import Proof, prove, with_checksums
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.client.weights import BroadcastSender, resume, send_weights
from megatron_fspo.rollout.common import api_key

FLAGS = ("--max-model-len", "128", "--max-num-seqs", "4")
PROMPT = torch.randint(0, 14, (48,), generator=torch.Generator().manual_seed(0)).tolist()


def make_checkpoint(folder: Path, *, tied: bool, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def random_like(checkpoint: Path, folder: Path, *, seed: int) -> Path:
    """A checkpoint of the same architecture."""
    torch.manual_seed(seed)
    config = Qwen3Config.from_pretrained(checkpoint, initializer_range=0.15)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def weights(checkpoint: Path) -> dict[str, Tensor]:
    return load_file(checkpoint / "model.safetensors")


@torch.no_grad()
def score_with_transformers(checkpoint: Path) -> Tensor:
    """Log-probs of the prompt's tokens but the first, in nats."""
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    log_probs = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], dim=-1)
    return log_probs[:-1].gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def bearer() -> dict[str, str]:
    """The header with the key, if there is one in the environment."""
    key = api_key()
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class Routes:
    """The routes of a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict | None = None) -> tuple[int, Any]:
        """Status and answer; GET without a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"} | bearer()
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def do(self, path: str, body: dict | None = None) -> Any:
        status, answer = self.ask(path, body)
        assert status == 200, (path, status, answer)
        return answer

    def score(self, prompt: Sequence[int] = PROMPT, *, reset: bool = True) -> Tensor:
        """As :func:`score_with_transformers`, by the server; ``reset`` its cache before."""
        if reset:
            self.do("/reset_prefix_cache", {})
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"model": "policy", "token_ids": list(prompt), "sampling_params": sampling}
        rows = self.do("/inference/v1/generate", body)["prompt_logprobs"]
        return torch.tensor([rows[i][str(prompt[i])]["logprob"] for i in range(1, len(prompt))])

    @property
    def version(self) -> str:
        return self.do("/weight_info")["weight_version"]


def proof_of(routes: Routes, tensors: dict[str, Tensor]) -> Proof:
    """What a trainer with these tensors is told of the server's."""

    async def main() -> Proof:
        async with http_client() as http:
            mine: dict[str, Checksum] = {}
            list(with_checksums(tensors.items(), mine))
            return await prove(Server(routes.url, http, api_key=api_key()), mine)

    return asyncio.run(main())


def distance(routes: Routes, checkpoint: Path) -> float:
    """Largest difference of a log-prob in nats between the server and transformers."""
    return (routes.score() - score_with_transformers(checkpoint)).abs().max().item()


def send(url: str, tensors: dict[str, Tensor], version: int) -> Exception | None:
    """A whole update by the trainer's own sender, over gloo; what went wrong."""
    with Loop("rollout") as loop:
        http = http_client()
        server = Server(url, http, api_key=api_key())
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=60)
        problem = send_weights([server], sender, loop, tensors.items(), version)
        loop.run(resume([server]))
        loop.run(http.aclose())
        return problem
