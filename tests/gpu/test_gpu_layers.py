"""Layers on a GPU against float64: every layout's gradient in bf16, and the parity tests of the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend import FAKE
from launch import REPO, environment, torchrun, why

pytestmark = pytest.mark.gpu

# What `verify` finds in bf16 with Transformer Engine's modules on a CPU, their kernels replaced: the relative
# error of a gradient, and of log-probs in nats. Both are of the precision, so a GPU's are much the same.
# The gradient of distillation, a difference of log-probs, is the worst; without it: 0.039.
BF16 = {"gradient_error": 0.059, "log_prob_error": 0.045}


def test_the_gradient_of_every_layout(
    needs: Any, machine: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts that fit the GPUs; ``verify`` itself says what is too far off."""
    needs()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # for the local layers' float32
    ranks = 1 if FAKE else 2 ** (machine["count"].bit_length() - 1)
    engine = machine["engine"] is None
    which = ["--layouts", "recompute", "moe"] if FAKE else ["--all"]
    dtype = ["--dtype", "bfloat16"] if engine else []
    words = ["-m", "megatron_fspo", "verify", *which, *dtype, "--json", str(tmp_path / "cases.json")]
    done = torchrun(words, nproc=ranks, timeout=900)
    assert done.returncode == 0, done.stdout + why(done.stderr)
    cases = json.loads((tmp_path / "cases.json").read_text(encoding="utf-8"))["cases"]
    if not FAKE and ranks > 1:
        assert any("cp2" in case["layout"] for case in cases), "no attention spread over GPUs was looked at"
    for dtype_name in sorted({case["dtype"] for case in cases}):
        rows = [case for case in cases if case["dtype"] == dtype_name]
        layouts = len({case["layout"] for case in rows})
        for key, what in (("gradient_error", "gradient"), ("log_prob_error", "log-probs")):
            worst = max(case[key] for case in rows)
            beside = BF16[key] if dtype_name == "bfloat16" else ""
            table(
                f"verify, {dtype_name}",
                f"{what}, worst of {layouts} layouts (beside: on a CPU)",
                worst,
                beside,
            )
            if FAKE:
                assert worst == pytest.approx(BF16[key], rel=0.5), "say so in BF16"
            elif beside:
                assert worst < 3 * beside


@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
def test_the_parity_tests_of_the_cpu(needs: Any, machine: Any, table: Any, layers: str) -> None:
    """In float32, of which no kernel keeps only the first digits: TF32 is off."""
    engine = layers == "transformer_engine"
    needs(engine=engine, real="`make test-te` has these tests as they are")
    files = ["test_parity.py", "test_families.py", *(["test_build.py"] if machine["count"] > 1 else [])]
    kind = "auto" if engine else "local"
    more = {"TEST_BACKEND": "cuda", "TEST_LAYERS": kind, "NVIDIA_TF32_OVERRIDE": "0"}
    words = [
        "-m",
        "pytest",
        *("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--numprocesses", "8"),
        *(f"tests/mcore/{f}" for f in files),
    ]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPO,
        env={**environment(**more), "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)}
    table("parity, float32", f"{layers}: tests that passed", counts.get("passed", 0), sum(counts.values()))
    assert done.returncode == 0 and counts["passed"], done.stdout[-6000:] + why(done.stderr)


@pytest.mark.parametrize("layers", ["transformer_engine", "local"])
def test_attention_spread_over_two_gpus(
    needs: Callable[..., None], measured: Any, table: Any, layers: str
) -> None:
    """Log-probs of long responses under context parallel are those of one GPU."""
    if layers == "transformer_engine":
        needs(engine=True, real="Transformer Engine's attention without kernels knows no context parallel")
    needs(gpus=2)
    found = measured(f"ring:{layers}", ranks=2)
    table("context parallel", f"{layers} ({found['attention']}): log-probs, σ", found["sigma"], "", "nats")
    table("context parallel", f"{layers}: drift of log-probs", found["mean"], "", "nats")
    assert found["attention"] in ("flash", "fused", "local")
    assert 0 < found["sigma"] < 0.05, "exactly 0: was anything spread?"
    # Rounding has no direction; a token that attends to what it must not see has.
    assert abs(found["mean"]) < 5 * found["sigma"] / found["tokens"] ** 0.5 + 1e-4
