"""Random little checkpoints of every supported family, the sequences to score, and the layouts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from backend import ENGINE, fitting, supported
from megatron_fspo.config import Parallel
from tiny_families import LINEAR, VOCAB, biases, config

DENSE = (
    *("llama", "qwen2", "qwen3", "qwen3_yarn", "mistral", "phi3", "granite", "glm4"),
    *("gemma3_text", "olmo2", "olmo3", "qwen3_5_text"),
)
EXPERTS = (
    *("qwen3_moe", "moe_raw", "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v3", "moonlight"),
    *("gpt_oss", "qwen3_next", "qwen3_5_moe_text"),
)
FAMILIES = (*DENSE, *EXPERTS)
FEWER = (
    *("mistral", "phi3", "granite", "qwen2_moe", "glm4_moe", "moonlight", "gemma3_text", "olmo2"),
    *("olmo3", "qwen3_yarn", "qwen3_next", "moe_raw", "mixtral"),
)

# World size → name → layout; `fits` says which families.
LAYOUTS = fitting(
    {
        1: {"tp1": Parallel()},
        2: supported(
            {
                "tp2": Parallel(tensor=2),
                "tp2.sp": Parallel(tensor=2, sequence=True),
                "pp2": Parallel(pipeline=2),
                "cp2": Parallel(context=2),
                "ep2": Parallel(expert=2),
            },
            but=("tp2", "tp2.sp", "pp2"),
        ),
        4: supported(
            {
                "tp4.sp": Parallel(tensor=4, sequence=True),
                "pp2.vpp2.dp2": Parallel(pipeline=2, virtual_pipeline=2),
                "tp2.sp.ep2": Parallel(tensor=2, sequence=True, expert=2),
                "pp2.cp2.ep2": Parallel(pipeline=2, context=2, expert=2),
            }
        ),
    }
)
# Layouts that score converted checkpoints, too: every family is in one, and read in slices.
CONVERTED = [] if ENGINE else ["tp2.sp", "ep2"]
_MORE = {
    "tp4.sp": Parallel(tensor=4, sequence=True),
    "pp4": Parallel(pipeline=4),
    "pp2.ep2": Parallel(pipeline=2, expert=2),
}
# Layouts that load and save distributed checkpoints, all of as many ranks as there may be, 4 at most.
# What the first saves, all load.
CHECKPOINT_LAYOUTS = {
    name: layout
    for name, layout in {
        "tp2.sp.pp2": Parallel(tensor=2, sequence=True, pipeline=2),
        "single": Parallel(),
        **({} if ENGINE else _MORE),
        "tp2.sp.ep4": Parallel(tensor=2, sequence=True, expert=4),
    }.items()
    if max(layout.model_size, layout.expert) <= max(LAYOUTS)
}


def fits(family: str, parallel: Parallel) -> bool:
    """Whether the family can be spread like this. What others have shown of further tensor-parallel layouts,
    most families do not show again."""
    further = parallel.tensor == 4 or (
        parallel.tensor == 2 and (parallel.expert > 1 or not parallel.sequence)
    )
    if further and family in FEWER:
        return False
    if family in LINEAR and parallel.context > 1:
        return False
    if family in DENSE:
        return parallel.expert == 1
    return parallel.tensor == 1 or parallel.sequence


def sequences() -> list[list[int]]:
    """Long enough for scaled RoPE to matter; one has nothing to score."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        for length in (301, 1, 2, 57, 256, 33)
    ]


def write_checkpoint(family: str, folder: Path) -> None:
    """A float32 checkpoint in transformers' own format, all weights random: norms and biases, too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config(family))
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter in (*model.parameters(), *biases(model)):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            if parameter.dim() == 1 and family != "gemma3_text":  # whose norms multiply by 1 + weight
                parameter.add_(1.0)
        for name, parameter in model.named_parameters() if family in LINEAR else ():
            if parameter.dim() == 1 and not name.endswith("linear_attn.norm.weight"):
                # Zero-centred norms, and states that last.
                parameter.sub_(3.0 if name.endswith(("A_log", "dt_bias")) else 1.0)
    model.float().save_pretrained(folder)


def reference(folder: Path) -> list[Tensor]:
    """Per sequence the log-probs [n - 1] of transformers in float32, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in map(torch.tensor, sequences()):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].float().log_softmax(-1)
        found.append(log_probs[:-1].gather(-1, ids[1:, None])[:, 0])
    return found
