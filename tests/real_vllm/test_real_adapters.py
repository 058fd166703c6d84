"""Adapters swapped in a server that goes on: twenty times, wrongly, and in a whole run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine_job import Job
from megatron_fspo.rollout.client.proof import WrongWeights
from megatron_fspo.types import SamplingParams
from real_server import FAR, TOLERANCE, scores, send, weights
from runs import rows, trained
from serving import Served, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANK, SWAPS = 4, 20
TARGETS = {
    "self_attn.q_proj": (128, 96),
    "self_attn.k_proj": (64, 96),
    "self_attn.v_proj": (64, 96),
    "mlp.down_proj": (96, 256),
}
"""Of the server's model: outputs and inputs; the other matrices have no adapter."""


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--dtype", "float32", "--lora-rank", str(RANK), "--", "--max-model-len", "128")
    with serving(checkpoint, tmp_path_factory.mktemp("lora"), *flags) as (server,):
        yield server


class Adapted(Job):
    """A job whose model is the server's with adapters of rank 4; ``checkpoint`` has them merged."""

    def __init__(self, server: Served, base: Path, folder: Path) -> None:
        super().__init__([server], base, base=lambda: iter(weights(base).items()))
        self._base, self._folder = base, folder
        self.factors: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] | None = None
        """None: the factors."""

    def draw(self, seed: int) -> None:
        """Other adapters."""
        generator, merged = torch.Generator().manual_seed(seed), weights(self._base)
        self.factors = {}
        for name in [f"model.layers.{layer}.{target}" for layer in (0, 1) for target in TARGETS]:
            outputs, inputs = TARGETS[name.split(".", 3)[3]]
            a = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, RANK, generator=generator) / 4
            self.factors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
            merged[f"{name}.weight"] += b @ a
        self.checkpoint = self._folder / str(seed)
        shutil.copytree(self._base, self.checkpoint, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(merged, self.checkpoint / "model.safetensors", {"format": "pt"})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (self.factors if self.sent is None else self.sent).items()


@pytest.mark.usefixtures("rank")
def test_swaps(server: Served, checkpoint: Path, tmp_path: Path) -> None:
    """Each is proven through the adapter, and responses come from it; a wrong scale and an adapter that
    stayed behind are noticed."""
    job, routes = Adapted(server, checkpoint, tmp_path), server.routes
    assert routes.distance(checkpoint) < TOLERANCE, "it begins with the base"
    for version in range(1, SWAPS + 1):
        job.draw(version)
        job.engine.update_weights(version)
        metrics = job.engine.metrics()
        assert metrics["rollout/weights_proven"] == 1
        assert 0 < metrics["rollout/canary_abs_diff"] < 1e-5
        assert metrics["rollout/sent_bytes"] == sum(tensor.nbytes for tensor in job.factors.values())
    assert routes.distance(job.checkpoint) < TOLERANCE < FAR < routes.distance(tmp_path / str(SWAPS - 1))
    answered = job.generate(SamplingParams(n=4, max_tokens=20, seed=3))
    for prompt, completions in answered:
        for one in completions:
            want = scores(job.checkpoint, (*prompt.token_ids, *one.token_ids))[-len(one.token_ids) :]
            assert one.weight_version == SWAPS
            assert (want - torch.tensor(one.log_probs)).abs().max() < TOLERANCE

    stale = job.factors
    twice = {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in stale.items()}
    job.sent = twice
    with pytest.raises(WrongWeights, match="canary"):
        job.engine.update_weights(SWAPS + 1)
    job.draw(SWAPS + 2)
    job.sent = stale
    with pytest.raises(WrongWeights, match="canary"):
        job.engine.update_weights(SWAPS + 2)
    job.engine.close()


@pytest.mark.usefixtures("rank")
def test_a_server_of_another_model_is_noticed(
    server: Served, checkpoints: list[Path], tmp_path: Path
) -> None:
    job = Adapted(server, checkpoints[0], tmp_path)
    job.draw(0)
    with pytest.raises(WrongWeights, match=r"of \d+ tensors differ"):
        job.engine.update_weights(1)
    job.engine.close()


def test_a_server_with_adapters_takes_no_whole_model(server: Served, checkpoint: Path) -> None:
    assert "loads adapters only" in str(send(server.url, weights(checkpoint).items(), 1))


def test_a_run(server: Served, checkpoint: Path, tmp_path: Path) -> None:
    """Tensor parallel, with a KL penalty towards the model without adapters."""
    words = f"--model.checkpoint {checkpoint} --rollout.engine vllm --run.steps 3 --lora.rank {RANK}"
    words += " --lora.alpha 16 --optimizer.lr 1e-2 --loss.entropy-coef 0.1 --loss.kl-coef 0.01"
    words += " --loss.calibrate 0 --rollout.max-response-tokens 24 --checkpoint.every 0 --evaluation.every 0"
    words += f" --reward.max-zero-variance-steps 0 --parallel.silence-seconds 300 --vllm.urls {[server.url]}"
    trained(tmp_path, "run", *words.split())
    logged = [row for row in rows(tmp_path, "run") if row["step"] > 0]
    assert [row["training/weight_version"] for row in logged] == [1, 2, 3]
    for row in logged:
        assert row["rollout/weights_proven"] == 1 and 0 < row["rollout/canary_abs_diff"] <= TOLERANCE
        assert row["rollout/logprob_abs_diff/max"] <= 1e-3
    assert server.routes.distance(checkpoint) > 1e-3, "the adapter was trained"
    assert server.routes.distance(tmp_path / "run/hf") < TOLERANCE
