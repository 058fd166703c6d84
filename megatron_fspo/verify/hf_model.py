"""The model as transformers computes it, as float64 reference for families without one of our own.

transformers asks for float32 in norms, softmax and routers; a mode of torch turns these requests into
float64, except where positions become angles, which both sides define in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Embedding, Module
from torch.overrides import TorchFunctionMode

from megatron_fspo.verify.reference import Routers, plain_name
from megatron_fspo.weights import Architecture

_CASTS = ("to", "type", "softmax", "sum")


class HFModel:
    """A model of transformers with weights that are given in each call."""

    def __init__(self, arch: Architecture) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**hf_config(arch))
        config._experts_implementation = "eager"
        self._arch, self._wide = arch, _Wide()
        self._model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for module in self._model.modules():
            if isinstance(module, Embedding):
                module.padding_idx = None  # whose gradient would be left out
            if "Rotary" in type(module).__name__:
                module.register_forward_pre_hook(lambda *_: setattr(self._wide, "active", False))
                module.register_forward_hook(lambda *_: setattr(self._wide, "active", True))

    def logits(
        self, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Tensor, routers: Routers
    ) -> Tensor:
        """Return float64 logits [t, V] of a sequence; tokens attend to earlier ones of the same number in
        ``rows`` [t]."""
        counts, named = rows.bincount().tolist(), self._names(weights)
        # Where positions begin anew, transformers masks earlier tokens.
        positions = torch.cat([torch.arange(count) for count in counts])[None]
        inputs = {"input_ids": torch.tensor(ids)[None], "position_ids": positions, "use_cache": False}
        if self._arch.model_type == "gpt_oss":  # which does not
            inputs["attention_mask"] = _masks(rows, self._arch.window or len(rows))
        with ExitStack() as stack:
            for module in self._model.modules():
                if "Router" in type(module).__name__:
                    stack.enter_context(module.register_forward_hook(self._routed(routers)))
                if "GatedDeltaNet" in type(module).__name__:
                    stack.enter_context(_by_row(module, counts))
            stack.enter_context(self._wide)
            logits: Tensor = functional_call(self._model, named, (), inputs).logits[0]
        return logits

    def _names(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights under transformers' names, which stacks the experts of a layer."""
        named = {plain_name(name): tensor for name, tensor in weights.items() if ".lora_" not in name}
        for layer in range(self._arch.dense_layers, self._arch.num_layers):
            block = f"model.layers.{layer}.mlp.experts"
            if f"{block}.gate_up_proj" in named:
                continue  # as in the files
            each = [
                [named.pop(f"{block}.{expert}.{one}_proj.weight") for one in ("gate", "up", "down")]
                for expert in range(self._arch.num_experts)
            ]
            named[f"{block}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
            named[f"{block}.down_proj"] = torch.stack([down for _, _, down in each])
        return named

    def _routed(self, routers: Routers) -> Any:
        """Return a hook that reports a router's choice, and replaces it by the given experts."""
        experts = self._arch.experts
        assert experts is not None

        def hook(module: Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, own = output
            scores = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
            chosen = routers.choose(logits, own, scores / scores.sum(-1, keepdim=True))
            if torch.equal(chosen, own):
                return output
            weights = scores.gather(1, chosen)
            if experts.normalize_top_k:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * experts.scale, chosen

        return hook


def _masks(rows: Tensor, window: int) -> dict[str, Tensor]:
    """Return what is added to the scores [1, 1, t, t] of each kind of layer."""
    seen = (rows[:, None] == rows).tril()
    kinds = {"full_attention": seen, "sliding_attention": seen.triu(1 - window)}
    return {
        kind: torch.zeros(seen.shape).masked_fill(~mask, -torch.inf)[None, None]
        for kind, mask in kinds.items()
    }


@contextmanager
def _by_row(module: Any, counts: list[int]) -> Iterator[None]:
    """Apply a module to each row of a sequence alone: transformers' gated delta nets ignore positions."""
    whole = module.forward

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        rows = torch.split(hidden_states, counts, 1)
        return torch.cat([whole(row, **options | {"attention_mask": None}) for row in rows], 1)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class _Wide(TorchFunctionMode):
    """Turns a request for float32 of a float64 tensor into one for float64."""

    active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if self.active and wide:
            name = getattr(func, "__name__", "").strip("_")  # our CPU backend replaces ``to`` by ``_to``
            if name == "float":
                return args[0]
            if name in _CASTS:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _rope(arch: Architecture) -> dict[str, Any]:
    """Return ``rope_parameters``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": arch.rope_theta}
    if arch.rotary_share != 1:
        rope["partial_rotary_factor"] = arch.rotary_share
    if arch.rope_factor is not None:
        rope |= {"rope_type": "llama3", "factor": arch.rope_factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if arch.yarn is not None:
        rope |= {"rope_type": "yarn", **vars(arch.yarn)}
        rope["factor"] = rope.pop("rotary_scaling_factor")
        rope["truncate"] = rope.pop("correction_range_round_to_int")
        if not arch.yarn.mscale_all_dim:
            del rope["mscale"], rope["mscale_all_dim"]
    if arch.rope_divisor != 1:
        rope |= {"rope_type": "linear", "factor": arch.rope_divisor}
    if arch.model_type in ("gemma3_text", "olmo3"):
        theta = arch.window_rope_theta or arch.rope_theta
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    return rope


def hf_config(arch: Architecture) -> dict[str, Any]:
    """Return a ``config.json`` that ``read_architecture`` reads as ``arch``."""
    oss = arch.model_type == "gpt_oss"
    # fmt: off
    config: dict[str, Any] = {
        "model_type": arch.model_type, "dtype": "float32", "hidden_act": "silu", "pad_token_id": None,
        "vocab_size": arch.vocab_size, "hidden_size": arch.hidden_size, "intermediate_size": arch.ffn_size,
        "num_hidden_layers": arch.num_layers, "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads, "rms_norm_eps": arch.rms_norm_eps,
        "tie_word_embeddings": arch.tied, "rope_parameters": _rope(arch),
        "max_position_embeddings": arch.max_position_embeddings,
        # Families without these keys ignore them.
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round((arch.attention_scale or 1.0) ** -2),
        "sliding_window": arch.window, "qkv_bias": arch.qkv_bias,
        "attention_bias": oss or (arch.qkv_bias and arch.model_type != "qwen2_moe"),
        "use_qk_norm": arch.qk_norm, "attention_multiplier": arch.attention_scale or 1.0,
        "embedding_multiplier": arch.embedding_scale, "residual_multiplier": arch.residual_scale,
        "logits_scaling": arch.logits_divisor,
    }
    config |= _linear(arch)
    if (latent := arch.latent) is None:
        config["head_dim"] = arch.head_dim
    else:
        config |= {
            "q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "v_head_dim": latent.value_size,
            "qk_nope_head_dim": arch.head_dim - latent.rope_size, "qk_rope_head_dim": latent.rope_size,
        }
    if (experts := arch.experts) is not None:
        mixtral = oss or arch.model_type == "mixtral"
        config |= {
            "n_routed_experts" if experts.sigmoid else "num_local_experts" if mixtral else "num_experts":
                experts.count,
            "intermediate_size" if mixtral else "moe_intermediate_size": experts.ffn_size,
            "num_experts_per_tok": experts.per_token, "norm_topk_prob": experts.normalize_top_k,
            "shared_expert_intermediate_size": experts.shared_ffn_size,
            "n_shared_experts": experts.shared_ffn_size // experts.ffn_size, "n_group": experts.groups,
            "topk_group": experts.group_top_k, "first_k_dense_replace": experts.dense_layers,
            "routed_scaling_factor": experts.scale, "swiglu_limit": experts.clamp,
        }
    if arch.layer_types:
        kinds = {"full": "full_attention", "window": "sliding_attention", "linear": "linear_attention"}
        config["layer_types"] = [kinds[arch.layer_type(layer)] for layer in range(arch.num_layers)]
    # fmt: on
    return config


def _linear(arch: Architecture) -> dict[str, Any]:
    """Return the keys for layers with linear attention; empty without."""
    if (linear := arch.linear) is None:
        return {}
    types = [f"{arch.layer_type(layer)}_attention" for layer in range(arch.num_layers)]
    return {
        "layer_types": types, "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads, "linear_key_head_dim": linear.key_size,
        "linear_value_head_dim": linear.value_size, "linear_conv_kernel_dim": linear.conv,
    }  # fmt: skip
