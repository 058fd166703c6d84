"""What makes weights a function: a checkpoint is refused if any of it differs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from launch import REPO
from megatron_fspo.config.sections import LoRA
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.state.checkpoint import _check_function
from megatron_fspo.weights import Adapters, Architecture, config_file, read_architecture
from megatron_fspo.weights.architecture import Experts, LatentAttention, LinearAttention, Yarn
from megatron_fspo.weights.hf_config import SUPPORTED

NEUTRAL_KEYS = frozenset(
    "_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward embd_pdrop"
    " eos_token_id experts_per_token id2label initial_context_length initializer_range is_encoder_decoder"
    " label2id max_window_layers"
    " original_max_position_embeddings output_attentions output_hidden_states output_router_logits"
    " cache_implementation _sliding_window_pattern"
    " pad_token_id pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef"
    " router_jitter_noise transformers_version use_cache".split()
)
"""Keys that do not change what a model computes; all others of a supported family count or are refused."""
WHOLE = replace(
    read_architecture(REPO / "examples/make_sum/checkpoint"),
    rope_factor=8.0,
    experts=Experts(count=4, per_token=2, ffn_size=8, normalize_top_k=True),
    adapters=Adapters(rank=4, scale=2.0, targets=("q", "v")),
    latent=LatentAttention(q_rank=4, kv_rank=4, rope_size=2, value_size=4),
    yarn=Yarn(
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=64,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    linear=LinearAttention(key_heads=1, value_heads=2, key_size=4, value_size=4, conv=4),
    window=32,
    layer_types=("window", "full"),
    attention_scale=0.5,
    window_rope_theta=1e4,
)
PARTS = ("experts", "adapters", "latent", "linear", "yarn")
WITHOUT_EFFECT = {
    "dtype": torch.float16,
    "fp8_block": (128, 128),
    "max_position_embeddings": 7,
    "prefix": "model.language_model.",
    "unused_layers": 1,
}


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return value[:1]
    return value + 1 if isinstance(value, int | float) else f"{value}x"


@pytest.mark.parametrize("name", [field.name for field in fields(Architecture)])
def test_every_field_counts_but_five(name: str) -> None:
    if name in WITHOUT_EFFECT:
        assert replace(WHOLE, **{name: WITHOUT_EFFECT[name]}).function() == WHOLE.function()
        return
    value = getattr(WHOLE, name)
    optional = ("rope_factor", "window", "attention_scale", "window_rope_theta")
    changes = [None] if name in (*PARTS, *optional) else []
    if name in PARTS:
        changes += [replace(value, **{one.name: other(getattr(value, one.name))}) for one in fields(value)]
    else:
        changes.append(other(value))
    for change in changes:
        changed = replace(WHOLE, **{name: change}).function()
        assert changed != WHOLE.function()
        with pytest.raises(InputError, match=f"for {name}"):
            _check_function(REPO, WHOLE.function(), changed)
    _check_function(REPO, WHOLE.function(), replace(WHOLE).function())


def test_the_keys_of_adapters_are_fields_of_theirs() -> None:
    """A new key of [lora] is thought about here: does it change what loaded factors mean?"""
    assert {*LoRA.model_fields} == {"rank", "alpha", "rslora", "targets", "start"}
    assert {field.name for field in fields(Adapters)} == {"rank", "scale", "targets"}


@pytest.mark.parametrize("family", SUPPORTED)
def test_every_key_of_a_family_is_honoured_refused_or_neutral(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of a newer transformers that nobody has classed fails here."""
    read: set[str] = set()

    class Spy(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

    config = CONFIG_MAPPING[family](dtype="float32")
    written = config.to_dict()
    if "qk_head_dim" not in written:  # latent attention's is given
        written["head_dim"] = 8
    if family not in ("gemma3_text", "olmo3", "gpt_oss"):  # whose layers differ in it
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        written |= {"rope_parameters": rope, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(written, default=str))
    monkeypatch.setattr(config_file, "json", SimpleNamespace(loads=lambda text: Spy(json.loads(text))))
    read_architecture(tmp_path)
    assert written.keys() - read - NEUTRAL_KEYS == set()
