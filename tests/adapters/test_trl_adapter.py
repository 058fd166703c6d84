"""FSPO through TRL's own path is FSPO: the same S, clip set, weights and gradient as the library's.

A batch goes through ``training_step`` of a real FSPOTrainer, with only generation replaced; see trl_batches.
"""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig
from trl_batches import difference, make_trainer, one_step, random_batch, random_model, score

from launch import REPO, torchrun
from megatron_fspo.adapters.trl import FSPOConfig, FSPOTrainer
from megatron_fspo.losses import FSPOLoss

# TRL and transformers announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")

BANDS = [
    pytest.param({}, id="defaults"),
    pytest.param({"c_low": 0.05, "c_high": 0.01, "c_dual": 0.012}, id="dual clip acts"),
]


@pytest.mark.parametrize("band", BANDS)
def test_the_gradient_is_that_of_the_definition(band: dict[str, float], tmp_path: Path) -> None:
    """Against autograd through the loss as one writes it down, the model and all in float64."""
    batch, model = random_batch(seed=1), copy.deepcopy(random_model()).double()
    mask = batch["completion_mask"].bool()
    log_probs = score(model, batch)
    log_ratio = log_probs - batch["old_per_token_logps"].double()
    loss = FSPOLoss(**band)
    rows = [
        loss.definition(row[kept], advantage, scored[kept]).objective.sum()
        for row, kept, advantage, scored in zip(
            log_ratio, mask, batch["advantages"].tolist(), log_probs, strict=True
        )
        if kept.any()
    ]
    expected = -torch.stack(rows).mean()
    expected.backward()
    found, value = one_step(make_trainer(FSPOTrainer, FSPOConfig, tmp_path, **band), batch)
    assert value == pytest.approx(expected.item(), abs=3e-6)
    assert difference(found, {name: p.grad for name, p in model.named_parameters()}) < 2e-5


def test_a_key_for_long_responses(tmp_path: Path) -> None:
    for centred in (True, False):
        args = make_trainer(FSPOTrainer, FSPOConfig, tmp_path, centred=centred).args
        assert args.fspo().centred is centred


def test_gradient_accumulation_changes_nothing(tmp_path: Path) -> None:
    """1 × 8 = 2 × 4 = 8 × 1, though the empty response makes the micro-batches unequal."""
    batch = random_batch(seed=2)
    found = {k: one_step(make_trainer(FSPOTrainer, FSPOConfig, tmp_path, k), batch) for k in (1, 2, 8)}
    for k in (2, 8):
        assert difference(found[k][0], found[1][0]) < 2e-6
        assert found[k][1] == pytest.approx(found[1][1], abs=1e-6)


def test_each_optimizer_step_of_a_rollout_has_its_own_count(tmp_path: Path) -> None:
    """Of 8 responses in two optimizer steps, one is empty: 4 count in one of them and 3 in the other."""
    trainer = make_trainer(FSPOTrainer, FSPOConfig, tmp_path, 4, steps_per_generation=8, n=4)
    trainer._generate_and_score_completions = lambda _: random_batch(n=8)
    trainer.model.train()
    counts = []
    for trainer._step in range(8):
        counts.append(int(trainer._prepare_inputs(None)["num_sequences"]))
    assert len(set(counts[:4])) == len(set(counts[4:])) == 1
    assert sorted({counts[0], counts[4]}) == [3, 4]
    trainer.model.eval()
    assert int(trainer._prepare_inputs(None)["num_sequences"]) == 7


def test_on_policy_nothing_is_clipped(tmp_path: Path) -> None:
    """Where TRL gives no old log-probs, S = 0 and the gradient is A·∇log π."""
    with pytest.warns(UserWarning, match="steps_per_generation=4 or num_iterations=2"):
        trainer = make_trainer(FSPOTrainer, FSPOConfig, tmp_path, num_iterations=1)
    batch = random_batch()
    del batch["old_per_token_logps"]
    _, loss = one_step(trainer, batch)
    assert loss == pytest.approx(-batch["advantages"][:-1].mean().item(), abs=1e-6)
    recorded = trainer._metrics["train"]
    assert recorded["fspo/out_of_band"] == [0.0]
    assert "fspo/sigma_hat" not in recorded


def test_tokens_of_tools_are_no_tokens_of_the_policy(tmp_path: Path) -> None:
    """A response of which a tool wrote the end is the shorter response."""
    batch = random_batch(seed=3)
    longer = batch | {"tool_mask": torch.ones_like(batch["completion_mask"])}
    longer["tool_mask"][:, 5:9] = 0
    found, _ = one_step(make_trainer(FSPOTrainer, FSPOConfig, tmp_path), longer)
    mask = (longer["completion_mask"] * longer["tool_mask"]).bool()
    model = copy.deepcopy(random_model())
    log_probs = score(model, batch)
    s = torch.where(mask, log_probs - batch["old_per_token_logps"], 0.0).sum(dim=1)
    terms = (
        FSPOConfig(str(tmp_path), use_cpu=True, bf16=False)
        .fspo()
        .surrogate(s, mask.sum(1), batch["advantages"])
    )
    (-(terms.weight * s).sum() / 7).backward()
    assert difference(found, {name: p.grad for name, p in model.named_parameters()}) < 2e-5


REFUSED = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "delta": 2.0,
    "beta": 0.01,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "top_entropy_quantile": 0.5,
    "off_policy_mask_threshold": 0.1,
    "vllm_importance_sampling_correction": True,
    "c_low": 0.0,
    "c_dual": 0.01,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name) as error:
        FSPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: REFUSED[name]})
    assert "\n" not in str(error.value)


def test_a_step_must_not_span_rollouts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps_per_generation = 2 must be a multiple"):
        FSPOConfig(str(tmp_path), use_cpu=True, gradient_accumulation_steps=4, steps_per_generation=2)


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="an FSPOConfig, got a GRPOConfig"):
        make_trainer(FSPOTrainer, GRPOConfig, tmp_path)


def test_a_model_card_names_fspo(tmp_path: Path) -> None:
    trainer = make_trainer(FSPOTrainer, FSPOConfig, tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert "2509.09177" in card and "2402.03300" not in card


@pytest.mark.slow
def test_processes_change_nothing(tmp_path: Path) -> None:
    """8 responses of one process are 4 of each of two; one of them empty."""
    found = []
    for nproc in (1, 2):
        out = tmp_path / f"{nproc}.pt"
        worker = Path(__file__).with_name("trl_worker.py")
        done = torchrun([str(worker), str(out)], nproc=nproc)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(torch.load(out))
    assert difference(found[1], found[0]) < 2e-6


@pytest.mark.slow
def test_a_real_run_learns(tmp_path: Path) -> None:
    """The example: sampling, reward, FSPO and AdamW, all by TRL; two minutes of one core."""
    rows = runpy.run_path(str(REPO / "examples/in_trl/train.py"))["train"](tmp_path, steps=128, seed=1)
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.05, rewards
    assert sum(row["fspo/clip_low"] for row in rows) > 0
