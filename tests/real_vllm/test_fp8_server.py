"""A real vLLM that quantises bfloat16 weights itself: updates too. Skipped unless VLLM_BIN names one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from real_server import FLAGS, scores, send, weights
from serving import serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's FP8 products need AMX on a CPU"
    ),
]


def make_checkpoint(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=128,  # blocks are 128 × 128
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        initializer_range=0.08,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def test_an_update_is_quantised_like_the_weights_at_the_start(tmp_path: Path) -> None:
    one, two = (make_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    exact = {path: scores(path) for path in (one, two)}
    flags = ("--dtype", "bfloat16", "--", *FLAGS, "--quantization", "fp8_per_block")
    with serving(one, tmp_path, *flags) as (server,):
        first = server.routes.score()
        assert 0.1 < (first - exact[one]).abs().max() < 0.5, "not quantised, or wrong"
        assert send(server.url, weights(two).items(), 1) is None
        second = server.routes.score()
        assert (second - exact[two]).abs().max() < 0.5 < 2 < (second - exact[one]).abs().max()
        assert send(server.url, weights(one).items(), 2) is None
        assert torch.equal(server.routes.score(), first)
