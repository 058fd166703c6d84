"""The embedded engine's decoder scores tokens as the packed pass does; routes are replayed; checkpoints have
the biases of routers: in every family, in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_families
from launch import found_by

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("family_worker.py")
SIGMOID = {"glm4_moe", "deepseek_v3", "moonlight"}
MIXTURES = SIGMOID | {"qwen2_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of all families; with four layers, so that each of two stages has some with experts. All layers of
    ``moonlight`` have experts."""
    folder = tmp_path_factory.mktemp("tiny")
    more = {"moonlight": {"first_k_dense_replace": 0}}
    return [
        str(tiny_families.write(family, folder / family, num_hidden_layers=4, **more.get(family, {})))
        for family in tiny_families.NEW
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_every_family(world: int, folders: list[str], tmp_path: Path) -> None:
    found = found_by(WORKER, tmp_path, str(world), *folders, nproc=world)
    layouts = ["tp1"] if world == 1 else ["tp2.sp", "pp2"]
    cases = {f"{family} {layout}" for family in tiny_families.NEW for layout in layouts}
    if world == 2:
        cases |= {f"{family} ep2" for family in MIXTURES} | {f"{family} saved" for family in SIGMOID}
    assert found.keys() == cases
    gaps = {case: values["decode"] for case, values in found.items() if "decode" in values}
    assert len(gaps) == len(cases) - (len(SIGMOID) if world == 2 else 0)
    assert {case: gap for case, gap in gaps.items() if not gap < 1e-5} == {}
    replayed = {case: values for case, values in found.items() if "replay" in values}
    assert {case.split()[0] for case in replayed} == MIXTURES
    for case, values in replayed.items():
        assert values["replay"] == values["other routes"] == 0 and values["moved"] > 0.01, case
    assert [values["bias"] for values in found.values() if "bias" in values] == [0] * 3 * (world == 2)
