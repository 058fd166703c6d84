"""FSPO with the Tinker API, without the service: a table of log-probs learns to repeat even digits.

    python examples/in_tinker/train.py

``LocalClient`` replaces the service's client and has the two methods that training calls. With a key, use
``tinker.ServiceClient().create_lora_training_client(base_model=...)`` instead, in the same loop.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_fspo.adapters.tinker import fspo_loss
from megatron_fspo.objective import leave_one_out_advantages

DIGITS, END = 10, 10
LONGEST, RESPONSES, STEPS = 30, 64, 30


class LocalClient:
    """A table of next-token log-probs given the last token, with Adam."""

    def __init__(self) -> None:
        self.table = torch.zeros(DIGITS + 1, DIGITS + 1, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=0.03)

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sample a response: return preceding tokens, sampled tokens and their log-probs, all [T]."""
        tokens = [END]
        while len(tokens) <= LONGEST and (len(tokens) == 1 or tokens[-1] != END):
            tokens.append(int(torch.multinomial(self.table[tokens[-1]].softmax(dim=0), 1)))
        before, after = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        return before, after, self._score(before, after).detach()

    def forward_backward_custom(self, data: list, loss_fn: object) -> dict[str, float]:
        """Backpropagate the loss through the log-probs, linearised as in the service's client."""
        scores = [self._score(d.model_input, d.loss_fn_inputs["target_tokens"].to_torch()) for d in data]
        leaves = [score.detach().requires_grad_() for score in scores]
        loss, metrics = loss_fn(data, leaves)
        loss.backward()
        sum((score * leaf.grad).sum() for score, leaf in zip(scores, leaves, strict=True)).backward()
        return metrics

    def optim_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _score(self, before: Tensor, after: Tensor) -> Tensor:
        return self.table[before].log_softmax(dim=-1)[range(len(after)), after]


def make_datum(before: Tensor, after: Tensor, log_probs: Tensor, advantage: Tensor) -> SimpleNamespace:
    """Return an object with the fields of ``tinker.types.Datum``, without a prompt to mask."""
    inputs = {
        "target_tokens": after,
        "logprobs": log_probs,
        "advantages": advantage.expand(len(after)),
        "mask": torch.ones(len(after)),
    }
    tensors = {name: SimpleNamespace(to_torch=lambda value=value: value) for name, value in inputs.items()}
    return SimpleNamespace(model_input=before, loss_fn_inputs=tensors)


def train() -> list[float]:
    """Train and return the mean reward of each step: the share of tokens that are even digits."""
    torch.manual_seed(1)
    client, means = LocalClient(), []
    for step in range(STEPS):
        responses = [client.sample() for _ in range(RESPONSES)]
        rewards = torch.stack(
            [((after < END) & (after % 2 == 0)).float().mean() for _, after, _ in responses]
        )
        advantages = leave_one_out_advantages(rewards[None])[0]
        data = [make_datum(*row, advantage) for row, advantage in zip(responses, advantages, strict=True)]
        for _ in range(4):
            metrics = client.forward_backward_custom(data, fspo_loss())
            client.optim_step()
        means.append(rewards.mean().item())
        if step % 5 == 4:
            print(f"step {step + 1:3}  reward {means[-1]:.3f}  out of band {metrics['fspo/out_of_band']:.3f}")
    return means


if __name__ == "__main__":
    train()
