"""A folder of adapters is read as it means, or not at all; PEFT itself is the oracle in tests/adapters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launch import REPO
from megatron_fspo.errors import InputError
from megatron_fspo.weights import Adapters, Architecture, read_adapters, read_architecture, write_adapters
from megatron_fspo.weights.table import TARGETS, adapter_shapes

BASE = REPO / "examples/make_sum/checkpoint"
ARCH = replace(read_architecture(BASE), adapters=Adapters(rank=4, scale=2.0, targets=("q", "o", "down")))


def factors(arch: Architecture = ARCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in adapter_shapes(arch).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert ARCH.adapters is not None
    write_adapters(tmp_path, factors().items(), ARCH.adapters, BASE)
    return tmp_path


def with_tensors(folder: Path, **changed: Tensor | None) -> None:
    tensors = load_file(folder / "adapter_model.safetensors") | changed
    save_file(
        {key: one for key, one in tensors.items() if one is not None}, folder / "adapter_model.safetensors"
    )


@pytest.mark.parametrize("targets", [TARGETS, ("v",)])
@pytest.mark.parametrize("scale", [0.5, 8 / math.sqrt(3)])
def test_what_is_written_is_read(targets: tuple[str, ...], scale: float, tmp_path: Path) -> None:
    adapters = Adapters(rank=3, scale=scale, targets=targets)
    arch = replace(ARCH, adapters=adapters)
    written = factors(arch)
    write_adapters(tmp_path, written.items(), adapters, BASE)
    read = read_adapters(tmp_path, arch)
    assert read.keys() == written.keys() and all(read[name].equal(written[name]) for name in read)


@pytest.mark.parametrize(
    "adapters",
    [
        Adapters(rank=4, scale=2.0 * (1 + 1e-6), targets=("q", "o", "down")),
        Adapters(rank=4, scale=4.0, targets=("q", "o", "down")),
        Adapters(rank=8, scale=2.0, targets=("q", "o", "down")),
        Adapters(rank=4, scale=2.0, targets=("q", "o")),
        Adapters(rank=4, scale=2.0, targets=("q", "o", "up")),
        Adapters(rank=4, scale=2.0, targets=("q", "o", "down", "up")),
    ],
)
def test_other_adapters_are_refused(folder: Path, adapters: Adapters) -> None:
    with pytest.raises(InputError):
        read_adapters(folder, replace(ARCH, adapters=adapters))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, -1])
def test_a_factor_that_is_not_finite_is_named(folder: Path, value: float, which: int) -> None:
    name = sorted(factors())[which]
    tensor = factors()[name]
    tensor.view(-1)[-1] = value
    with_tensors(folder, **{f"base_model.model.{name}": tensor})
    with pytest.raises(InputError, match=name):
        read_adapters(folder, ARCH)


@pytest.mark.parametrize(
    "change", ["transposed", "one row more", "flat", "int64", "missing", "another layer"]
)
def test_tensors_of_other_shapes_types_and_names(folder: Path, change: str) -> None:
    name = sorted(factors())[0]
    key, tensor = f"base_model.model.{name}", factors()[name]
    changed: dict[str, Tensor | None] = {
        "transposed": {key: tensor.t().contiguous()},
        "one row more": {key: torch.cat([tensor, tensor[:1]])},
        "flat": {key: tensor.flatten()},
        "int64": {key: tensor.long()},
        "missing": {key: None},
        "another layer": {key.replace("layers.0", "layers.99"): tensor},
    }[change]
    with_tensors(folder, **changed)
    with pytest.raises(InputError, match=r"lora_[AB]\.weight"):
        read_adapters(folder, ARCH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("r", one) for one in (-4, 0, "4", True, 4.0, None)),
        *(("lora_alpha", one) for one in (math.nan, math.inf, 10**400, [8], "8", None)),
        *(("use_dora", one) for one in (True, 1)),
        *(("a_key_of_tomorrow", one) for one in (True, 0.5, {"x": 1})),
        ("target_modules", "q_proj|o_proj|down_proj"),
        ("target_modules", ["q_proj", "o_proj"]),
    ],
)
def test_keys_of_the_configuration(folder: Path, key: str, value: object) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError):
        read_adapters(folder, ARCH)
    path.write_text(json.dumps({**config, "a_key_of_tomorrow": None, "another": False, "third": []}))
    assert len(read_adapters(folder, ARCH)) == len(factors())
