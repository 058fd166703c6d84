"""Every supported family in every kind of layout: log-probs against transformers, both checkpoint formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from families import CONVERTED, FAMILIES, LAYOUTS, fits, reference, sequences, write_checkpoint
from launch import run_worker
from megatron_fspo.weights import HFReader, read_architecture, write_megatron_checkpoint

pytestmark = pytest.mark.slow

CASES = [
    (layout, family)
    for layouts in LAYOUTS.values()
    for layout, parallel in layouts.items()
    for family in FAMILIES
    if fits(family, parallel)
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_checkpoint(family, folder / family)
        arch = read_architecture(folder / family)
        write_megatron_checkpoint(folder / f"{family}-megatron", HFReader(folder / family), arch)
    return folder


@pytest.fixture(scope="module")
def references(checkpoints: Path) -> dict[str, list[Tensor]]:
    return {family: reference(checkpoints / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Path:
    """Also loads and saves distributed checkpoints with Megatron: see the worker."""
    out = tmp_path_factory.mktemp("scores")
    for world in LAYOUTS:
        worker = Path(__file__).with_name("families_worker.py")
        run_worker(worker, str(checkpoints), str(out), str(world), nproc=world)
    return out


@pytest.mark.parametrize(("layout", "family"), CASES)
def test_log_probs_are_those_of_transformers(
    results: Path, references: dict[str, list[Tensor]], layout: str, family: str
) -> None:
    got = load_file(results / f"{layout}-{family}.safetensors")["scores"]
    want = torch.cat(references[family])
    assert got.shape == want.shape == (sum(len(ids) - 1 for ids in sequences()),)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize(("layout", "family"), [case for case in CASES if case[0] in CONVERTED])
def test_a_converted_checkpoint_scores_the_same_bit_for_bit(results: Path, layout: str, family: str) -> None:
    one, other = (
        load_file(results / f"{layout}-{folder}.safetensors")["scores"]
        for folder in (family, f"{family}-megatron")
    )
    assert torch.equal(one, other)


def test_scaled_rope_and_the_order_of_the_router_matter(
    checkpoints: Path, references: dict[str, list[Tensor]], tmp_path: Path
) -> None:
    """So that the tests above would see them missing."""
    for family, change in (
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        ("moe_raw", {"norm_topk_prob": True}),
    ):
        shutil.copytree(checkpoints / family, tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_bytes())
        (tmp_path / family / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
        other = torch.cat(reference(tmp_path / family))
        assert (other - torch.cat(references[family])).abs().max() > 1e-2
