"""Dense Llama, Qwen2 and Qwen3 as a formula: the log-probs that every parallel layout must have.

Plain torch in float64 on the CPU, from Hugging Face weights, one unpadded sequence at a time: no packing, no
cache, no kernel, nothing shared with the model that is checked. ::

    x = embed[ids]
    x = x + attention(rms_norm(x))          for every layer
    x = x + swiglu(rms_norm(x))
    log π = log_softmax(rms_norm(x)·headᵀ / temperature)

Shapes: t tokens of one sequence, h query heads, g KV heads, d head size, V vocabulary. Units: nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fspo.weights import Architecture


def log_probs_and_entropy(
    weights: Mapping[str, Tensor],
    arch: Architecture,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """What the policy says of one response.

    Args:
        weights: the checkpoint's tensors under their names, float64.
        arch: their sizes.
        prompt_ids: at least one token.
        response_ids: L tokens; L may be 0.
        temperature: above 0; divides the logits.

    Returns:
        log π(y_t) [L] and the entropy [L] of the distribution that y_t was drawn from, with their graph.
    """
    hidden = _hidden_states(weights, arch, [*prompt_ids, *response_ids])
    # Position p predicts the token at p + 1: the last token of the prompt predicts the first of the response.
    first = len(prompt_ids) - 1
    hidden = hidden[first : first + len(response_ids)]
    head = weights["model.embed_tokens.weight" if arch.tied else "lm_head.weight"]
    log_p = F.log_softmax(hidden @ head.T / temperature, dim=-1)  # [L, V]
    chosen = log_p.gather(-1, torch.tensor(response_ids, dtype=torch.long)[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def rotary_table(arch: Architecture, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [t, 1, d] of p·θ^(−2i/d), for positions p and the pairs i < d/2, twice side by side.

    In fp32, then widened: transformers and Megatron both define the table in fp32, so its rounding is part of
    the model. Llama 3's scaled RoPE divides the frequencies that turn less than once in 8192 tokens by its
    factor, keeps those that turn more than four times, and goes linearly from one to the other between.
    """
    pairs = torch.arange(0, arch.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / (arch.rope_theta ** (pairs / arch.head_dim))
    if arch.rope_factor is not None:
        kept = ((8192 * frequencies / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / arch.rope_factor
    angles = torch.outer(torch.arange(count, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().double(), angles.sin().double()


def _hidden_states(weights: Mapping[str, Tensor], arch: Architecture, ids: Sequence[int]) -> Tensor:
    """[t, hidden] after the last norm."""
    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    table = rotary_table(arch, len(ids))
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        x = x + _attention(own, arch, _rms_norm(x, own["input_layernorm.weight"], arch), table)
        x = x + _swiglu(own, _rms_norm(x, own["post_attention_layernorm.weight"], arch))
    return _rms_norm(x, weights["model.norm.weight"], arch)


def _attention(
    weights: Mapping[str, Tensor], arch: Architecture, x: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    """softmax(q·kᵀ / √d)·v over the tokens so far, [t, hidden] → [t, hidden].

    Every query head has its own q; h / g neighbours share a KV head. Qwen2 has biases, Qwen3 normalises q and
    k per head.
    """
    query, key, value = (
        F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")).unflatten(-1, (-1, arch.head_dim))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    )  # [t, h, d], [t, g, d], [t, g, d]
    if "self_attn.q_norm.weight" in weights:
        query = _rms_norm(query, weights["self_attn.q_norm.weight"], arch)
        key = _rms_norm(key, weights["self_attn.k_norm.weight"], arch)
    query, key = _rotate(query, *table), _rotate(key, *table)
    sharing = arch.num_heads // arch.num_kv_heads
    key, value = key.repeat_interleave(sharing, dim=1), value.repeat_interleave(sharing, dim=1)

    scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(arch.head_dim)
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(diagonal=1)
    attended = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    mixed = torch.einsum("hts,shd->thd", attended, value)
    return mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T


def _swiglu(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """down·(silu(gate·x) ∘ up·x), [t, hidden] → [t, hidden]."""
    gate, up = x @ weights["mlp.gate_proj.weight"].T, x @ weights["mlp.up_proj.weight"].T
    return (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def _rms_norm(x: Tensor, weight: Tensor, arch: Architecture) -> Tensor:
    """w ∘ x / √(mean(x²) + ε) over the last dimension."""
    return weight * x / (x.square().mean(dim=-1, keepdim=True) + arch.rms_norm_eps).sqrt()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of x [t, heads, d] by their angles."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
