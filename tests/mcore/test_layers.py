"""Local layers: their attention, and what a run says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.mcore.model.layers import SDPACoreAttention
from megatron_fspo.trainer.prepare import prepare


def local_attention() -> SDPACoreAttention:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    collection: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1), tp=None)
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=collection)


def test_gradients_of_a_pack_are_written_once() -> None:
    """The gradient of a slice is as large as the whole tensor; 128 sequences would have 128 such."""
    lengths = torch.tensor([3] * 128)
    borders = F.pad(lengths.cumsum(0), (1, 0)).int()
    parameters = PackedSeqParams(cu_seqlens_q=borders, cu_seqlens_kv=borders, qkv_format="thd")
    inputs = [torch.randn(384, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out = local_attention()(*inputs, None, packed_seq_params=parameters)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        out.sum().backward()
    written = sum(event.cpu_memory_usage for event in profile.function_events if event.cpu_memory_usage > 0)
    assert written < 20 * sum(tensor.nbytes for tensor in inputs)


@pytest.mark.parametrize(
    ("layers", "elsewhere", "notes"), [("auto", True, 0), ("local", True, 1), ("local", False, 0)]
)
def test_a_run_with_local_layers_on_a_gpu_says_so(
    layers: str, elsewhere: bool, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    words = ["--parallel.tensor=1", "--parallel.sequence=false", "--model.dtype=bfloat16"]
    words += [f"--model.layers={layers}", f"--model.backend={'cuda' if elsewhere else 'cpu'}"]
    config = load_config(REPO / "examples/make_sum/run.toml", words)
    found = prepare(config, world_size=1, elsewhere=elsewhere).notes
    assert sum("model.layers = local" in note for note in found) == len(found) == notes
