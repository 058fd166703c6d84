"""vLLM on a CPU computes every family as transformers does, before and after an update of its weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny_families
from launch import environment
from megatron_fspo.rollout.checksum import Checksum
from megatron_fspo.rollout.client.proof import compare, with_checksums
from real_server import FAR, PROMPT, TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WORKER = Path(__file__).with_name("offline_vllm.py")
WIDE = {"hidden_size": 128, "head_dim": 32}
# The only sizes that vLLM's kernel for latent attention has on a CPU.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# Keys of DeepSeek's own files, which transformers does not write. Without them vLLM has softmax routers.
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "glm4", "gemma3_text", "olmo2", "olmo3", "qwen2_moe", "glm4_moe"), WIDE),
    "phi3": {"hidden_size": 128},
    "granite": {"hidden_size": 128},
    "deepseek_v3": {"hidden_size": 128, **LATENT, **SIGMOID},
    # vLLM has no other limit. A token takes all experts, as rounding would flip a choice.
    "gpt_oss": {**WIDE, "intermediate_size": 64, "swiglu_limit": 7.0, "num_experts_per_tok": 8},
}
COARSE = {"gpt_oss": 0.05}
"""On a CPU vLLM's experts of this family round, also without sinks, biases and windows. So an update is
compared with a server that starts with the new weights."""
PARTLY = ("glm4", "qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
"""Families with tensors that the server has under other names."""


def pair(family: str, folder: Path) -> list[Path]:
    """Two checkpoints of other weights."""
    old, new = folder / f"{family}-old", folder / f"{family}-new"
    for each in (old, new):
        tiny_families.write(family, each, **CHANGES[family])
    generator = torch.Generator().manual_seed(1)
    changed = {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(old / "model.safetensors").items()
    }
    save_file(changed, new / "model.safetensors", {"format": "pt"})
    return [old, new]


@torch.no_grad()
def scores(checkpoint: Path) -> torch.Tensor:
    """By transformers: log-probs of the prompt's tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logs = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logs.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def verdict(results: list[dict[str, list[str]]], checkpoint: Path) -> bool | None:
    """Of the proof that a worker with these checksums has the checkpoint's tensors."""
    mine: dict[str, Checksum] = {}
    list(with_checksums(load_file(checkpoint / "model.safetensors").items(), mine))
    (worker,) = results
    return compare(mine, {name: Checksum.from_words(words) for name, words in worker.items()})[0]


def test_log_probs_and_checksums_with_old_and_new_weights(tmp_path: Path) -> None:
    folders = {family: pair(family, tmp_path) for family in CHANGES}
    python = Path(os.environ["VLLM_BIN"]).with_name("python")
    words = [f"{family}={old}:{new}" for family, (old, new) in folders.items()]
    words += [f"{family}-new={folders[family][1]}:{folders[family][1]}" for family in COARSE]
    done = subprocess.run(
        [python, WORKER, tmp_path, json.dumps(PROMPT), *words],
        env={key: value for key, value in environment().items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    for family, checkpoints in folders.items():
        file = tmp_path / f"{family}.json"
        assert file.exists(), f"{family}: {done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        wanted = [scores(checkpoint) for checkpoint in checkpoints]
        for number, (log_probs, results) in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            gaps = [(torch.tensor(log_probs) - one).abs().max().item() for one in wanted]
            assert gaps[number] < COARSE.get(family, TOLERANCE), (family, number, gaps)
            assert gaps[1 - number] > FAR, (family, number, gaps)
            if number and family in COARSE:
                (wanted_bits, _), _ = json.loads((tmp_path / f"{family}-new.json").read_bytes())
                assert log_probs == wanted_bits
            assert verdict(results, checkpoints[number]) is (None if family in PARTLY else True), family
            assert verdict(results, checkpoints[1 - number]) is False
