"""The benchmarks start, measure on a size that fits a test, and the pages show what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import (
    against_trl,
    async_rollouts,
    cold_start,
    convert,
    cosine,
    cpu_products,
    decoding,
    delta_sync,
    evidence,
    head_on_gpu,
    hybrid,
    logprob_head,
    long_responses,
    plain_run,
    regimes,
    rewards,
    rollout_client,
    sft_against_trl,
    share_prompts,
    steady_memory,
    triton_head,
)
from launch import REPO, environment, python
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.sweep.file import Sweep, read_sweep

RESULTS = REPO / "benchmarks/results"
SCRIPTS = sorted(path for path in (REPO / "benchmarks").glob("*.py") if "__main__" in path.read_text())
HELP = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], "benchmarks"
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
"""


@pytest.mark.slow
def test_every_script_starts_from_the_root_with_nothing_on_the_path() -> None:
    scripts = [str(path.relative_to(REPO)) for path in SCRIPTS]
    assert len(scripts) > 15
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [sys.executable, "-c", HELP, *scripts], cwd=REPO, env=env, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("usage: ") == len(scripts)


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "shown"),
    {
        "against_trl": (
            lambda results: against_trl.table(results, "step", "TRL"),
            lambda results: against_trl.table(results, "update", "plain torch"),
        ),
        "async_rollouts": (async_rollouts.table,),
        "cold_start": (cold_start.table,),
        "convert": (convert.table,),
        "cosine": (cosine.table,),
        "decoding": (decoding.table,),
        "delta_sync": (delta_sync.table,),
        "hybrid": (hybrid.table,),
        "gpu_h200_head": (head_on_gpu.table,),
        "logprob_head": (lambda report: logprob_head.table(report["results"]),),
        "regimes": (regimes.table,),
        "rewards": (rewards.table,),
        "sft_against_trl": (sft_against_trl.table,),
        "share_prompts": (share_prompts.table,),
        "steady_memory": (steady_memory.table,),
        "cpu_products": (cpu_products.table,),
        "triton_head": (triton_head.builds_table,),
        "rollout_client": (rollout_client.table,),
    }.items(),
)
def test_the_page_shows_what_was_measured(name: str, shown: Sequence[Callable[[Any], str]]) -> None:
    pages = {"rewards": "rewards.md", "cosine": "when_it_matters.md", "regimes": "when_it_matters.md"}
    pages |= {"hybrid": "adding_a_model.md", "cold_start": "real_model.md"}
    report, text = read(name), (REPO / "docs" / pages.get(name, "performance.md")).read_text(encoding="utf-8")
    assert report.get("command", "") in text
    assert all(table(report) in text for table in shown)


def test_tier_1_is_fast_enough() -> None:
    report = read("rewards")
    assert report["tier1_of_aim"] >= 1 and report["pool_of_workers_alone"] >= 0.8
    assert report["responses"] == 1024 and report["sleep_of_longest"] < 1.5
    # Machines differ threefold, and this one may be busy.
    assert max(rewards.tier1(2000) for _ in range(5)) > rewards.AIM / 5, "here too"


def test_figures_are_of_the_settings_that_are_there() -> None:
    """Changed settings need the command again."""
    made = [part for part in evidence.PARTS if (RESULTS / f"evidence_{part}.json").exists()]
    assert made == [*evidence.PARTS]
    for part in made:
        sweep = read_sweep(REPO / f"benchmarks/evidence/{part}.toml")
        kept = read(f"evidence_{part}")["sweep"]
        kept["arms"].pop("noise_signal", None)  # whose width was removed after its runs
        if "drift" in kept["arms"]:
            kept["arms"]["drift"]["loss"]["drift"] = "auto"  # k3, which was removed after its runs
        assert Sweep.model_validate(kept) == sweep
    assert read("long_responses")["run"] == tomllib.loads(long_responses.CONFIG.read_text(encoding="utf-8"))


def test_phases_from_a_cold_start_are_what_the_page_says() -> None:
    def config_of(name: str, *words: str) -> Config:
        configs, *_ = cold_start.PHASES[name]
        return load_config([cold_start.EXAMPLE / config for config in configs], words)

    sft, fspo = config_of("sft"), config_of("fspo")
    distil = config_of("distil", "--teacher.checkpoint", "teacher")
    assert sft.supervised and not fspo.supervised
    assert {config.run.steps for config in (sft, fspo, distil)} == {16}
    assert (fspo.loss.kl_coef, fspo.reward.weight) == (0, 1)
    assert (distil.loss.kl_coef, distil.reward.weight) == (1, 0), "the teacher alone"


@pytest.mark.slow
def test_conversion_takes_the_memory_of_blocks_not_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 8, "tie_word_embeddings": False}
    monkeypatch.setitem(convert.MODELS, "small", convert.MODELS["qwen3-0.6b"] | sizes)
    report = convert.measure(tmp_path, "small")
    assert report["bytes"] > 850e6
    base = report["steps"]["copy"]["peak_mib"]
    for step in ("to Megatron", "to Hugging Face", "compare"):
        assert report["steps"][step]["peak_mib"] < base + 1000, step


@pytest.mark.slow
def test_the_heads_peak_is_that_of_one_chunk_of_logits() -> None:
    size = {"hidden": 512, "vocab": 32768, "dtype": "fp32"}
    short, long = (
        logprob_head.in_fresh_process("measure", "ours", size | {"tokens": tokens}, passes=1)["peak_mib"]
        for tokens in (2048, 4096)
    )
    # The weight's gradient, one buffer of 256 tokens' logits, two gradients of hidden, and a few MiB.
    expected = (32768 * 512 + 256 * 32768 + 2 * 2048 * 512) * 4 / 2**20
    assert expected - 3 <= short <= expected + 10  # the warm-up left a little room
    assert long <= 1.15 * short


@pytest.mark.slow
def test_short_forms_run_and_keep_nothing() -> None:
    results = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    assert "evidence_bands.json" in started("evidence.py", "--short")
    found = json.loads(started("long_responses.py", "--short").splitlines()[-1])
    assert found["responses"] == 256 and found["prompts"] == 32
    noise, one, three = (found["differences"][name] for name in long_responses.DIFFERENCES)
    assert 0 < noise["noise"]["value"] < one["noise"]["value"] < three["noise"]["value"]
    assert results == {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}


def started(script: str, *words: str) -> str:
    """Run a benchmark from the root, and return what it prints."""
    done = python("-W", "ignore", f"benchmarks/{script}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pack_of_plain_torch_is_its_responses_one_by_one() -> None:
    folder = REPO / "examples/make_sum/checkpoint"
    model, plain = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=attention)
        for attention in ("alone", "eager")
    )
    # Inside, transformers computes norms in float32 all the same.
    responses = [(torch.arange(3), torch.arange(length) % 14) for length in (5, 1, 17)]
    (pack,) = plain_run.packs_of(responses, max_tokens=32)
    log_probs = pack.log_probs(model)
    pack.loss(log_probs, log_probs.detach()).backward()
    expected = []
    for prompt, response in sorted(responses, key=plain_run.size_of):
        logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    sum(-one.mean() for one in expected).backward()
    torch.testing.assert_close(log_probs, torch.cat(expected), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert len(plain_run.packs_of(responses, max_tokens=31)) == 2


def test_cosines_are_those_of_updates_that_are_known() -> None:
    """Of 800 responses whose updates are all of one size and at right angles."""
    lengths = torch.arange(800) // 100 + 1
    positive, clipped = torch.arange(800) % 2 == 0, torch.arange(800) % 100 < 19
    alike = cosine.cosines(torch.eye(800).double(), ~clipped, lengths, positive, seed=1)
    assert alike["clipped"] == pytest.approx(0.19) and alike["lre_max"] == pytest.approx(0)
    assert alike["cosine"] == pytest.approx(0.9) and alike["random"] == pytest.approx(0.9)
    assert alike["length"] == pytest.approx(1) and alike["bound"] == pytest.approx(1)
    assert 0.9999 < alike["sign"] < 1
    # The first four lengths lose all, so half of the update is there, and the rates say so.
    halved = cosine.cosines(torch.eye(800).double(), lengths > 4, lengths, positive, seed=1)
    assert halved["cosine"] == halved["length"] == pytest.approx(0.5**0.5)
    assert halved["lre_max"] == pytest.approx(1) and halved["bound"] == 0
    # One length of eight keeps 0.8: off by 0.175 / 0.975, and κ = 8·√100 / √800.
    off = cosine.cosines(
        torch.eye(800).double(), (lengths > 1) | (torch.arange(800) >= 20), lengths, positive, seed=1
    )
    assert off["bound"] == pytest.approx((1 - 8 * (0.175 / 0.975) ** 2) ** 0.5)
    # What is clipped is all that points anywhere.
    update = torch.where(clipped, 1.0, 1e-9).double()
    turned = cosine.cosines(torch.diag(update), ~clipped, lengths, positive, seed=1)
    assert turned["cosine"] < 1e-4 and turned["length"] == pytest.approx(1)


def test_a_band_in_the_shape_of_s_clips_all_lengths_alike() -> None:
    for band, middle in (("√L", 1e-6), ("L", 1e6)):
        assert regimes.shares(band, 40, middle) == pytest.approx((0.2, 0.2), abs=1e-3)
    for ratio in regimes.RATIOS:
        (first, last), back = regimes.shares("constant", ratio, 1e-6), regimes.shares("L", ratio, 1e-6)
        assert first < 0.2 < last and back == pytest.approx((last, first), abs=1e-3), "√L between the two"
