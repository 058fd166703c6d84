"""FSPO through verl's actor loss: ``ppo_loss`` on nested tensors, registered by the entry point."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from megatron_fspo.adapters.verl import fspo_policy_loss
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.objective import FSPOBand, LengthFairDualClip, sequence_surrogate

# verl and Ray announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT = 3
LENGTHS = [20, 5, 1, 12, 9, 4]
LIMITS = {"clip_ratio_low": 0.03, "clip_ratio_high": 0.03}
Batch = dict[str, list[Tensor]]


class Policy(torch.nn.Module):
    """A language model without attention, enough to have log-probs and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(11, 11, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens: Tensor) -> Tensor:
        """log π [t] of the token that follows each; 0 after the last."""
        scores = self.table[tokens[:-1]].log_softmax(dim=-1)
        return torch.cat([scores[range(len(tokens) - 1), tokens[1:]], scores.new_zeros(1)])


def make_batch(policy: Policy) -> Batch:
    """Token by token, one list entry per response. The last response has an empty mask."""
    generator = torch.Generator().manual_seed(3)
    batch: Batch = {name: [] for name in ("tokens", "response_mask", "old_log_probs", "advantages")}
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(0, 11, (PROMPT + length,), generator=generator)
        mask = torch.full((length,), float(number < len(LENGTHS) - 1))
        with torch.no_grad():
            old = policy(tokens)[PROMPT - 1 : -1] + 0.1 * torch.randn(length, generator=generator)
        batch["tokens"].append(tokens)
        batch["response_mask"].append(mask)
        batch["old_log_probs"].append(old)
        batch["advantages"].append(mask * torch.randn((), generator=generator))
    return batch


def test_a_mode_for_long_responses() -> None:
    centred = get_policy_loss_fn("fspo_centred")
    assert centred.func is fspo_policy_loss and centred.keywords == {"centred": True}


def actor(**keys: Any) -> FSDPActorConfig:
    loss = PolicyLossConfig(loss_mode="fspo")
    given = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2, "policy_loss": loss} | LIMITS | keys
    return FSDPActorConfig(**given)


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def through_verl(
    policy: Policy, batch: Batch, config: FSDPActorConfig, ranks: int = 1, **more: list[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """The loss of one micro-batch of an optimizer step of 5 responses, as verl's engines compute it."""
    rows = {name: values for name, values in (batch | more).items() if name != "tokens"}
    rows["prompts"] = [tokens[:PROMPT] for tokens in batch["tokens"]]
    rows["responses"] = [tokens[PROMPT:] for tokens in batch["tokens"]]
    data = TensorDict(
        {name: nested(values) for name, values in rows.items()}, batch_size=len(batch["tokens"])
    )
    tu.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=47, global_batch_size=5)
    output = {"log_probs": nested([policy(tokens) for tokens in batch["tokens"]])}
    loss, metrics = ppo_loss(config, output, data)
    return loss, {name: metric.aggregate() for name, metric in metrics.items()}


def columns(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """S, L and A [n], written out."""
    rows = []
    for number, mask in enumerate(batch["response_mask"]):
        new = policy(batch["tokens"][number]).detach()[PROMPT - 1 : -1]
        s = ((new - batch["old_log_probs"][number]) * mask).sum()
        rows.append(torch.stack([s, mask.sum(), batch["advantages"][number][0]]))
    return torch.stack(rows).unbind(dim=1)


def test_the_entry_point_is_what_registers_it() -> None:
    """As verl loads it: from the group, in the metadata of this package."""
    (entry,) = importlib.metadata.entry_points(group="verl.plugins", name="megatron_fspo")
    assert entry.value == "megatron_fspo.adapters.verl"
    assert get_policy_loss_fn("fspo") is fspo_policy_loss


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_s_clips_weights_and_gradient_are_the_librarys(mode: str) -> None:
    policy = Policy()
    batch = make_batch(policy)
    loss, found = through_verl(policy, batch, actor(loss_agg_mode=mode))
    loss.backward()
    s, lengths, advantages = columns(policy, batch)
    native = sequence_surrogate(
        s, lengths, advantages, FSPOBand(c_low=0.03, c_high=0.03), LengthFairDualClip(c=0.06)
    )
    assert 0 < native.clipped.sum() < 5
    for name in ("clipped_low", "clipped_high"):
        assert found["fspo/" + name.replace("clipped", "clip")] == pytest.approx(
            getattr(native, name).sum().item() / 5
        )
    assert found["actor/pg_clipfrac"] == pytest.approx(native.clipped.sum().item() / 5)
    assert found["actor/ppo_kl"] == pytest.approx(-s.sum().item() / lengths.sum().item(), rel=1e-4)
    assert loss.item() == pytest.approx(-native.objective.sum().item() / 5, abs=1e-6)
    plain = Policy()
    expected = sum(
        -weight / 5 * (plain(tokens)[PROMPT - 1 : -1] * mask).sum()
        for weight, tokens, mask in zip(native.weight, batch["tokens"], batch["response_mask"], strict=True)
    )
    expected.backward()
    torch.testing.assert_close(policy.table.grad, plain.table.grad, rtol=1e-5, atol=1e-6)


def test_an_infinite_s_does_not_reach_the_logged_kl() -> None:
    policy = Policy()
    batch = make_batch(policy)
    s, lengths, _ = columns(policy, batch)
    batch["old_log_probs"][0] = torch.full_like(batch["old_log_probs"][0], -torch.inf)
    _, metrics = through_verl(policy, batch, actor())
    assert metrics["actor/ppo_kl"] == pytest.approx(-s[1:].sum().item() / lengths.sum().item(), rel=1e-4)


def test_the_gradient_is_that_of_the_definition() -> None:
    policy = Policy()
    exact, batch = copy.deepcopy(policy).double(), make_batch(policy)
    through_verl(policy, batch, actor(clip_ratio_high=0.02))[0].backward()
    objectives = []
    for number, mask in enumerate(batch["response_mask"][:-1]):
        new = exact(batch["tokens"][number])[PROMPT - 1 : -1]
        advantage = batch["advantages"][number][0].item()
        log_ratio = new - batch["old_log_probs"][number].double()
        definition = FSPOLoss(c_high=0.02).definition(log_ratio, advantage, new)
        objectives.append(definition.objective.sum())
        assert mask.all()
    (-torch.stack(objectives).mean()).backward()
    largest = exact.table.grad.abs().max()
    assert (policy.table.grad - exact.table.grad).abs().max() < 3e-6 * largest


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_and_ranks_change_nothing(ranks: int) -> None:
    """Gradients are added up over micro-batches and averaged over ranks."""
    one, two = Policy(), Policy()
    batch = make_batch(one)
    through_verl(one, batch, actor())[0].backward()
    for part in (slice(0, 1), slice(1, None)):
        rows = {name: values[part] for name, values in batch.items()}
        (through_verl(two, rows, actor(), ranks)[0] / ranks).backward()
    torch.testing.assert_close(two.table.grad, one.table.grad, rtol=1e-5, atol=1e-6)


def test_rollout_weights_are_factors_of_the_gradient() -> None:
    policy, plain = Policy(), Policy()
    batch = make_batch(policy)
    half = [torch.full_like(mask, 0.5) for mask in batch["response_mask"]]
    loss, _ = through_verl(policy, batch, actor(), rollout_is_weights=half)
    loss.backward()
    value, _ = through_verl(plain, batch, actor())
    value.backward()
    assert loss.item() == pytest.approx(value.item())
    torch.testing.assert_close(2 * policy.table.grad, plain.table.grad)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"clip_ratio_low": 0.2}, "verl's default for a ratio: set both of them"),
        ({"clip_ratio_high": 0.0}, "c_high"),
        ({"clip_ratio_c": 5.0}, "clip_ratio_c = 5.0 is a limit on a ratio"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(keys: dict[str, float], found: str) -> None:
    policy = Policy()
    with pytest.raises(ValueError, match=found) as error:
        through_verl(policy, make_batch(policy), actor(**keys))
    assert "\n" not in str(error.value)


def test_an_advantage_for_each_token_is_refused() -> None:
    policy = Policy()
    batch = make_batch(policy)
    batch["advantages"][0] = torch.arange(20.0)
    with pytest.raises(ValueError, match="one advantage for all tokens of a response"):
        through_verl(policy, batch, actor())


def test_ranks_without_a_common_count_are_refused() -> None:
    config, row = actor(), torch.ones(1, 4)
    config.global_batch_info.update(dp_size=2)
    with pytest.raises(ValueError, match="global_batch_size is not set, but there are 2 data-parallel ranks"):
        fspo_policy_loss(row, row, row, row, config=config)
