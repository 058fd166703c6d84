"""The production path (decode, score, loss, gradient, export) against transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cases import KINDS, LAYOUTS, Reference, drift, fits, reference, samples
from launch import run_worker

pytestmark = pytest.mark.slow

CASES = [
    (name, kind) for layouts in LAYOUTS.values() for name in layouts for kind in KINDS if fits(kind, name)
]
SPLITS = [512, 70]


@pytest.fixture(scope="module")
def checkpoints(random_checkpoints: dict[str, Path], moe_checkpoints: dict[str, Path]) -> dict[str, Path]:
    return random_checkpoints | {"moe": moe_checkpoints["moe"]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    out = tmp_path_factory.mktemp("parity")
    for world in LAYOUTS:
        arguments = [str(out), *map(str, checkpoints.values()), str(world)]
        run_worker(Path(__file__).with_name("worker.py"), *arguments, nproc=world)
    return out


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, Reference]:
    return {kind: reference(folder) for kind, folder in checkpoints.items()}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_step_equals_the_float64_oracle(
    results: Path, references: dict[str, Reference], layout: str, kind: str, split: int
) -> None:
    got = load_file(results / f"{layout}-{kind}-{split}.safetensors")
    want = references[kind]
    assert (got["log_probs"] - torch.cat(want.log_probs)).abs().max() < 1e-5
    drifts = torch.stack([drift(i).double().sum() for i in range(len(samples()))])
    assert (got["sums"] - drifts).abs().max() < 1e-4
    assert got["clipped"].sum() == want.clipped and 2 <= want.clipped <= 10
    assert got["objective"].item() == pytest.approx(want.objective, abs=1e-5)
    assert want.gradients.keys() == {name.removeprefix("grad.") for name in got if name.startswith("grad.")}
    for name, gradient in want.gradients.items():
        error = (got[f"grad.{name}"] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"
    norm = torch.stack([gradient.norm() for gradient in want.gradients.values()]).norm()
    assert got["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_the_sampler_agrees_with_the_trainer(
    results: Path, references: dict[str, Reference], layout: str, kind: str
) -> None:
    """Sampled log-probs are those of the training pass, the same responses come from every layout, and the
    likeliest tokens are those of transformers."""
    got = load_file(results / f"{layout}-{kind}-512.safetensors")
    assert got["decode_error"] < 2e-5
    one = load_file(results / f"tp1-{kind}-512.safetensors")
    assert got["decoded"].tolist() == one["decoded"].tolist()
    assert got["greedy"].tolist() == references[kind].greedy.tolist()


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_export_returns_the_checkpoint_bit_for_bit(
    results: Path, checkpoints: dict[str, Path], layout: str, kind: str
) -> None:
    got = load_file(results / f"export-{layout}-{kind}" / "model.safetensors")
    want = load_file(checkpoints[kind] / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
