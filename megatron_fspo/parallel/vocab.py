"""Per-token log-probability and entropy when the vocabulary is spread over tensor-parallel ranks.

With z = logits / temperature, m = max z, Z = Σ exp(z - m) and lse = m + log Z::

    log p(y) = z_y - lse            d log p(y) / d z_v = 1[v = y] - p_v
    H        = lse - Σ p_v z_v      d H / d z_v        = -p_v (log p_v + H)

Two collectives per call, whatever the number of tokens: a max, and one sum of three floats per token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of each distribution; both differentiable.

    All arithmetic is fp32, whatever the dtype of the logits. A row whose two upstream gradients are 0 gets
    a gradient of exactly 0, also where its logits are not finite.

    Args:
        logits: [T, V / tp], this rank's slice of the padded vocabulary, in rank order.
        labels: [T], ids in [0, vocab_size); the same on every rank of the group.
        group: the tensor-parallel group.
        vocab_size: size without padding; padded columns have probability 0.
        temperature: > 0; divides the logits.

    Returns:
        log-probs [T] and entropies [T], fp32, in nats, the same on every rank of the group.
    """
    first = group.rank() * logits.shape[-1]
    log_probs, entropy = _VocabParallelLogProbs.apply(logits, labels, first, vocab_size, temperature, group)
    return log_probs, entropy


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        first: int,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        scaled = _scaled(logits, first, vocab_size, temperature)
        top = scaled.amax(-1)
        _all_reduce(top, dist.ReduceOp.MAX, group)

        exps = torch.exp(scaled - top[:, None])
        # 0 · -inf of a padded column is NaN, so it is left out by `where`.
        weighted = torch.where(exps > 0, exps * scaled, 0.0)
        mine, column = _local_labels(labels, first, logits.shape[-1])
        target = torch.where(mine, scaled.gather(-1, column[:, None])[:, 0], 0.0)
        sums = torch.stack([exps.sum(-1), weighted.sum(-1), target])
        _all_reduce(sums, dist.ReduceOp.SUM, group)

        lse = top + sums[0].log()
        entropy = lse - sums[1] / sums[0]
        ctx.save_for_backward(logits, labels, lse, entropy)
        ctx.layout = (first, vocab_size, temperature)
        return sums[2] - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        logits, labels, lse, entropy = ctx.saved_tensors
        first, vocab_size, temperature = ctx.layout
        log_p = _scaled(logits, first, vocab_size, temperature) - lse[:, None]
        p = log_p.exp()
        grad = -p * grad_log_probs[:, None]
        entropy_part = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
        grad -= entropy_part * grad_entropy[:, None]
        mine, column = _local_labels(labels, first, logits.shape[-1])
        grad.scatter_add_(-1, column[:, None], torch.where(mine, grad_log_probs, 0.0)[:, None])
        unused = (grad_log_probs == 0) & (grad_entropy == 0)
        grad = torch.where(unused[:, None], 0.0, grad / temperature)
        return grad.to(logits.dtype), None, None, None, None, None


def _scaled(logits: Tensor, first: int, vocab_size: int, temperature: float) -> Tensor:
    """fp32 logits / temperature, -inf in the padded columns. Never in place: fp32 `.float()` is no copy."""
    scaled = logits.float() / temperature
    real = max(0, min(vocab_size - first, logits.shape[-1]))
    if real < logits.shape[-1]:
        scaled[:, real:] = float("-inf")
    return scaled


def _local_labels(labels: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Which labels lie in this rank's slice, and their column in it (0 where they do not)."""
    column = labels - first
    mine = (column >= 0) & (column < width)
    return mine, torch.where(mine, column, 0)


def _all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
