"""The model of the float64 reference against transformers and Megatron."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from reference_rows import load, random_rows, relative_error, samples

from experts import gradients_of
from megatron_fspo.verify.reference import log_probs_and_entropy, rotary_table
from megatron_fspo.weights import read_architecture

ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(
    random_checkpoints: dict[str, Path],
    moe_checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict:
    """Class of the norm, and folder: Qwen3 tied and untied, Qwen3-MoE, Llama with scaled RoPE, Qwen2 with
    biases."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    made = {
        kind: ("qwen3.modeling_qwen3.Qwen3RMSNorm", folder) for kind, folder in random_checkpoints.items()
    }
    made |= {kind: ("", folder) for kind, folder in moe_checkpoints.items()}
    sizes = {
        "vocab_size": 37, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.15,
    }  # fmt: skip
    for kind, config, model, norm in (
        ("llama", LlamaConfig, LlamaForCausalLM, "llama.modeling_llama.LlamaRMSNorm"),
        ("qwen2", Qwen2Config, Qwen2ForCausalLM, "qwen2.modeling_qwen2.Qwen2RMSNorm"),
    ):
        torch.manual_seed(3)
        more = {"rope_parameters": ROPE} if kind == "llama" else {}
        network = model(config(**sizes, **more)).float()
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        folder = tmp_path_factory.mktemp("families") / kind
        network.save_pretrained(folder)
        made[kind] = (norm, folder)
    return made


@pytest.mark.parametrize(
    ("kind", "norm_in_float64"),
    # In transformers the softmax of the router is in fp32, too, and the division by its sum.
    [*product(["tied", "untied", "llama", "qwen2"], [True, False]), ("moe", False), ("moe_raw", False)],
)
def test_the_model_is_that_of_transformers(
    checkpoints: dict, kind: str, norm_in_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    norm, checkpoint = checkpoints[kind]
    if norm_in_float64:  # transformers' own norm rounds to fp32, whatever the model's dtype
        monkeypatch.setattr(
            f"transformers.models.{norm}.forward",
            lambda self, x: torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            ),
        )
    tolerance = 1e-12 if norm_in_float64 else 5e-6  # seen: 5e-15 and 8e-7
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    weights, arch = load(checkpoint)
    assert arch.num_heads != arch.num_kv_heads
    got_total = want_total = torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(samples()):
        prompt, response = sample.prompt.token_ids, sample.completion.token_ids
        log_probs, entropy = log_probs_and_entropy(weights, arch, prompt, response, 0.7)
        assert log_probs.shape == entropy.shape == (len(response),)
        if not response:
            continue
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / 0.7
        said = torch.distributions.Categorical(logits=logits)
        want = said.log_prob(torch.tensor(response))
        assert relative_error(log_probs, want) < tolerance
        assert relative_error(entropy, said.entropy()) < tolerance
        a, b = random_rows([len(response)] * 2, 1.0, seed=index)
        got_total = got_total + (a * log_probs + b * entropy).sum()
        want_total = want_total + (a * want + b * said.entropy()).sum()
    got_total.backward()
    want_total.backward()
    gradients = gradients_of(model)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        got = weights[name].grad
        assert got is not None
        # An expert may have had no token.
        assert (not got.any() and not gradient.any()) or relative_error(got, gradient) < tolerance, name


@pytest.mark.parametrize("factor", [None, 8.0])
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 20), (1e6, 128)])
def test_the_rotary_table_is_that_of_megatron(
    random_checkpoints: dict[str, Path], theta: float, head_dim: int, factor: float | None
) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    arch = replace(read_architecture(random_checkpoints["tied"]), rope_theta=theta, head_dim=head_dim)
    arch = replace(arch, rope_factor=factor)
    scaling = {"rope_scaling": factor is not None, "rope_scaling_factor": factor or 1.0}
    rotary = RotaryEmbedding(head_dim, 1.0, rotary_base=int(theta), use_cpu_initialization=True, **scaling)
    angles = rotary.get_freqs_non_repeated(3000).repeat(1, 2)[:, None]
    cos, sin = rotary_table(arch, 3000)
    assert cos.shape == (3000, 1, head_dim) and cos.dtype == torch.float64
    if factor is None:
        assert torch.equal(cos, angles.cos().double()) and torch.equal(sin, angles.sin().double())
    else:  # the same frequencies to a rounding, times positions up to 3000
        assert (cos - angles.cos().double()).abs().max() < 1e-3
        assert (sin - angles.sin().double()).abs().max() < 1e-3
