"""``explain`` on a dump of verl has the figures that the policy loss ``fspo`` logs of the same batch.

The batch goes through verl's ``ppo_loss`` as in test_verl_adapter, with the double of the loss that
examples/explain/dump_verl.py registers.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import verl
from test_verl_adapter import PROMPT, Batch, Policy, actor, through_verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from launch import REPO
from megatron_fspo.lab.explain.command import explain
from megatron_fspo.lab.explain.rows import NAMES, OTHER_MASKS

# verl and Ray announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")

RESPONSES = 24
C = 0.02


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the doubles, registered for this test only, write."""
    before = dict(POLICY_LOSS_REGISTRY)
    monkeypatch.setenv("EXPLAIN_DUMP", str(tmp_path))
    yield runpy.run_path(str(REPO / "examples/explain/dump_verl.py"))["_PATH"]
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)


def random_batch(policy: Policy) -> Batch:
    """Responses of 1 to 30 tokens, off policy; S on both sides of the band with both signs of A."""
    generator = torch.Generator().manual_seed(7)
    batch: Batch = {name: [] for name in ("tokens", "response_mask", "old_log_probs", "advantages")}
    for length in torch.randint(1, 30, (RESPONSES,), generator=generator).tolist():
        tokens = torch.randint(0, 11, (PROMPT + length,), generator=generator)
        noise = 0.03 * torch.randn(length, generator=generator)
        with torch.no_grad():
            batch["old_log_probs"].append(policy(tokens)[PROMPT - 1 : -1] + noise)
        batch["tokens"].append(tokens)
        batch["response_mask"].append(torch.ones(length))
        batch["advantages"].append(torch.ones(length) * torch.randn((), generator=generator))
    return batch


def test_figures_of_the_dump_are_those_logged(dump: Path) -> None:
    policy = Policy()
    loss = PolicyLossConfig(loss_mode="fspo+dump")
    config = actor(clip_ratio_low=C, clip_ratio_high=C, policy_loss=loss)
    _, logged = through_verl(policy, random_batch(policy), config)

    words = ["--fspo.c-low", str(C), "--fspo.c-high", str(C)]
    found = explain(dump, words, [], step=None, rate=None)
    fspo = found.given[0]
    assert len(found.dump) == RESPONSES
    figures = {
        "fspo/clip_low": fspo.clip_low,
        "fspo/clip_high": fspo.clip_high,
        "fspo/dual_clip_frac": fspo.dual_clip,
        "fspo/out_of_band": fspo.out_of_band,
        "fspo/sigma_hat": found.sigma,
        "actor/pg_clipfrac": fspo.clip_low + fspo.clip_high + fspo.dual_clip,
    }
    assert min(figures.values()) > 0, figures
    assert figures == pytest.approx({name: logged[name] for name in figures}, rel=1e-4)


def test_every_mask_is_known() -> None:
    """Of a newer verl too: a mask that `explain` ignores would count tokens that the loss does not."""
    files = [
        *Path(verl.__file__).parent.glob("trainer/ppo/*.py"),
        *Path(verl.__file__).parent.glob("workers/actor/*.py"),
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    masks = set(re.findall(r'"(\w*mask)"', text))
    assert len(masks) > 1 and masks <= {*NAMES["mask"], *OTHER_MASKS}, masks
