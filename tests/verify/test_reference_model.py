"""The model of the float64 reference against transformers and Megatron."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference_rows import load, random_rows, relative_error, samples

from megatron_fspo.verify.reference_model import log_probs_and_entropy, rotary_table
from megatron_fspo.weights import read_architecture


@pytest.mark.parametrize("norm_in_float64", [True, False])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_model_is_that_of_transformers(
    random_checkpoints: dict[str, Path], kind: str, norm_in_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    if norm_in_float64:  # transformers' own norm rounds to fp32, whatever the model's dtype
        monkeypatch.setattr(
            Qwen3RMSNorm,
            "forward",
            lambda self, x: torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            ),
        )
    tolerance = 1e-12 if norm_in_float64 else 5e-6  # seen: 5e-15 and 8e-7
    checkpoint = random_checkpoints[kind]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    weights, arch = load(checkpoint)
    assert arch.num_heads != arch.num_kv_heads and arch.head_dim * arch.num_heads != arch.hidden_size
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
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        assert relative_error(weights[name].grad, parameter.grad) < tolerance, name


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 20), (1e6, 128)])
def test_the_rotary_table_is_that_of_megatron_bit_for_bit(
    random_checkpoints: dict[str, Path], theta: float, head_dim: int
) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    arch = replace(read_architecture(random_checkpoints["tied"]), rope_theta=theta, head_dim=head_dim)
    rotary = RotaryEmbedding(head_dim, 1.0, rotary_base=int(theta), use_cpu_initialization=True)
    angles = rotary.get_freqs_non_repeated(3000).repeat(1, 2)[:, None]
    cos, sin = rotary_table(arch, 3000)
    assert cos.shape == (3000, 1, head_dim) and cos.dtype == torch.float64
    assert torch.equal(cos, angles.cos().double()) and torch.equal(sin, angles.sin().double())
