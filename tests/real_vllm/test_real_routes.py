"""Routes of a mixture of experts against those of transformers: from a prefix cache, of requests that lost
their memory, and after an update."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from launch import REPO
from megatron_fspo.config import VLLM
from megatron_fspo.rollout.client.connect import Needs, absent_servers
from megatron_fspo.types import Completion, Prompt, Routing, SamplingParams
from real_server import sampled, send, weights
from runs import rows, trained
from serving import Served, serving
from test_real_runs import words

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

ROUTING = Routing(layers=2, experts=4, per_token=2)
SAMPLES = 8
PROMPTS = [
    Prompt(
        index=i,
        token_ids=tuple((7 * i + 31 * j + 3) % 14 for j in range(5 + 12 * i)),
        text="",
        answer="",
    )
    for i in range(6)
]


@pytest.fixture(scope="module")
def mixtures(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of the checkpoint, and with other weights."""
    folder = tmp_path_factory.mktemp("mixtures")
    make = runpy.run_path(str(REPO / "examples/make_sum/make_experts.py"))["main"]
    for name in ("one", "two"):
        make(folder / name, checkpoint)
    generator = torch.Generator().manual_seed(1)
    path = folder / "two" / "model.safetensors"
    changed = {
        name: weight + weight.std() * torch.randn(weight.shape, generator=generator) / 2
        for name, weight in load_file(path).items()
    }
    save_file(changed, path, {"format": "pt"})
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def server(mixtures: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It has memory for a third of the requests."""
    words = "--routes --dtype float32 -- --max-model-len 128 --max-num-seqs 16 --max-num-batched-tokens 160"
    words += " --block-size 32 --num-gpu-blocks-override 20"
    with serving(mixtures[0], tmp_path_factory.mktemp("server"), *words.split()) as (server,):
        yield server


@torch.no_grad()
def routes_of(checkpoint: Path, completions: list[Completion]) -> list[Tensor]:
    """By transformers: [P + L - 1, layers, k], experts in ascending order."""
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    routes = []
    for number, completion in enumerate(completions):
        ids = [*PROMPTS[number // SAMPLES].token_ids, *completion.token_ids]
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
        chosen = torch.stack([one.topk(ROUTING.per_token).indices for one in logits], 1)
        routes.append(chosen[:-1].sort(-1).values)
    return routes


def agreement(completions: list[Completion], want: list[Tensor], faulty=lambda routes: routes) -> float:
    """Share of tokens and layers with the same experts."""
    same = []
    for completion, wanted in zip(completions, want, strict=True):
        assert completion.routes is not None, completion.route_problem
        assert completion.routes.shape == wanted.shape
        same.append((faulty(completion.routes).long().sort(-1).values == wanted).all(-1).flatten())
    return torch.cat(same).double().mean().item()


def test_routes_are_those_of_transformers(server: Served, mixtures: list[Path]) -> None:
    one, two = mixtures
    options = VLLM(urls=(server.url,))
    assert asyncio.run(absent_servers(options, Needs(routes=True))) == []
    params = SamplingParams(n=SAMPLES, max_tokens=40, seed=5, routing=ROUTING)
    for version, (new, old) in enumerate([(one, two), (two, one)]):
        if version:
            assert send(server.url, weights(new).items(), version) is None
        completions = sampled(server.url, PROMPTS, params)
        assert {c.weight_version for c in completions} == {version}
        want = routes_of(new, completions)
        assert agreement(completions, want) > 0.999
        assert agreement(completions, routes_of(old, completions)) < 0.9
        # The same measure sees what no check of an answer can.
        assert agreement(completions, want, partial(torch.roll, shifts=1, dims=0)) < 0.9
        assert agreement(completions, want, partial(torch.flip, dims=(1,))) < 0.9
    assert server.count("prefix_cache_hits") > 500 and server.count("num_preemptions") > 0
    assert all(c.routes is None for c in sampled(server.url, PROMPTS, replace(params, routing=None)))


def test_a_run_gets_the_routes_of_all_responses(server: Served, mixtures: list[Path], tmp_path: Path) -> None:
    """And servers have the trainer's experts: an update by the names of a checkpoint."""
    more = "--moe.replay rollout --parallel.tensor 1 --parallel.sequence false"
    trained(tmp_path, "run", *words(mixtures[0], server, 2, *more.split()))
    for row in rows(tmp_path, "run"):
        if row["step"]:
            assert row["rollout/route_fallback"] == 0 and row["actor/grad_norm"] > 0
            assert row["rollout/route_flips"] < 1e-3 and row["fspo/on_policy_abs_s_max"] == 0
            assert 0 < row["rollout/canary_abs_diff"] <= 1e-4
