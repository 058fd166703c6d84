"""Routes of mixtures of experts against those of transformers: from a prefix cache, of requests that lost
their memory, and after an update; of one whose first layer is dense, and whose sigmoid router has a bias."""

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
from transformers import AutoModelForCausalLM

from launch import REPO
from megatron_fspo.config import VLLM
from megatron_fspo.rollout.client.connect import Needs, absent_servers
from megatron_fspo.types import Completion, Prompt, Routing, SamplingParams
from real_server import sampled, send, weights
from runs import rows, trained
from serving import Served, serving
from test_real_families import pair
from test_real_runs import words

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

ROUTINGS = {
    "qwen3_moe": Routing(layers=2, experts=4, per_token=2),
    "glm4_moe": Routing(layers=2, experts=8, per_token=2, dense=1),
}
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


@pytest.fixture(scope="module", params=ROUTINGS)
def routing(request: pytest.FixtureRequest) -> Routing:
    """Of a family."""
    return ROUTINGS[request.param]


@pytest.fixture(scope="module")
def mixtures(routing: Routing, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the family, with other weights."""
    folder = tmp_path_factory.mktemp("mixtures")
    if routing.dense:
        return pair("glm4_moe", folder)
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
def routes_of(checkpoint: Path, completions: list[Completion], dense: int) -> list[Tensor]:
    """By transformers: [P + L - 1, layers, k], experts in ascending order; 0 in dense layers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chosen: list[Tensor] = []
    for layer in model.model.layers[dense:]:
        layer.mlp.gate.register_forward_hook(lambda _, given, found: chosen.append(found[-1]))
    routes = []
    for number, completion in enumerate(completions):
        model(torch.tensor([[*PROMPTS[number // SAMPLES].token_ids, *completion.token_ids]]))
        absent = [torch.zeros_like(chosen[0])] * dense
        routes.append(torch.stack([*absent, *chosen], 1)[:-1].sort(-1).values)
        chosen.clear()
    return routes


def agreement(completions: list[Completion], want: list[Tensor], faulty=lambda routes: routes) -> float:
    """Share of tokens and layers with the same experts."""
    same = []
    for completion, wanted in zip(completions, want, strict=True):
        assert completion.routes is not None, completion.route_problem
        assert completion.routes.shape == wanted.shape
        same.append((faulty(completion.routes).long().sort(-1).values == wanted).all(-1).flatten())
    return torch.cat(same).double().mean().item()


def test_routes_are_those_of_transformers(server: Served, mixtures: list[Path], routing: Routing) -> None:
    one, two = mixtures
    options = VLLM(urls=(server.url,))
    assert asyncio.run(absent_servers(options, Needs(routes=True))) == []
    params = SamplingParams(n=SAMPLES, max_tokens=40, seed=5, routing=routing)
    for version, (new, old) in enumerate([(one, two), (two, one)]):
        if version:
            assert send(server.url, weights(new).items(), version) is None
        assert server.routes.proof(old)[0] is False is not server.routes.proof(new)[0]
        completions = sampled(server.url, PROMPTS, params)
        assert {c.weight_version for c in completions} == {version}
        want = routes_of(new, completions, routing.dense)
        assert agreement(completions, want) > 0.999
        assert agreement(completions, routes_of(old, completions, routing.dense)) < 0.9
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
            assert row["rollout/logprob_abs_diff/max"] <= 1e-4
            assert 0 < row["rollout/canary_abs_diff"] <= 1e-4
