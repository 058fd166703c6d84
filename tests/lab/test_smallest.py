"""The job that stands for a run has all the parts of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hub_configs import CONFIGS
from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.trace.command import make_smallest
from megatron_fspo.mcore.machine.sizes import check_world

DENSE, EXPERTS = REPO / "examples/qwen3_8b", REPO / "examples/qwen3_30b_a3b"


@pytest.mark.parametrize(
    ("files", "world", "keys", "ranks", "layers", "sizes"),
    [
        ((), 8, "", 2, 2, {"tensor": 2, "sequence": True}),
        (("two_nodes",), 64, "--parallel.context 2", 8, 2, {"tensor": 2, "context": 2}),
        (("two_nodes", "fp8"), 8, "", 4, 3, {"tensor": 2}),
        ((), 64, "--parallel.tensor 2 --parallel.pipeline 8", 12, 3, {"pipeline": 3, "tensor": 2}),
        (
            (),
            64,
            "--parallel.tensor 2 --parallel.pipeline 4 --parallel.virtual_pipeline 3",
            16,
            8,
            {"pipeline": 4, "virtual_pipeline": 2},
        ),
        (("experts", "one_node"), 4, "--parallel.expert 4", 2, 2, {"tensor": 2, "expert": 2}),
        (("experts",), 8, "", 4, 2, {"tensor": 2, "expert": 4}),
        (("experts",), 16, "", 8, 2, {"tensor": 2, "expert": 4}),
    ],
)
def test_each_axis_is_as_small_as_shows_the_pattern(
    files: tuple[str, ...], world: int, keys: str, ranks: int, layers: int, sizes: dict[str, int]
) -> None:
    paths, folder = [DENSE / "run.toml"], DENSE
    for name in files:
        folder = EXPERTS if name == "experts" else folder
        paths.append(folder / f"{'run' if name == 'experts' else name}.toml")
    config = load_config(paths, keys.split())
    model = "qwen3-30b-a3b" if "experts" in files else "qwen3-8b"
    small, asked = make_smallest(config, model, world)
    assert (asked.world, asked.layers) == (ranks, layers)
    assert asked.experts == (16 if "experts" in files else None)
    assert {name: getattr(small.parallel, name) for name in sizes} == sizes
    check_world(small.parallel, ranks)
    whole, p = config.parallel, small.parallel
    assert (world // whole.model_size > 1) == (ranks // p.model_size > 1)
    copies, small_copies = (
        n // parallel.pipeline // parallel.expert for n, parallel in ((world, whole), (ranks, p))
    )
    assert (copies > 1) == (small_copies > 1)


def test_layers_that_differ_in_windows_only_communicate_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["OLMo-3-32B"]), encoding="utf-8")
    keys = "--parallel.tensor 4 --parallel.pipeline 4 --parallel.virtual_pipeline 2".split()
    _, asked = make_smallest(load_config([DENSE / "run.toml"], keys), str(tmp_path), 32)
    assert (asked.world, asked.layers) == (16, 8)
