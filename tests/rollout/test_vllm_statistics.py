"""What is said of a server that scores otherwise than the trainer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fspo.remote import http_client
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.client.statistics import METHOD, compare, counted, difference, prove
from megatron_fspo.rollout.server import flags
from megatron_fspo.rollout.server.inside import statistics as plugin
from megatron_fspo.rollout.tensor_stats import Stats, tensor_stats

Proof = tuple[bool | None, str]
CHUNK = "megatron_fspo.rollout.tensor_stats._CHUNK"


def statistics(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Stats]:
    found: dict[str, Stats] = {}
    assert all(tensor is not None for _, tensor in counted(tensors, found))
    return found


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "embed.weight": draw(50, 8),
        "q_proj.weight": draw(16, 8),
        "k_proj.weight": draw(8, 8),
        "v_proj.weight": draw(8, 8),
        "o_proj.weight": draw(8, 16),
        "norm.weight": draw(8),
    }


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = tensor_stats(torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.bfloat16))
    assert stats == Stats(dtype="bfloat16", count=4, total=2.5, squares=14.25, low=-2.0, high=3.0)
    assert stats.mean == 0.625
    assert stats.rms == math.sqrt(14.25 / 4)
    empty = tensor_stats(torch.zeros(0, 3, dtype=torch.bfloat16))
    assert empty + stats == stats + empty == stats
    monkeypatch.setattr(CHUNK, 3)
    assert tensor_stats(torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.bfloat16)) == stats


@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_shows(at: int, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHUNK, 3)
    tensor = torch.ones(8)
    tensor[at] = value
    broken, sound = tensor_stats(tensor), tensor_stats(torch.ones(8))
    assert repr(broken.high) == repr(value)
    assert Stats.from_words(broken.to_words()).to_words() == broken.to_words()
    assert difference(sound, broken) == difference(broken, sound) == math.inf
    assert repr((sound + broken).high) == repr((broken + sound).high) == repr(value)


def test_shards_and_copies_add_up(tensors: dict[str, Tensor]) -> None:
    whole = statistics(tensors.items())
    top, bottom = (statistics((name, half) for name, half in halves) for halves in zip(*[
        [(name, tensor.chunk(2)[0]), (name, tensor.chunk(2)[1])] for name, tensor in tensors.items()
    ], strict=True))  # fmt: skip
    halves = {name: top[name] + bottom[name] for name in tensors}
    twice = {name: whole[name] + whole[name] for name in tensors}
    for theirs in (halves, twice):
        assert "The loaded weights agree (6 tensors); what is computed with differs" in compare(whole, theirs)


def test_the_tensors_that_differ_most(tensors: dict[str, Tensor]) -> None:
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["norm.weight"] *= 1.001
    other["o_proj.weight"][3, 3] = 40.0
    text = compare(statistics(tensors.items()), statistics(other.items())).splitlines()
    assert text[0] == "2 of 6 tensors differ; mean, rms, min, max of the trainer's | the server's:"
    assert [line.split(":")[0] for line in text[1:]] == ["  o_proj.weight", "  norm.weight"]
    assert text[1].endswith(" 40")
    assert len(text[1].split()) == 1 + 4 + 1 + 4


def test_many_differ(tensors: dict[str, Tensor]) -> None:
    ours, theirs = statistics(tensors.items()), statistics((n, t * 2) for n, t in tensors.items())
    text = compare(ours, theirs).splitlines()
    assert (len(text), text[-1]) == (7, "  and 1 more")


def test_rounding_of_the_server_is_no_difference(tensors: dict[str, Tensor]) -> None:
    ours = statistics(tensors.items())
    rounded = statistics((name, tensor.bfloat16()) for name, tensor in tensors.items())
    agree, types = compare(ours, rounded).splitlines()
    assert agree.startswith("The loaded weights agree (6 tensors); ")
    assert types == "Types here and there: float32 and bfloat16"
    same_type = statistics((name, tensor.bfloat16().float()) for name, tensor in tensors.items())
    assert compare(ours, same_type).startswith("6 of 6 tensors differ")


def test_what_cannot_be_compared(tensors: dict[str, Tensor]) -> None:
    ours = statistics(tensors.items())
    theirs = {name: stats for name, stats in ours.items() if name != "norm.weight"}
    theirs["w13_weight"] = theirs.pop("q_proj.weight")
    theirs["o_proj.weight"] = Stats(dtype="float8_e4m3fn", count=128, total=1, squares=1, low=0, high=1)
    agree, alone = compare(ours, theirs).splitlines()
    assert "(3 tensors)" in agree
    assert alone == "Not compared, quantised or on one side only: 4, such as norm.weight"
    assert compare(ours, {}).splitlines()[0] == "No tensor has the same name on both sides."


@pytest.mark.parametrize(("count", "gap"), [(8, 0.0), (16, 0.0), (12, math.inf), (0, math.inf)])
def test_as_many_elements(count: int, gap: float) -> None:
    assert difference(tensor_stats(torch.ones(8)), tensor_stats(torch.ones(count))) == gap


class Linear(nn.Module):
    """As vLLM's on a CPU: of the weight only a packed copy is left."""

    def __init__(self, weight: Tensor, sizes: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.output_partition_sizes = sizes
        self.input_size_per_partition = weight.shape[1]
        self.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)


class Embedding(nn.Module):
    """Of a padded vocabulary."""

    def __init__(self, weight: Tensor, padding: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([weight, torch.zeros(padding, weight.shape[1])]))
        self.shard_indices = SimpleNamespace(num_org_elements=len(weight))


class Head(Embedding):
    """Tied; computes with a packed copy of its own."""

    def __init__(self, embedding: Embedding, copy: Tensor) -> None:
        super().__init__(copy, 14)
        self.weight = embedding.weight
        self.embedding_dim = copy.shape[1]
        self.cpu_linear = lambda x, _, bias: nn.functional.linear(x, copy, bias)


class Model(nn.Module):
    packed_modules_mapping: dict[str, Any] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self, tensors: dict[str, Tensor], head: Tensor) -> None:
        super().__init__()
        self.embed = Embedding(tensors["embed.weight"], 14)
        fused = torch.cat([tensors[f"{name}_proj.weight"] for name in "qkv"])
        self.qkv_proj = Linear(fused, [16, 8, 8])
        self.o_proj = Linear(tensors["o_proj.weight"], [8])
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(tensors["norm.weight"])
        self.lm_head = Head(self.embed, head)


def of_worker(model: Model) -> dict[str, Stats]:
    extension = plugin.WorkerExtension()
    extension.get_model = lambda: model
    return {name: Stats.from_words(words) for name, words in extension.weight_statistics().items()}


def test_a_worker_on_a_cpu(tensors: dict[str, Tensor]) -> None:
    ours = statistics(tensors.items())
    theirs = of_worker(Model(tensors, tensors["embed.weight"]))
    assert theirs.keys() == {
        *("embed.weight", "embed.weight (packed)", "norm.weight", "o_proj.weight (packed)"),
        *("q_proj.weight (packed)", "k_proj.weight (packed)", "v_proj.weight (packed)"),
    }
    assert compare(ours, theirs).startswith("The loaded weights agree (6 tensors); what is computed with")
    stale, head = compare(ours, of_worker(Model(tensors, tensors["embed.weight"] + 1))).splitlines()
    assert stale.startswith(
        "The loaded weights agree (6 tensors); what is computed with differs: stale packed copies (1); mean,"
    )
    assert head.startswith("  embed.weight (packed): ")
    other = compare(ours, of_worker(Model(tensors | {"k_proj.weight": torch.ones(8, 8)}, torch.ones(50, 8))))
    assert other.startswith("2 of 7 tensors differ; ")
    assert "  k_proj.weight (packed): " in other


def test_the_trainer_asks_for_what_serve_starts() -> None:
    module, _, name = flags.EXTENSION.rpartition(".")
    assert getattr(plugin, name).__module__ == module
    assert hasattr(plugin.WorkerExtension, METHOD)


def proof(answer: Any, status: int = 200) -> Proof:
    """Of one tensor of ones, when ``/collective_rpc`` answers so."""
    import json

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(answer).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    async def main() -> Proof:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, http_client() as http:
            port = server.sockets[0].getsockname()[1]
            return await prove(
                Server(f"http://127.0.0.1:{port}", http), statistics({"a": torch.ones(3)}.items())
            )

    return asyncio.run(main())


def answers() -> Iterator[Any]:
    yield from (None, {}, {"results": None}, {"results": ["x"]}, {"results": [{"a": ["float32", "3"]}]})
    yield {"results": [{"a": ["float32", "x", "3", "3", "1", "1"]}]}


def test_what_the_server_answers() -> None:
    good, bad = (tensor_stats(tensor).to_words() for tensor in (torch.ones(3), torch.zeros(3)))
    same, text = proof({"results": [{"a": good}, {"a": good}]})
    assert same is True and text.startswith("The loaded weights agree (1 tensors)")
    same, text = proof({"results": [{"a": good, "a (packed)": bad}]})
    assert same is False and "stale packed copies (1)" in text
    for other in ({"b": good}, {"a": ["float8_e4m3fn", *good[1:]]}):
        assert proof({"results": [other]})[0] is None
    for answer in answers():
        same, text = proof(answer)
        assert same is None and "the answer has no statistics in it" in text
    without = {"error": {"message": "'CPUWorker' object has no attribute 'weight_statistics'"}}
    same, text = proof(without, 500)
    assert same is None and "megatron-fspo serve" in text
    assert proof({"error": {"message": "no"}}, 400)[0] is None
    with pytest.raises(ServerLost, match="out of memory"):
        proof({"error": {"message": "out of memory"}}, 500)


@pytest.mark.parametrize("at", [0.02, 1.0])
def test_one_bf16_step_of_one_element_shows(at: float) -> None:
    """Also in another order, which rounds the sums otherwise: copies and shards come in any."""
    old = torch.randn(2**22, generator=torch.Generator().manual_seed(1)).bfloat16()
    old[5] = at
    new = old.clone()
    new[5] = torch.nextafter(old[5], torch.tensor(9.0).bfloat16())
    shuffled = tensor_stats(old[: 2**20].flip(0)) + tensor_stats(old[2**20 :].flip(0))
    assert difference(tensor_stats(old), shuffled) == 0
    assert difference(tensor_stats(new), shuffled) > 0
