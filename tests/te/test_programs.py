"""The project's own programs with layers of Transformer Engine, on two ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from launch import forked, why
from runs import CONFIG, PROGRAM, SMALL, numbers, rows, train_words, trained

FP8 = "--model.dtype bfloat16 --fp8.recipe blockwise --rollout.max-response-tokens 100".split()
VERIFIED = ["tp2.sp.do.recompute", "pp2.vpp2", "dp2.do.overlap"]


def test_the_gradient_of_every_layout_without_context_parallel(tmp_path: Path) -> None:
    """In bf16; test_parity.py has the same in float32."""
    out = tmp_path / "cases.json"
    words = ["verify", "--dtype", "bfloat16", "--json", str(out), "--layouts", *VERIFIED]
    done = forked([*PROGRAM, *words], nproc=2)
    assert done.returncode == 0, f"{done.stdout}\n{why(done.stderr)}"
    assert {case["layout"] for case in json.loads(out.read_text())["cases"]} == set(VERIFIED)


def test_the_demo_trains_in_fp8_exports_and_resumes(tmp_path: Path) -> None:
    words = [*FP8, "--run.steps", "2", "--checkpoint.every", "1", "--evaluation.every", "2"]
    trained(tmp_path, "whole", *words)
    found = rows(tmp_path, "whole")
    assert [row["step"] for row in found] == [0, 1, 2]
    # The packs of the old pass are those of training: nothing has moved before the first update.
    assert all(row["fspo/fp8_modules"] == 8 for row in found if row["step"])  # of two layers
    first = [row["fspo/on_policy_abs_s_max"] for row in found if row["step"]]
    assert 0.0 in first and set(first) <= {0.0, None}  # none, where no group of the first update had variance
    assert all(row["actor/grad_norm"] > 0 for row in found if row["step"])
    weights = (tmp_path / "whole/hf/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "whole/checkpoints/step_000002")
    trained(tmp_path, "whole", *words, "--resume")
    assert list(map(numbers, rows(tmp_path, "whole"))) == list(map(numbers, found))
    assert (tmp_path / "whole/hf/model.safetensors").read_bytes() == weights


def test_a_run_in_which_s_is_not_zero_before_the_first_update_ends(tmp_path: Path) -> None:
    """Stale copies of the weights in the old pass: none in the first step, those of the step before later."""
    words = [*FP8, "--run.steps", "3", "--evaluation.every", "0"]
    program = [str(Path(__file__).with_name("stale_worker.py"))]
    done = forked([*program, *train_words(tmp_path, "stale", *words)], nproc=2, timeout=120)
    assert done.returncode != 0
    said = next(line for line in done.stderr.splitlines() if "S is not 0" in line)
    assert "step 2: S is not 0 before the first update, but " in said
    assert "fp8.recipe = blockwise" in said and "fresh FP8 copies of the weights" in said
    assert [row["step"] for row in rows(tmp_path, "stale")] == [1]


def test_noise_is_measured_in_fp8_beside_bf16(tmp_path: Path) -> None:
    words = ["calibrate", "--config", str(CONFIG), "--run.folder", str(tmp_path), "--json"]
    words += [*SMALL, *FP8]
    done = forked([*PROGRAM, *words], nproc=2)
    assert done.returncode == 0, why(done.stderr)
    found = {one["kind"]: one for one in json.loads(done.stdout.splitlines()[-1])["comparisons"]}
    assert set(found) == {"repeat", "packs", "sampler", "precision", "updates"}
    assert all(one["precision"] == "blockwise" and not one["emulated"] for one in found.values())
    # The same packs give the same S, and with blocks other packs do too; bf16 does not.
    assert found["repeat"]["sigma"][0] == found["packs"]["sigma"][0] == 0
    assert all(0.003 < found[kind]["sigma"][0] < 1 for kind in ("sampler", "precision", "updates"))
