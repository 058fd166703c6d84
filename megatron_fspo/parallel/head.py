"""Per-token log-probability and entropy from hidden states, without storing all logits.

With z = hidden · weightᵀ / temperature, m = max z, Z = Σ exp(z - m) and p = exp(z - m) / Z::

    log p(y) = z_y - m - log Z           d log p(y) / d z_v = 1[v = y] - p_v
    H        = log Z - Σ p_v (z_v - m)   d H / d z_v        = -p_v (log p_v + H)

Chunks of tokens share one buffer of [chunk, V / tp] logits, in forward and again in backward. This costs four
matrix products instead of three, but no memory that grows with tokens × vocabulary. Logits are fp32 for any
weight dtype. Only requested rows are computed, and in backward only those with an upstream gradient; for
their number the host waits for a GPU once. On GPUs, :mod:`~megatron_fspo.parallel.triton_head` computes a
rank's share where :func:`triton_problem` returns None.

Collectives over the tensor-parallel group, for any number of chunks; none in a group of one:

- forward: one all-gather of every rank's (max, Σ exp(z - max), Σ exp(z - max) (z - max), target) per row;
  under sequence parallelism also an all-gather of hidden;
- backward: one broadcast of the upstream gradients, two per row, and one all-reduce of d hidden of the rows
  with gradient; under sequence parallelism a reduce-scatter instead.

Saved for backward: hidden (gathered), weight, and for each row its index, label, m, Z, H and log p; with the
kernels also what they keep.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fspo.parallel.groups import broadcast_first

CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}
# Logits processed at a time; on a CPU they fit into the cache.
BLOCK_LOGITS = {"cpu": 1 << 18, "cuda": 1 << 24}
_BLOCK_COLUMNS = {"cpu": 1 << 10, "cuda": 1 << 30}
# For the kernels: logits that forward keeps for backward, and a block of their gradient.
KEEP_BYTES, GRADIENT_BYTES = 1 << 30, 1 << 29
HeadKind = Literal["auto", "torch", "triton"]


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    sequence_parallel: bool = False,
    chunk_tokens: int | None = None,
    kind: HeadKind = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy of each distribution, both differentiable.

    Collective: every rank of the group must use the same labels and rows, and use the same of the two results
    in its loss. Results are bit-identical on every rank, and between calls with the same rows. Backward uses
    the upstream gradients of the group's first rank only, so that all ranks compute the same rows and their
    collectives have the same shapes.

    A weight with ``main_grad`` follows Megatron's protocol: its gradient is added to ``main_grad``,
    ``grad_added_to_main_grad`` is set, and autograd gets zeros, so that hooks fire and the gradient of a tied
    embedding is not disturbed. It is summed over chunks in fp32 or better, and rounded once.

    Args:
        hidden: [t, H]; under sequence parallelism [t / tp, H], this rank's slice in rank order.
        weight: [V / tp, H], this rank's rows of the padded vocabulary, in rank order.
        labels: [t], ids in [0, vocab_size) at the rows. Others get log-prob NaN, as an error would make the
            host wait for the device.
        rows: [n] int64, the tokens to compute, each once.
        group: the tensor-parallel group.
        vocab_size: size without padding; padded rows have probability 0.
        temperature: > 0; divides the logits.
        sequence_parallel: whether hidden is split over the group.
        chunk_tokens: tokens per chunk in torch; default 256 on a CPU, 1024 on a GPU.
        kind: chunks in torch, or kernels in Triton; auto: the kernels where supported.

    Returns:
        log-probs [t] and entropies [t] in nats, 0 outside the rows; fp32 (fp64 for fp64 hidden).

    Raises:
        ValueError: sizes do not fit, or temperature or chunk_tokens is not positive.
    """
    tp, width = group.size(), weight.shape[0]
    tokens = hidden.shape[0] * (tp if sequence_parallel else 1)
    chunk_tokens = CHUNK_TOKENS[hidden.device.type] if chunk_tokens is None else chunk_tokens
    if tokens != labels.shape[0] or rows.dtype != torch.int64:
        raise ValueError(
            f"{tokens} hidden states, {labels.shape[0]} labels, rows of {rows.dtype}: "
            "needs as many labels as hidden states, and rows of int64"
        )
    if vocab_size > tp * width:
        raise ValueError(f"vocab_size {vocab_size} exceeds {tp} ranks x {width} rows of the weight")
    if chunk_tokens < 1 or not temperature > 0:
        raise ValueError(f"chunk_tokens {chunk_tokens}, temperature {temperature}: must be positive")
    head = _Head(
        group=group,
        tokens=tokens,
        vocab_size=vocab_size,
        first=group.rank() * width,
        width=max(0, min(width, vocab_size - group.rank() * width)),
        dtype=torch.promote_types(hidden.dtype, torch.float32),
        temperature=temperature,
        sequence_parallel=sequence_parallel and tp > 1,
        chunk_tokens=chunk_tokens,
        kernels=kind == "triton" or (kind == "auto" and triton_problem(hidden.device, hidden.dtype) is None),
        keep_bytes=KEEP_BYTES * (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)),
    )
    apply: Any = _LinearLogProbs.apply
    log_probs, entropy = apply(hidden, weight, rows, labels[rows], head)
    return log_probs, entropy


def triton_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support hidden states of this dtype on this device; None if they do."""
    if device.type != "cuda":
        return "there is no GPU"
    if dtype != torch.bfloat16:
        return f"model.dtype = {str(dtype).removeprefix('torch.')} is not bfloat16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def tried(device: torch.device, hidden: int = 128, vocabulary: int = 520) -> str | None:
    """Try the kernels, compiled for these sizes of a rank, on few tokens; return what is wrong, or None."""
    from megatron_fspo.parallel import triton_head

    made = torch.Generator(device).manual_seed(1)
    n, width = 150, 528 if vocabulary % 16 == 0 else 520  # Triton compiles anew for multiples of 16
    states = torch.randn(n, hidden, generator=made, device=device).bfloat16()
    weight = torch.randn(width, hidden, generator=made, device=device).mul_(3.4 / hidden**0.5).bfloat16()
    rows = torch.arange(n, device=device)
    columns = rows * 7 % width
    want = (states.float() @ weight.float().t()).log_softmax(-1)
    slope = torch.nn.functional.one_hot(columns, width) - want.exp()
    sums = torch.zeros_like(states, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)
    try:
        table, *kept = triton_head.statistics(states, weight, columns, 1.0, n * width)
        top, total, _, target = _merge(table)
        got = target - top - total.log()
        stats = torch.stack([top, total, 0 * top, got, 1 + 0 * top, 0 * top])
        given = (states, weight, columns, stats, rows, *kept)
        triton_head.add_gradients(*sums, *given, temperature=1.0, block_bytes=1 << 20)
    except Exception as error:
        return f"the kernels fail on this GPU ({type(error).__name__}: {str(error).splitlines()[0]})"
    wanted = want[rows, columns], slope @ weight.float(), slope.t() @ states.float()
    for what, a, b in zip(("log-probs", "d hidden", "d weight"), (got, *sums), wanted, strict=True):
        if not (gap := float((a - b).norm() / b.norm())) < 1e-2:
            return f"the kernels' {what} on this GPU have a relative error of {gap:.2g}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Head:
    """Constants of a call. This rank has the token ids from first to first + width (which may be 0)."""

    group: dist.ProcessGroup
    tokens: int
    vocab_size: int
    first: int
    width: int
    dtype: torch.dtype
    temperature: float
    sequence_parallel: bool
    chunk_tokens: int
    kernels: bool
    keep_bytes: int
    """0 if no backward pass can follow."""

    def chunks(self, hidden: Tensor, weight: Tensor, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a slice of the rows, their hidden states [c, H] and logits z [c, width]; z is one buffer."""
        columns = _BLOCK_COLUMNS[hidden.device.type]
        # Chunks of equal size: products of the last few rows would be slow, and less exact on a CPU.
        count = max(1, -(-len(rows) // self.chunk_tokens))
        size = max(1, -(-len(rows) // count))
        buffer = hidden.new_empty(min(size, len(rows)), self.width, dtype=self.dtype)
        for first in range(0, len(rows) if self.width else 0, size):
            chunk = slice(first, first + size)
            states = hidden[rows[chunk]].to(weight.dtype)
            logits = buffer[: len(states)]
            for start in range(0, self.width, columns):
                some = slice(start, min(start + columns, self.width))
                _product(logits[:, some], states, weight[some].t(), scale=1 / self.temperature)
            yield chunk, states, logits

    def blocks(self, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a slice of a chunk's rows, their logits, and a scratch buffer of the same shape."""
        size = max(1, min(len(logits), BLOCK_LOGITS[logits.device.type] // self.width))
        scratch = torch.empty_like(logits[:size])
        for first in range(0, len(logits), size):
            block = slice(first, first + size)
            yield block, logits[block], scratch[: len(logits) - first]

    def columns(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return which labels are on this rank [c, 1], and their columns [c, 1] (arbitrary for others)."""
        columns = (labels - self.first)[:, None]
        return (columns >= 0) & (columns < self.width), columns.clamp(0, self.width - 1)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy = (hidden.new_zeros(head.tokens, dtype=head.dtype) for _ in range(2))
        stats = log_probs.new_zeros(4, len(rows))
        kept: list[Tensor] = []
        if len(rows):
            if head.sequence_parallel:
                hidden = _gather(hidden, head.group)
            if head.kernels and head.width:
                from megatron_fspo.parallel import triton_head

                table, *kept = triton_head.statistics(
                    hidden[rows], weight[: head.width], labels - head.first, head.temperature, head.keep_bytes
                )
            else:
                table = _statistics(hidden, weight, rows, labels, head)[None]
            top, total, spread, target = _merge(_gather(_merge(table)[None], head.group))
            log_total = total.log()
            # m, Z, H and log p.
            stats = torch.stack([top, total, log_total - spread / total, target - top - log_total])
            known = (labels >= 0) & (labels < head.vocab_size)
            entropy[rows], log_probs[rows] = stats[2], torch.where(known, stats[3], math.nan)
        ctx.save_for_backward(hidden, weight, rows, labels, stats)
        # A saved tensor may be restored as another object, without the parameter's attributes.
        ctx.head, ctx.parameter, ctx.kept = head, weight, kept
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, labels, stats = ctx.saved_tensors
        with_entropy = gradients[1] is not None  # gradients of log-probs and entropies
        nothing = stats.new_zeros(len(rows))
        upstream = torch.stack([nothing if g is None else g[rows] for g in gradients])
        if len(rows):
            upstream = broadcast_first(upstream, ctx.head.group)
        head: _Head = ctx.head
        used = (upstream != 0).any(0).nonzero()[:, 0]
        stats = torch.cat([stats, upstream])[:, used]  # m, Z, H, log p, and gradients of log p and H: [6, u]
        rows, labels = rows[used], labels[used]
        partial = stats.new_zeros(len(rows), hidden.shape[1]) if ctx.needs_input_grad[0] else None
        total = _accumulator(ctx.parameter, head.dtype) if ctx.needs_input_grad[1] else None
        if ctx.kept and len(rows):
            from megatron_fspo.parallel import triton_head

            own, columns = weight[: head.width], labels - head.first
            triton_head.add_gradients(
                *(partial, total, hidden[rows], own, columns, stats, used, *ctx.kept),
                temperature=head.temperature,
                block_bytes=GRADIENT_BYTES,
            )
            ctx.kept = []  # free its memory; a second backward would compute by chunks
        else:
            _add_gradients(partial, total, hidden, weight, rows, labels, stats, with_entropy, head)
        grad_hidden = None if partial is None else _hidden_gradient(partial, rows, hidden.dtype, head)
        grad_weight = None if total is None else _deliver(ctx.parameter, total)
        return grad_hidden, grad_weight, None, None, None


def _statistics(hidden: Tensor, weight: Tensor, rows: Tensor, labels: Tensor, head: _Head) -> Tensor:
    """[4, n] over this rank's columns: max, Σ exp(z - max), Σ exp(z - max) (z - max), target (or 0)."""
    table = hidden.new_zeros(4, len(rows), dtype=head.dtype)
    # The max without columns; -inf would lead to 0 · inf in _merge.
    table[0] = torch.finfo(table.dtype).min
    for chunk, _, logits in head.chunks(hidden, _operand(weight, hidden, head), rows):
        top, exps, weighted, target = table[:, chunk]
        mine, column = head.columns(labels[chunk])
        target.copy_(torch.where(mine, logits.gather(1, column), 0.0)[:, 0])
        for block, z, exp in head.blocks(logits):
            torch.amax(z, -1, out=top[block])
            z.sub_(top[block, None])
            torch.exp(z, out=exp)
            torch.sum(exp, -1, out=exps[block])
            torch.sum(exp.mul_(z), -1, out=weighted[block])
    return table


def _merge(table: Tensor) -> Tensor:
    """Merge the statistics of several parts of the vocabulary, [parts, 4, n] → [4, n]."""
    top, exps, weighted, target = table.unbind(1)
    best = top.amax(0)
    shift = top - best
    share = shift.exp()
    spread = (share * (weighted + shift * exps)).sum(0)
    return torch.stack([best, (share * exps).sum(0), spread, target.sum(0)])


def _add_gradients(
    partial: Tensor | None,
    total: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    rows: Tensor,
    labels: Tensor,
    stats: Tensor,
    with_entropy: bool,
    head: _Head,
) -> None:
    """Add this rank's share of the gradients of the rows' hidden states [u, H] and of the weight."""
    weight = _operand(weight, hidden, head)
    for chunk, states, logits in head.chunks(hidden, weight, rows):
        column = _to_gradient(logits, labels[chunk], stats[:, chunk], with_entropy, head)
        scale = (1.0 if with_entropy else stats[4, chunk, None]) / (stats[1, chunk, None] * head.temperature)
        if partial is not None:
            # The label's term is by far the largest; add it last, to round it once.
            largest = logits.gather(1, column)
            _product(partial[chunk], logits.scatter_(1, column, 0.0).to(weight.dtype), weight[: head.width])
            partial[chunk].addcmul_(largest, weight[column[:, 0]]).mul_(-scale)
            logits.scatter_(1, column, largest)
        if total is not None:
            states = (states * scale).to(weight.dtype)
            _product(total[: head.width], logits.to(weight.dtype).t(), states, scale=-1.0, add=True)


def _to_gradient(logits: Tensor, labels: Tensor, stats: Tensor, with_entropy: bool, head: _Head) -> Tensor:
    """Turn logits [c, width] in place into -Z d loss / d z; return the labels' columns [c, 1]. The caller
    applies 1/Z, and without entropy the upstream gradient, to smaller tensors."""
    top, total, entropy, _, grad_log_p, grad_entropy = stats[..., None]
    mine, column = head.columns(labels)
    label = torch.where(mine, total, 0.0)
    offset = entropy - total.log()
    for block, z, scratch in head.blocks(logits):
        z.sub_(top[block])
        exp = torch.exp(z, out=scratch if with_entropy else z)
        if with_entropy:
            z.add_(offset[block]).mul_(exp).mul_(grad_entropy[block])
        exp.scatter_(1, column[block], exp.gather(1, column[block]) - label[block])
        if with_entropy:
            z.addcmul_(exp, grad_log_p[block])
    return column


def _accumulator(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the buffer for the sum of the chunks' weight gradients: main_grad if it has this dtype."""
    main_grad: Any = getattr(weight, "main_grad", None)
    straight = main_grad is not None and main_grad.dtype == dtype
    return main_grad if straight else torch.zeros_like(weight, dtype=dtype)


def _deliver(weight: Tensor, total: Tensor) -> Tensor:
    """Return the weight gradient for autograd: zeros if ``main_grad`` has it."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return total.to(weight.dtype)
    if total is not main_grad:
        main_grad.add_(total)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight)


def _hidden_gradient(partial: Tensor, rows: Tensor, dtype: torch.dtype, head: _Head) -> Tensor:
    """Return the gradient of hidden from this rank's share [n, H] for the rows. Collective."""
    shape, tp = (head.tokens, partial.shape[1]), head.group.size()
    if head.sequence_parallel:
        mine = partial.new_zeros(shape[0] // tp, shape[1])
        if len(rows):
            full = partial.new_zeros(shape).index_copy_(0, rows, partial)
            _collective("reduce_scatter_single", "reduce_scatter_tensor")(mine, full, group=head.group)
        return mine.to(dtype)
    if len(rows) and tp > 1:
        dist.all_reduce(partial, group=head.group)
    return partial.new_zeros(shape, dtype=dtype).index_copy_(0, rows, partial.to(dtype))


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension. Collective."""
    if group.size() == 1:
        return tensor
    gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    _collective("all_gather_single", "all_gather_into_tensor")(gathered, tensor.contiguous(), group=group)
    return gathered


def _collective(name: str, until_2_12: str) -> Any:
    """Return a collective that torch 2.13 renamed; the old name raises warnings there."""
    return getattr(dist, name if hasattr(dist, name) else until_2_12)


def _operand(weight: Tensor, hidden: Tensor, head: _Head) -> Tensor:
    """Return the weight in the dtype for products: only CUDA multiplies bf16 with fp32 results."""
    keep = weight.is_cuda and weight.dtype == hidden.dtype == torch.bfloat16
    return weight if keep else weight.to(head.dtype)


def _product(out: Tensor, left: Tensor, right: Tensor, *, scale: float = 1.0, add: bool = False) -> None:
    """out = scale · left @ right, or out += that with ``add``; accumulates in the dtype of out."""
    kind: dict[str, Any] = {} if left.dtype == out.dtype else {"out_dtype": out.dtype}
    torch.addmm(out, left, right, beta=int(add), alpha=scale, out=out, **kind)
