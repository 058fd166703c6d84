"""On every rank: gradients of models that transformers computes for ``verify``, and faults in them.

family_gradients_worker.py OUT
family_gradients_worker.py OUT FAMILY...    # by hand: every layout that fits the ranks
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import shared_experts
from patching import Patch, wrap

from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.mcore.model import gated_delta, layers, packed_attention, self_attention
from megatron_fspo.mcore.model.gated_delta import DeltaCore, GatedNorm
from megatron_fspo.mcore.model.router import PolicyRouter
from megatron_fspo.mcore.model.self_attention import Ropes
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import TEMPERATURE, cases, make_routes, make_samples, narrow, random_weights
from megatron_fspo.verify.layouts import all_layouts, choose_model, parse_layout
from megatron_fspo.verify.production import build
from megatron_fspo.verify.run import check_cases, references
from megatron_fspo.weights import Architecture, read_architecture
from tiny_families import config

BACKEND = choose_backend("cpu")
LAYOUTS = {
    "mistral": ("cp2", "recompute"),
    "phi3": ("tp2.sp", "pp2"),
    "granite": ("pp2", "cp2"),
    "gemma3_text": ("tp2.sp", "pp2", "cp2", "recompute"),
    "olmo2": ("tp2.sp",),
    "olmo3": ("tp2", "tp2.sp", "pp2", "recompute"),
    "glm4": ("tp2.sp", "pp2.vpp2"),
    "qwen2_moe": ("moe.tp2.sp", "ep2"),
    "glm4_moe": ("moe.tp2.sp", "moe.pp2"),
    "deepseek_v3": ("moe.tp2.sp", "moe.recompute", "moe.cp2"),
    "moonlight": ("moe.pp2", "ep2"),
    "gpt_oss": ("moe.tp2.sp", "ep2", "moe.cp2", "moe.recompute"),
    "qwen3_yarn": ("tp2.sp",),
    "qwen3_5_text": ("tp2", "tp2.sp", "pp2", "recompute"),
    "qwen3_next": ("moe.tp2.sp", "ep2"),
    "qwen3_5_moe_text": ("moe.tp2.sp", "moe.pp2"),
}
"""Family → layouts on 2 ranks; each of these occurs with attention and with experts."""


def doubled(real: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Whatever the function returns, twice."""
    out = real(self, *args, **kwargs)
    return None if out is None else 2 * out


def without_bias(real: Any, self: Any, logits: torch.Tensor) -> torch.Tensor:
    bias = self.expert_bias.clone()
    self.expert_bias.zero_()
    out: torch.Tensor = real(self, logits)
    self.expert_bias.copy_(bias)
    return out


def longer_window(real: Any, *args: Any, window: int | None, **kwargs: Any) -> Any:
    return real(*args, window=window and window + 1, **kwargs)


def without_expert_bias(real: Any, self: Any, *args: Any) -> Any:
    output, bias = real(self, *args)
    return output, None if self.is_expert else bias


def sinks_of_two_ranks(real: Any, *args: Any) -> Any:
    *others, sinks = args
    return real(*others, sinks + math.log(2))


def halves(real: Any, row: Any, *args: Any) -> Any:
    """Gate and up, which take turns in the files, one below the other."""
    return real(replace(row, layout="transposed" if row.layout == "in_turn" else row.layout), *args)


def halves_swapped(real: Any, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return real(t.flip(-1), *args, **kwargs)


def next_layer(real: Any, self: Any, layer: int) -> Any:
    return real(self, layer + 1)


def the_others_angles(real: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    whole = real(self, *args, **kwargs).chunk(2, -1)[0]
    return torch.cat([whole, whole], -1)


def plain_norm(real: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.nn.RMSNorm.forward(self, x)
    return out


def leaking(part: int) -> Any:
    """A sequence begins with the last channels (part 0) or the memory (1) of the one before it."""

    def sequence(real: Any, self: Any, *inputs: torch.Tensor) -> Any:
        last = vars(self).get("last")
        if last is not None:
            last = tuple(x if number == part else x * 0 for number, x in enumerate(last))
        found, state = real(self, *inputs, last)
        self.last = tuple(x.detach() for x in state)
        return found, state

    return sequence


def gated_before(real: Any, self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = real(self, x * F.silu(gate), torch.full_like(gate, 1.2784645427610738))
    return out  # of which silu is 1


def unsummed(real: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
    return x


FAULTS: dict[str, tuple[str, str, Any, str, Any]] = {
    "window_off_by_one": ("mistral", "recompute", layers, "packed_attention", longer_window),
    "windows_of_other_layers": ("gemma3_text", "recompute", Architecture, "layer_type", next_layer),
    "one_rope": ("gemma3_text", "pp2", Ropes, "forward", the_others_angles),
    "plain_norm": ("gemma3_text", "tp2.sp", layers.RMSNorm, "forward", plain_norm),
    "window_of_gemma": ("gemma3_text", "recompute", layers, "packed_attention", longer_window),
    "mean_of_a_rank": ("olmo2", "tp2.sp", self_attention, "over_ranks", lambda real, values, _: values),
    "no_bias_of_the_router": ("glm4_moe", "moe.tp2.sp", PolicyRouter, "_choice", without_bias),
    "no_biases_of_experts": ("gpt_oss", "ep2", RowParallelLinear, "forward", without_expert_bias),
    "sinks_of_each_rank": ("gpt_oss", "moe.cp2", layers, "attend", sinks_of_two_ranks),
    "gate_above_up": ("gpt_oss", "moe.recompute", production, "to_megatron_shard", halves),
    "shared_expert_twice": ("qwen2_moe", "ep2", shared_experts.SharedExpertMLP, "forward", doubled),
    "state_leaks_over_a_border": ("qwen3_5_text", "pp2", DeltaCore, "sequence", leaking(1)),
    "conv_tail_of_the_neighbour": ("qwen3_5_text", "pp2", DeltaCore, "sequence", leaking(0)),
    "gate_before_the_norm": ("qwen3_next", "moe.tp2.sp", GatedNorm, "forward", gated_before),
    "zero_centred_norm_as_plain": ("qwen3_5_moe_text", "moe.pp2", layers.RMSNorm, "forward", plain_norm),
    **{
        f"out_norm_unsummed_{layout}": (
            *("qwen3_5_text", layout, gated_delta, "copy_to_tensor_model_parallel_region"),
            unsummed,
        )
        for layout in ("tp2", "tp2.sp")
    },
    "latent_rope_flipped": (
        "deepseek_v3",
        "moe.tp2.sp",
        multi_latent_attention,
        "apply_rotary_pos_emb",
        halves_swapped,
    ),
}
"""Name → family, layout, owner and name of what is replaced, and by what."""
NORMS = ("moe", "moe.tp2.sp", "moe.cp2", "ep2")
"""Layouts whose gradient norm, that of the optimizer, is compared in float32."""
UNMARKED = wrap(packed_attention, "set_tensor_model_parallel_attributes", lambda real, *args, **kwargs: None)
"""As Megatron's own sinks are (its issue 7452)."""


def model_of(family: str) -> Architecture:
    with tempfile.TemporaryDirectory() as folder:
        config(family).save_pretrained(folder)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"dtype": "float32"}), encoding="utf-8")
        return narrow(read_architecture(folder))


def results(family: str, name: str, patch: Patch, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """What verify says of the layout: FSPO with shared prompts, and of experts losses and replay as well."""
    layout = parse_layout(name, world_size=dist.get_world_size())
    arch = choose_model(layout, model_of(family))
    asked = {case.name: case for case in cases(None, 0, experts=True)}
    chosen = [replace(asked["fspo"], split="2 micro-batches", share=True, replay=False)]
    if arch.experts:
        chosen += [replace(asked["router-losses"], split="uneven"), replace(chosen[0], replay=True)]
    wanted = references([arch], [], chosen, TEMPERATURE)[arch]
    stop()
    groups = start(BACKEND, parallel=layout.parallel, seed=1)
    routes = make_routes(arch, make_samples(arch)) if arch.experts else None
    with patch:
        policy = build(layout, arch, random_weights(arch), BACKEND, groups, dtype)
        checked = check_cases(policy, layout, chosen, wanted, TEMPERATURE, routes)
    stop()
    join(BACKEND)
    return [
        {
            "problems": result.problems,
            "gradient": result.errors.gradient,
            "log_prob": result.errors.log_prob,
            "grad_norm": result.grad_norm,
            "norm_error": result.errors.grad_norm,
        }
        for result in checked
    ]


def main(out: Path, families: list[str]) -> None:
    join(BACKEND)
    size = dist.get_world_size()
    chosen = {
        family: [
            layout.name
            for layout in all_layouts(model_of(family), world_size=size)
            if not layout.parallel.distributed_optimizer  # which has no float64
        ]
        for family in families
    }
    found = {
        f"{family} {layout}": results(family, layout, nullcontext())
        for family, layouts in (chosen or LAYOUTS).items()
        for layout in layouts
    }
    if not families:
        for fault, (family, layout, owner, name, replacement) in FAULTS.items():
            found[fault] = results(family, layout, wrap(owner, name, replacement))
        for layout in NORMS:
            found[f"norm {layout}"] = results("gpt_oss", layout, nullcontext(), torch.float32)
        found["norm of unmarked sinks"] = results("gpt_oss", "moe.tp2.sp", UNMARKED, torch.float32)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
