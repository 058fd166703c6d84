"""What docs/performance.md says of memory and error, in real processes; time wants a quieter machine."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import logprob_head
from launch import REPO

SIZE = {"tokens": 2048, "hidden": 512, "vocab": 32768, "dtype": "fp32"}


def peak(variant: str, tokens: int) -> float:
    size = SIZE | {"tokens": tokens}
    return logprob_head.in_fresh_process("measure", variant, size, passes=1)["peak_mib"]


@pytest.mark.slow
def test_the_peak_is_a_fraction_of_the_naive_one_and_does_not_grow_with_tokens() -> None:
    ours, naive = ({t: peak(variant, t) for t in (2048, 4096)} for variant in ("ours", "naive"))
    assert ours[2048] <= 0.15 * naive[2048]
    assert ours[4096] <= 0.08 * naive[4096]
    assert ours[4096] <= 1.15 * ours[2048]
    # The weight's gradient, one buffer of 256 tokens' logits, two gradients of hidden, and a few MiB.
    expected = (32768 * 512 + 256 * 32768 + 2 * 2048 * 512) * 4 / 2**20
    assert expected - 3 <= ours[2048] <= expected + 10  # the warm-up left a little room


@pytest.mark.slow
def test_the_errors_are_no_larger_than_the_naive_ones() -> None:
    size = SIZE | {"tokens": 512}
    found = {variant: logprob_head.in_fresh_process("errors", variant, size) for variant in ("ours", "naive")}
    # Of fewer tokens than on the page: the order of a sum shows in the second digit.
    check_errors(found, slack=1.05)


def check_errors(errors: dict[str, dict[str, float]], slack: float = 1.0) -> None:
    ours, naive = errors["ours"], errors["naive"]
    assert ours["log_prob"] < 1e-5
    for name, error in ours.items():
        assert 0 < error <= slack * naive[name] or name == "log_prob", name
    assert ours["weight_gradient"] < 1e-6 and ours["hidden_gradient"] < 1e-6
    assert ours["hidden_gradient"] < naive["hidden_gradient"] / 2  # the label's term is added last


def test_every_variant_gives_the_same_log_probs_and_gradients() -> None:
    size = SIZE | {"tokens": 600, "hidden": 16, "vocab": 100}
    torch_dist = logprob_head.dist
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    results = {}
    for name, variant in logprob_head.VARIANTS.items():
        hidden, weight, labels, upstream = logprob_head.inputs(size)
        log_probs = variant(hidden, weight, labels)
        log_probs.backward(upstream)
        results[name] = (log_probs.detach(), hidden.grad, weight.grad)
    torch_dist.destroy_process_group()
    assert len(results) >= 4
    for result in results.values():
        for got, want in zip(result, results["naive"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_page_shows_what_was_measured() -> None:
    report = json.loads((REPO / "benchmarks/results/logprob_head.json").read_text(encoding="utf-8"))
    page = (REPO / "docs/performance.md").read_text(encoding="utf-8")
    assert logprob_head.table(report["results"]) in page
    assert report["command"] in page
    check_errors(report["results"][0]["errors"])
    first, second = (result["variants"]["ours"] for result in report["results"])
    assert first["peak"] <= 0.15 and second["peak"] <= 0.08
    assert second["peak_mib"] <= 1.15 * first["peak_mib"]
    assert max(first["time"], second["time"]) <= 1.2
