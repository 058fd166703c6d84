"""FSPO in prime-rl: through its published loss module, from the configuration to the loss of packed rows; and
its token exports, as its published exporter writes them, in `explain`.

``PRIME_RL_SOURCE`` names a clone of https://github.com/PrimeIntellect-ai/prime-rl (seen at 559b447); beartype
and jaxtyping must be installed. Only what that module imports from the rest of prime-rl is replaced: the
classes of its configuration, of which it asks the type, and the import by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_fspo.adapters.sequence_loss import FSPO, log_ratio_sums
from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.losses import FSPOLoss

SOURCE = os.environ.get("PRIME_RL_SOURCE")

pytestmark = pytest.mark.skipif(SOURCE is None, reason="PRIME_RL_SOURCE names no clone of prime-rl")

LIMITS = {"c_low": 0.02, "c_high": 0.03, "c_dual": 0.05}


@dataclass
class CustomLossConfig:
    import_path: str
    kwargs: dict[str, Any] = field(default_factory=dict)


def import_object(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    parts = {
        "prime_rl.configs.trainer": {
            "CustomLossConfig": CustomLossConfig,
            **{name: type(name, (), {}) for name in ("DefaultLossConfig", "IPOLossConfig", "LossConfig")},
            "TrainerConfig": object,
        },
        "prime_rl.utils.utils": {"import_object": import_object},
    }
    packages = {name.rsplit(".", 1)[0] for name in parts} | {"prime_rl", "prime_rl.trainer"}
    packages.add("prime_rl.trainer.rl")
    with pytest.MonkeyPatch.context() as patch:
        for name in packages:
            patch.setitem(sys.modules, name, ModuleType(name))
        for name, attributes in parts.items():
            module = ModuleType(name)
            module.__dict__.update(attributes)
            patch.setitem(sys.modules, name, module)
        for name in ("loss", "token_export"):
            spec = importlib.util.spec_from_file_location(
                f"prime_rl.trainer.rl.{name}", Path(str(SOURCE)) / f"src/prime_rl/trainer/rl/{name}.py"
            )
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
        patch.delitem(sys.modules, "megatron_fspo.adapters.prime_rl", raising=False)
        yield sys.modules["prime_rl.trainer.rl.loss"]


def responses(seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Log-probs, the sampler's, A on each token and mask of packed responses with a prompt in front."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(1, 60, (24,), generator=generator).tolist():
        old = -torch.rand(length + 3, generator=generator) - 0.5
        new = old + 0.05 * torch.randn(length + 3, generator=generator)
        advantage = torch.randn((), generator=generator).expand(length + 3)
        found.append((new, old, advantage, torch.arange(length + 3) >= 3))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_native(published: ModuleType, seed: int) -> None:
    batch = responses(seed)
    new = [row[0].clone().requires_grad_() for row in batch]
    old, advantages, masks = ([row[i] for row in batch] for i in (1, 2, 3))
    tokens = sum(int(mask.sum()) for mask in masks)
    config = CustomLossConfig("megatron_fspo.adapters.prime_rl.fspo_loss", LIMITS)
    none = [None] * len(new)
    loss, metrics = published.compute_loss(
        new, old, none, advantages, masks, none, none, none, published.setup_rl_loss_fn(config), tokens, 1, 1
    )
    loss.backward()

    ours = FSPOLoss(**LIMITS)
    leaves = [row[0].double().requires_grad_() for row in batch]
    want = -sum(
        ours.definition((leaf - before.double())[mask], float(advantage[0]), leaf[mask]).objective.mean()
        for leaf, before, advantage, mask in zip(leaves, old, advantages, masks, strict=True)
    )
    (want / tokens).backward()
    for leaf, row in zip(leaves, new, strict=True):
        torch.testing.assert_close(row.grad.double(), leaf.grad, rtol=1e-6, atol=1e-9)

    sums = torch.cat([log_ratio_sums(row[0][None], row[1][None], row[3][None]) for row in batch])
    lengths = torch.tensor([int(mask.sum()) for mask in masks])
    terms = FSPO(**LIMITS).surrogate(sums, lengths, torch.stack([a[0] for a in advantages]))
    for name, flag in {
        "clip_low": terms.clipped_low,
        "clip_high": terms.clipped_high,
        "dual_clip_frac": terms.dual_clipped,
        "out_of_band": terms.out_of_band,
    }.items():
        assert metrics[f"fspo/{name}"].tolist() == flag.float().tolist()
    assert terms.clipped_low.any() and terms.clipped_high.any() and terms.dual_clipped.any()


def test_weights_of_tokens_are_refused(published: ModuleType) -> None:
    new, old, advantages, mask = responses(0)[0]
    inputs = published.LossInputs(new, old, None, advantages, mask, torch.full_like(new, 0.5))
    loss = import_object("megatron_fspo.adapters.prime_rl.fspo_loss")
    with pytest.raises(ValueError, match="weights of single tokens"):
        loss(inputs, **LIMITS)


UNREAD = {
    *("schema_version", "rank", "micro_step", "micro_sequence_idx", "export_sequence_idx", "env_name"),
    *("token_ids", "position_ids", "entropy", "mismatch_kl", "log_importance_ratio", "importance_ratio"),
    *("prob_delta", "is_masked", "is_masked_high", "is_masked_low", "ce_weights", "ref_kl_weights"),
}
"""What an export has beyond what `explain` reads: another name is a newer prime-rl's."""


@pytest.mark.parametrize("weights", [None, [0.0] * 3 + [1.0, 0.0, 1.0]])
def test_explain_reads_its_exports(
    published: ModuleType, weights: list[float] | None, tmp_path: Path
) -> None:
    """What is not finite, in the prompt, is null there; ``rl_weights`` are null if all are 1."""
    old = torch.tensor([-1.0, -1.5, -2.0, -1.5, -5.0, -2.0])
    new = old + torch.tensor([0.0, 9.0, 9.0, 0.25, 4.0, -0.5])
    new[0] = torch.nan
    batch = {
        "input_ids": torch.arange(6),
        "position_ids": torch.arange(6),
        "loss_mask": torch.tensor([False] * 3 + [True] * 3),
        "advantages": torch.full((6,), -1.0),
        "inference_logprobs": old,
        "rl_weights": None if weights is None else torch.tensor(weights),
        "env_names": ["sums"] * 6,
    }
    export = sys.modules["prime_rl.trainer.rl.token_export"]
    exporter = export.TokenExporter(tmp_path, rank=0)
    exporter.export(3, 0, batch, {"logprobs": new, "entropy": -new}, [6], export.DefaultLossConfig)
    dump = read_dump(tmp_path / "token_exports/step_3/rank_0.jsonl", {}, 3)
    lengths, sums = (3, 3.75) if weights is None else (2, -0.25)
    assert (dump.lengths.tolist(), dump.log_ratio_sum.tolist()) == ([lengths], [pytest.approx(sums)])
    assert set(dump.unread) == UNREAD
