"""The main job in other layouts: the same rollouts, losses and weights as tensor parallel."""

from __future__ import annotations

import math
import pickle
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch import REPO, forked, why
from megatron_fspo.weights import read_manifest
from megatron_fspo.weights.folder import digest, read_sums, write_sums
from runs import numbers, rows, run, trained

pytestmark = pytest.mark.slow

PLAIN = ("--parallel.tensor", "1", "--parallel.sequence", "false")
LAYOUTS = {
    "tensor": (),
    "pipeline": (*PLAIN, "--parallel.pipeline", "2", "--batch.balance", "attention"),
    "context": (*PLAIN, "--parallel.context", "2", "--model.recompute", "full"),
    "optimizer": (
        *(*PLAIN, "--parallel.distributed-optimizer", "true", "--parallel.overlap-grad-reduce", "true"),
        *("--checkpoint.asynchronous", "true"),
    ),
}
SIZES = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "context": {"context": 2}, "optimizer": {}}
# A penalty, so that the reference policy is in every layout; several packs to a step.
COMMON = "--run.steps 2 --checkpoint.every 1 --loss.kl-coef 0.5 --batch.max-tokens 512".split()
COMMON += ["--rollout.max-response-tokens", "100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for name, layout in LAYOUTS.items():
        trained(folder, name, *COMMON, *layout)
    return folder


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "tensor"])
def test_every_layout_samples_learns_and_reports_the_same(folder: Path, name: str) -> None:
    """One step: four optimizer steps on one rollout. (Later ones may differ where two tokens nearly tie.)"""
    got, want = (numbers(rows(folder, run_name)[1]) for run_name in (name, "tensor"))
    assert got.keys() == want.keys()
    second = rows(folder, name)[2]  # the penalty counts once the policy has moved
    assert 0 < got["actor/kl_loss"] < second["actor/kl_loss"] < 1 and math.isfinite(second["actor/grad_norm"])
    for metric, value in want.items():
        if metric.startswith(("fspo/on_policy", "rollout/logprob_abs_diff")):
            assert got[metric] < 1e-4
        elif metric == "rollout/mismatch_outliers":
            continue  # of rounding errors, which other packs have others of
        elif metric == "fspo/exponent_fit":
            assert got[metric] == pytest.approx(value, abs=1e-2, nan_ok=True)
        else:
            assert got[metric] == pytest.approx(value, rel=2e-3, abs=2e-5, nan_ok=True), metric


def before_second_step(folder: Path, name: str, copy: str) -> None:
    """A copy of a run that goes on from its first step."""
    shutil.copytree(folder / name, folder / copy)
    shutil.rmtree(folder / copy / "checkpoints/step_000002")
    shutil.rmtree(folder / copy / "hf")


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "tensor"])
def test_a_run_resumes_from_its_checkpoint_with_the_same_numbers(folder: Path, name: str) -> None:
    """Weights, moments and counters came back: the second step is the uninterrupted run's."""
    again = f"{name}-again"
    before_second_step(folder, name, again)
    trained(folder, again, *COMMON, *LAYOUTS[name], "--resume")
    want, got = (numbers(rows(folder, run_name)[-1]) for run_name in (name, again))
    assert got == pytest.approx(want, rel=1e-6, nan_ok=True)
    weights, resumed = (load_file(folder / run_name / "hf/model.safetensors") for run_name in (name, again))
    assert all(torch.allclose(resumed[key], weights[key], rtol=1e-6, atol=1e-8) for key in weights)


def test_a_run_resumes_on_half_the_ranks(folder: Path) -> None:
    """The same global batch, its loss and gradients; the optimizer's parts of two ranks are one rank's."""
    before_second_step(folder, "optimizer", "half")
    trained(folder, "half", *COMMON, *PLAIN, "--resume", nproc=1)
    want, got = (numbers(rows(folder, run_name)[-1]) for run_name in ("optimizer", "half"))
    for row in (want, got):
        del row["rollout/mismatch_outliers"]  # of rounding errors, which other batches have others of
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6, nan_ok=True)
    weights, resumed = (load_file(folder / name / "hf/model.safetensors") for name in ("optimizer", "half"))
    assert all(torch.allclose(resumed[key], weights[key], rtol=1e-4, atol=1e-6) for key in weights)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_of_the_run_converts_to_its_export(folder: Path, tmp_path: Path, name: str) -> None:
    checkpoint, export = folder / name / "checkpoints/step_000002", folder / name / "hf"
    source = tomllib.loads((folder / name / "config.toml").read_text())["model"]["checkpoint"]
    tool = [str(REPO / "tools/convert_megatron_to_hf.py"), str(checkpoint), str(tmp_path / "out")]
    done = forked([*tool, "--hf", source], nproc=0)
    assert done.returncode == 0, why(done.stderr)
    converted, exported = (load_file(path / "model.safetensors") for path in (tmp_path / "out", export))
    assert converted.keys() == exported.keys()
    for key, tensor in exported.items():
        assert converted[key].dtype == tensor.dtype and torch.equal(converted[key], tensor), key
    written, made = (read_manifest(path) for path in (export, tmp_path / "out"))
    assert written is not None and made is not None and written.tensors == made.tensors
    assert all(written.layout[key] == size for key, size in SIZES[name].items())


def test_a_hostile_checkpoint_runs_no_code_on_resume(folder: Path, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    shutil.copytree(folder / "tensor", folder / "hostile")
    data = folder / "hostile/checkpoints/step_000002/torch_dist"
    (data / ".metadata").write_bytes(pickle.dumps(Payload()))
    sums = {name: digest(data.parent / name) for name in read_sums(data.parent)}
    write_sums(data.parent, sums)
    config = (folder / "hostile/config.toml").read_text()
    result = run(folder, "hostile", "--run.steps", "3", *COMMON[2:], "--resume")
    assert result.returncode != 0
    assert f"megatron-fspo: {data / '.metadata'} is damaged or unsafe" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert (folder / "hostile/config.toml").read_text() == config


def test_bf16_trains_with_log_probs_of_fp32_logits(tmp_path: Path) -> None:
    """Weights and activations rounded, log-probs not: the old pass equals the first update to the bit."""
    trained(tmp_path, "bf16", "--run.steps", "1", "--model.dtype", "bfloat16")
    row = next(row for row in rows(tmp_path, "bf16") if row["step"] == 1)
    assert row["fspo/on_policy_abs_s_max"] == 0
    assert row["rollout/logprob_abs_diff/mean"] < 0.02  # the sampler's activations round in other places
    assert 0 < row["actor/grad_norm"] < math.inf
