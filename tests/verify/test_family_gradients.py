"""Gradients of the families that transformers computes for ``verify``, in float64, and faults in them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_gradients_worker import FAULTS, LAYOUTS, NORMS, model_of

from launch import found_by
from megatron_fspo.verify.cases import SMALL, make_samples, random_weights
from megatron_fspo.verify.hf_model import HFModel, hf_config
from megatron_fspo.verify.reference import forward
from megatron_fspo.weights import read_architecture

CASES = [f"{family} {layout}" for family, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    worker = Path(__file__).with_name("family_gradients_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("gradients"), nproc=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_transformers(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    for case in found[name]:
        assert case["problems"] == [] and case["grad_norm"] > 0.01
        assert max(case["gradient"], case["log_prob"]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_model_is_seen(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    if name.startswith("out_norm_unsummed"):
        (problem,) = found[name][0]["problems"]
        assert problem.startswith("norms: ") and "linear_attn.norm.weight" in problem
        return
    every_token = ("shared_expert_twice", "plain_norm", "zero_centred_norm_as_plain", "gate_before_the_norm")
    every_token += ("no_biases_of_experts", "sinks_of_each_rank", "gate_above_up")
    cause = "head" if name in every_token else "attention"
    assert found[name][0]["problems"][0].startswith(f"{cause}: ")
    assert found[name][0]["log_prob"] > 1e-4


@pytest.mark.slow
def test_the_gradient_norm_has_every_sink_once(found: dict[str, list[dict[str, Any]]]) -> None:
    for layout in NORMS:
        assert max(case["norm_error"] for case in found[f"norm {layout}"]) < 3e-7, layout
    assert min(case["norm_error"] for case in found["norm of unmarked sinks"]) > 2e-6


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    _, _, owner, attribute, _ = FAULTS[name]
    assert callable(getattr(owner, attribute))


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_config_is_read_as_the_architecture_it_is_made_of(family: str, tmp_path: Path) -> None:
    arch = model_of(family)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(arch)), encoding="utf-8")
    assert read_architecture(tmp_path) == arch


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_widened_is_the_reference_written_by_hand(family: str) -> None:
    arch = dataclasses.replace(SMALL, model_type=family)
    weights = {name: tensor.double() for name, tensor in random_weights(arch).items()}
    samples = make_samples(arch)[:6]
    ours = forward(weights, arch, samples, 0.7)
    theirs = forward(weights, arch, samples, 0.7, compute_logits=HFModel(arch).logits)
    for one, other in zip(ours.log_probs, theirs.log_probs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
