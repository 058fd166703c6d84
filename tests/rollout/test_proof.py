"""Checksums of tensors on both sides, what they find, and what is said of a server that has other tensors."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from torch import Tensor, nn

from megatron_fspo.rollout.checksum import Checksum, checksum
from megatron_fspo.rollout.client.proof import Proof, compare, difference, prove, with_checksums
from megatron_fspo.rollout.client.server import Refused, ServerLost
from megatron_fspo.rollout.common import CHECKSUMS
from megatron_fspo.rollout.server import flags
from megatron_fspo.rollout.server.inside import checksums as plugin

AGREE = "The loaded weights agree (6 tensors); "


def sums(tensors: dict[str, Tensor]) -> dict[str, Checksum]:
    kept: dict[str, Checksum] = {}
    assert dict(with_checksums(tensors.items(), kept)).keys() == tensors.keys()
    return kept


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (50, 8), "q_proj": (16, 8), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (8, 16)}
    drawn = {f"{name}.weight": torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"norm.weight": torch.randn(8, generator=generator)}


@pytest.fixture(params=[2**16, 3])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.rollout.checksum._CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
def test_by_hand() -> None:
    got = checksum(torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.bfloat16))
    assert got == Checksum("bfloat16", 4, 2.5, 14.25)
    assert (got.mean, got.rms) == (0.625, math.sqrt(14.25 / 4))
    empty = checksum(torch.zeros(0, 3, dtype=torch.bfloat16))
    assert empty + got == got + empty == got


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("at", [0, 7])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_shows(at: int, value: float) -> None:
    tensor = torch.ones(8)
    tensor[at] = value
    broken, sound = checksum(tensor), checksum(torch.ones(8))
    assert Checksum.from_words(broken.to_words()).to_words() == broken.to_words()
    assert difference(sound, broken) == difference(broken, sound) == difference(broken, broken) == math.inf
    assert difference(sound, broken + sound) == math.inf


def test_shards_and_copies_add_up(tensors: dict[str, Tensor]) -> None:
    whole = sums(tensors)
    top, bottom = (sums({name: t.chunk(2)[i] for name, t in tensors.items()}) for i in range(2))
    for theirs in ({n: top[n] + bottom[n] for n in tensors}, {n: whole[n] + whole[n] for n in tensors}):
        same, text = compare(whole, theirs)
        assert same is True and text.startswith(AGREE)


def stale(tensor: Tensor) -> Tensor:
    tensor[0] = torch.nextafter(tensor[0], torch.tensor(9.0))
    return tensor


FAULTS = {
    "stale": stale,
    "zeroed": torch.zeros_like,
    "truncated": lambda tensor: tensor[:-1],
    "rounded": lambda tensor: tensor.bfloat16().float(),
    "scaled": lambda tensor: tensor * 1.001,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_tensor_is_found_and_named(tensors: dict[str, Tensor], fault: str) -> None:
    other = tensors | {"norm.weight": FAULTS[fault](tensors["norm.weight"].clone())}
    same, text = compare(sums(tensors), sums(other))
    first, line = text.splitlines()
    assert same is False and first.startswith("1 of 6 tensors differ; ")
    assert line.startswith("  norm.weight: ") and len(line.split()) == 1 + 2 + 1 + 2


def test_tensors_that_changed_places_are_found_and_named(tensors: dict[str, Tensor]) -> None:
    """Elements of one tensor that did are for the canary to find."""
    k, v = "k_proj.weight", "v_proj.weight"
    same, text = compare(sums(tensors), sums(tensors | {k: tensors[v], v: tensors[k]}))
    assert same is False and text.startswith("2 of 6 tensors differ; ")
    assert {line.split(":")[0].strip() for line in text.splitlines()[1:]} == {k, v}


def test_those_that_differ_most_come_first(tensors: dict[str, Tensor]) -> None:
    other = {name: tensor * 2 for name, tensor in tensors.items()} | {"o_proj.weight": torch.ones(8, 16) * 9}
    lines = compare(sums(tensors), sums(other))[1].splitlines()
    assert (len(lines), lines[-1]) == (7, "  and 1 more")
    assert lines[1].startswith("  o_proj.weight: ")


def test_rounding_of_the_server_is_no_difference(tensors: dict[str, Tensor]) -> None:
    same, text = compare(sums(tensors), sums({name: t.bfloat16() for name, t in tensors.items()}))
    agree, types = text.splitlines()
    assert same is True and agree.startswith(AGREE)
    assert types == "Trainer/server dtypes: float32 and bfloat16"


def test_what_cannot_be_compared(tensors: dict[str, Tensor]) -> None:
    ours = sums(tensors)
    theirs = {name: one for name, one in ours.items() if name != "norm.weight"}
    theirs["w13_weight"] = theirs.pop("q_proj.weight")
    theirs["o_proj.weight"] = Checksum("float8_e4m3fn", 128, 1.0, 1.0)
    same, text = compare(ours, theirs)
    agree, alone = text.splitlines()
    assert same is None and "(3 tensors)" in agree
    assert alone == "Not compared (quantised, or on one side only): 4, such as norm.weight"
    assert compare(ours, {})[0] is None


@pytest.mark.parametrize(("count", "gap"), [(8, 0.0), (16, 0.0), (12, math.inf), (0, math.inf)])
def test_as_many_elements(count: int, gap: float) -> None:
    assert difference(checksum(torch.ones(8)), checksum(torch.ones(count))) == gap


@pytest.mark.parametrize("at", [0.02, 1.0])
def test_one_bf16_step_of_one_element_shows(at: float) -> None:
    """Also in another order, which rounds the sums otherwise: copies and shards come in any."""
    old = torch.randn(2**22, generator=torch.Generator().manual_seed(1)).bfloat16()
    old[5] = at
    new = old.clone()
    new[5] = torch.nextafter(old[5], torch.tensor(9.0).bfloat16())
    shuffled = checksum(old[: 2**20].flip(0)) + checksum(old[2**20 :].flip(0))
    assert difference(checksum(old), shuffled) == 0
    assert difference(checksum(new), shuffled) > 0


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


def of_worker(model: Model) -> dict[str, Checksum]:
    extension = plugin.WorkerExtension()
    extension.get_model = lambda: model
    return {name: Checksum.from_words(words) for name, words in getattr(extension, CHECKSUMS)().items()}


def test_a_worker_on_a_cpu(tensors: dict[str, Tensor]) -> None:
    ours, embedding = sums(tensors), tensors["embed.weight"]
    theirs = of_worker(Model(tensors, embedding))
    packed = {f"{name}.weight (packed)" for name in ("embed", "q_proj", "k_proj", "v_proj", "o_proj")}
    assert theirs.keys() == packed | {"embed.weight", "norm.weight"}
    assert compare(ours, theirs)[0] is True
    other_keys = Model(tensors | {"k_proj.weight": torch.ones(8, 8)}, embedding)
    for other, name in ((Model(tensors, embedding + 1), "embed"), (other_keys, "k_proj")):
        same, text = compare(ours, of_worker(other))
        assert same is False
        assert [line.split(":")[0] for line in text.splitlines()[1:]] == [f"  {name}.weight (packed)"]


def test_serve_starts_vllm_with_the_extension_that_the_trainer_asks() -> None:
    module, _, name = flags.EXTENSION.rpartition(".")
    assert getattr(plugin, name).__module__ == module


def proof(answer: object) -> Proof:
    """Of one tensor of ones, from a server that answers, or fails, so."""
    server = Mock(url="http://server", post=AsyncMock(side_effect=[answer]), without_key=str)
    return asyncio.run(prove(server, sums({"a": torch.ones(3)}), {}))


def test_what_the_server_answers() -> None:
    good, bad = (checksum(tensor).to_words() for tensor in (torch.ones(3), torch.zeros(3)))
    assert proof({"results": [{"a": good}, {"a": good}]})[0] is True
    same, text = proof({"results": [{"a": good, "a (packed)": bad}]})
    assert same is False and "a (packed)" in text
    for other in ({"b": good}, {"a": ["float8_e4m3fn", *good[1:]]}):
        assert proof({"results": [other]})[0] is None
    tensors = [{"a": ["float32", "3"]}, {"a": ["float32", "x", "3", "3"]}, "x"]
    for answer in (None, {}, {"results": None}, *({"results": [one]} for one in tensors)):
        same, text = proof(answer)
        assert same is None and "the answer has no checksums in it" in text
    same, text = proof(ServerLost(f"'CPUWorker' object has no attribute '{CHECKSUMS}'"))
    assert same is None and "megatron-fspo serve" in text
    same, text = proof(Refused("no"))
    assert same is None and text.endswith(": no")
    with pytest.raises(ServerLost, match="out of memory"):
        proof(ServerLost("out of memory"))
