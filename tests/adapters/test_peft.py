"""A folder of adapters goes to PEFT and comes from it, and means the same there."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.errors import InputError
from megatron_fspo.weights import Adapters, Architecture, read_adapters, read_architecture, write_adapters
from megatron_fspo.weights.peft import _PLAIN, _WITHOUT_EFFECT
from megatron_fspo.weights.table import TARGETS, adapter_shapes

pytestmark = pytest.mark.filterwarnings("ignore")

RANK = 3
IDS = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, so large that a wrong adapter shows."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=request.param,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("base")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def architecture(base: Path, targets: tuple[str, ...], scale: float) -> Architecture:
    adapters = Adapters(rank=RANK, scale=scale, targets=targets)
    return replace(read_architecture(base), adapters=adapters)


def merged(base: Path, factors: dict[str, Tensor], scale: float) -> Tensor:
    """Log-probs by the base with the adapters in its matrices, float64."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in factors:
                a, b = (factors[f"{stem}.lora_{factor}.weight"].double() for factor in "AB")
                weight += scale * b @ a
        return model(IDS).logits.log_softmax(-1)


def by_peft(base: Path, folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False)
        return loaded(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("targets", [TARGETS, ("q", "v")], ids=["all", "two"])
def test_peft_loads_ours(base: Path, targets: tuple[str, ...], tmp_path: Path) -> None:
    arch = architecture(base, targets, scale=8 / math.sqrt(RANK))
    factors = {name: torch.randn(shape) / 4 for name, shape in adapter_shapes(arch).items()}
    write_adapters(tmp_path, factors.items(), arch.adapters, base)
    want = merged(base, factors, arch.adapters.scale)
    assert (by_peft(base, tmp_path) - want).abs().max() < 1e-6
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    assert (plain(IDS).logits.log_softmax(-1) - want).abs().max() > 0.1


@pytest.mark.parametrize("rslora", [False, True])
def test_we_load_what_peft_has_trained(base: Path, rslora: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    names = [f"{target}_proj" for target in TARGETS]
    config = peft.LoraConfig(r=RANK, lora_alpha=7, target_modules=names, use_rslora=rslora)
    model = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=3.0)
    for _ in range(3):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    scale = 7 / (math.sqrt(RANK) if rslora else RANK)
    factors = read_adapters(tmp_path, architecture(base, TARGETS, scale))
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(factors) == len(saved) == 2 * 7 * 2
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_rslora"] is rslora
    want = by_peft(base, tmp_path)
    assert (merged(base, factors, scale) - want).abs().max() < 1e-6


PLAIN = {
    "use_rslora": True,
    "alpha_pattern": {"q_proj": 7},
    "rank_pattern": {"layers.1.mlp.up_proj": RANK},
    "lora_dropout": 0.5,
    "init_lora_weights": "gaussian",
    "inference_mode": True,
    "revision": "main",
    "target_modules": "all-linear",
    "megatron_core": "another",
    "qalora_group_size": 8,
}
OTHERS: dict[str, object] = {
    "alpha_pattern": {"q_proj": 64},
    "rank_pattern": {"q_proj": 2},
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "fan_in_fan_out": True,
    "layers_to_transform": [0],
    "layers_pattern": ["layers"],
    "target_modules": ["q_proj"],
    "exclude_modules": ["v_proj"],
    "trainable_token_indices": [3],
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 1], [0, 2]],
    "lora_bias": True,
    "use_qalora": True,
    "target_parameters": ["up_proj.weight"],
    "init_lora_weights": "pissa",
    "loftq_config": {"loftq_bits": 4},
    "peft_type": "LOHA",
}


def folder_of(base: Path, out: Path, **keys: object) -> Path:
    """A folder as PEFT writes it, and then with other keys in its configuration."""
    torch.manual_seed(1)
    names = [f"{target}_proj" for target in TARGETS]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=7, target_modules=names, init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(out)
    path = out / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return out


@pytest.mark.parametrize("key", PLAIN)
def test_keys_of_plain_lora_mean_the_same_there(base: Path, key: str, tmp_path: Path) -> None:
    folder = folder_of(base, tmp_path, **{key: PLAIN[key]})
    scale = 7 / (math.sqrt(RANK) if key == "use_rslora" else RANK)
    factors = read_adapters(folder, architecture(base, TARGETS, scale))
    assert (merged(base, factors, scale) - by_peft(base, folder)).abs().max() < 1e-6


@pytest.mark.parametrize("key", OTHERS)
def test_other_keys_are_refused(base: Path, key: str, tmp_path: Path) -> None:
    folder = folder_of(base, tmp_path, **{key: OTHERS[key]})
    with pytest.raises(InputError, match=rf"adapter_config.json has {key} = "):
        read_adapters(folder, architecture(base, TARGETS, 7 / RANK))


def test_every_key_of_peft_is_known(base: Path, tmp_path: Path) -> None:
    """A new one stands in a table here and there, or is refused unless it is off."""
    read_adapters(folder_of(base, tmp_path), architecture(base, TARGETS, 7 / RANK))
    known = _WITHOUT_EFFECT | {*_PLAIN, *OTHERS, "rank_pattern", "alpha_pattern", "target_modules"}
    configs = {"corda_config", "lora_ga_config", "velora_config", "monteclora_config", "use_bdlora"}
    configs |= {"arrow_config", "kasa_config", "ensure_weight_tying"}
    assert {field.name for field in fields(peft.LoraConfig)} == known | configs
    for key in configs:
        with pytest.raises(InputError, match=f"has {key} = "):
            folder = folder_of(base, tmp_path / key, **{key: {"x": 1}})
            read_adapters(folder, architecture(base, TARGETS, 7 / RANK))
