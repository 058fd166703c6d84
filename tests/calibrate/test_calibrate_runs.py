"""``calibrate`` as a program, on real ranks, and the run that reads what it wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import forked, why
from runs import CONFIG, SMALL, rows, trained

sys.path.insert(0, str(CONFIG.parent))

import make_experts

pytestmark = pytest.mark.slow

ALONE = ["--parallel.tensor", "1", "--parallel.sequence", "false"]
SIZES = [*SMALL, "--rollout.prompts", "16", "--model.dtype", "bfloat16", "--evaluation.every", "0"]
SIZES += ["--rollout.max-response-tokens", "100"]


def calibrate(folder: Path, *words: str, nproc: int = 2) -> Any:
    """What it printed as JSON; 0 ranks: in one process that is none."""
    command = ["-m", "megatron_fspo", "calibrate", "--config", str(CONFIG), *SIZES]
    done = forked([*command, "--run.folder", str(folder), "--json", *words], nproc=nproc)
    assert done.returncode == 0, why(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrations")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    words = ["--run.name", "noise", "--emulate", "blockwise", "tensorwise", "--rollout.top-p", "0.99"]
    return calibrate(folder, *words)


def by_kind(found: Any) -> dict[tuple[str, str], Any]:
    return {(one["kind"], one["precision"]): one for one in found["comparisons"]}


def test_the_passes_of_a_run_are_compared(found: Any, folder: Path) -> None:
    """bf16 differs from fp32 by less than FP8 does from bf16; the same pass does not differ from itself."""
    one = by_kind(found)
    assert one["repeat", "bfloat16"]["sigma"][0] == 0
    for kind in ("precision", "updates"):
        sigma = {name: one[kind, name]["sigma"][0] for name in ("bfloat16", "blockwise", "tensorwise")}
        assert 1e-4 < sigma["bfloat16"] < 0.5 * min(sigma["blockwise"], sigma["tensorwise"]), kind
        assert one[kind, "blockwise"]["emulated"] and not one[kind, "bfloat16"]["emulated"]
    # The sampler's log-probs are those of a cut vocabulary, so larger than the trainer's.
    assert one["sampler", "bfloat16"]["drift"][2] < 0
    assert found["first_updates"][0] > 0
    assert found["responses"] == 64 and found["prompts"] == 16
    left = sorted(path.name for path in (folder / "noise.calibrate").iterdir())
    assert {"calibration.json", "config.toml", "index.html"} <= set(left) and "weights" not in left
    assert json.loads((folder / "noise.calibrate/calibration.json").read_text()) == found


def test_another_layout_finds_the_same(found: Any, folder: Path) -> None:
    """Tensor and sequence parallel: the same responses are scored. Sums of a product in bf16 come in another
    order, so that noise is other noise of the same size."""
    samples = [{"prompt_token_ids": [10, 5, 7, 11], "token_ids": [1 + i % 9] * (1 + i)} for i in range(40)]
    path = folder / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples))
    words = ["--responses", str(path), "--emulate", "mxfp8"]
    one = by_kind(calibrate(folder, "--run.name", "tp2", *words))
    assert {kind for kind, _ in one} == {"repeat", "packs", "precision"}
    other = by_kind(calibrate(folder, "--run.name", "one", *words, *ALONE, nproc=0))
    for key in (("precision", "bfloat16"), ("precision", "mxfp8")):
        assert one[key]["sigma"][0] == pytest.approx(other[key]["sigma"][0], rel=0.5), key
        assert one[key]["lengths"] == other[key]["lengths"] == list(range(1, 41))


def test_routes_of_a_mixture_flip_between_precisions(folder: Path) -> None:
    make_experts.main(folder / "experts")
    words = ["--config", str(CONFIG.parent / "moe.toml"), "--model.checkpoint", str(folder / "experts")]
    one = by_kind(calibrate(folder, "--run.name", "experts", *words, *SIZES))
    assert {kind for kind, _ in one} == {"repeat", "packs", "sampler", "precision", "updates"}
    flips = {kind: record.get("flips") for (kind, _), record in one.items()}
    assert flips["repeat"] is flips["packs"] is flips["sampler"] is None
    # Before the updates or after them.
    assert 0 < flips["precision"]["tokens"] < flips["updates"]["tokens"] < 0.2
    for kind in ("precision", "updates"):
        assert 0 < flips[kind]["sigma_without"][0] < one[kind, "bfloat16"]["sigma"][0], kind


def test_a_run_that_knows_its_noise(found: Any, folder: Path, tmp_path: Path) -> None:
    words = [*SIZES, "--loss.noise", str(folder / "noise.calibrate/calibration.json"), "--run.steps", "1"]
    trained(tmp_path, "wide", *words, "--loss.max-noise-clip-rate", "1")
    (row,) = rows(tmp_path, "wide")
    assert 0 <= row["fspo/noise_clip_rate"] <= 1
    assert (row["fspo/noise_clip_share"] is None) is (row["fspo/out_of_band"] == 0)
