"""On every rank: the parallel room against float64 oracles. Prints one line per check that held."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fspo.parallel.metrics import add_metrics, any_rank, gather_lists, reduce_metrics, share
from megatron_fspo.parallel.segments import sequence_sums
from megatron_fspo.parallel.vocab import vocab_parallel_log_probs


def oracle(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def check_vocab(vocab: int, temperature: float, dtype: torch.dtype) -> None:
    """Values and gradients of log-probs and entropy, with a padded vocabulary."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = -(-vocab // world)
    generator = torch.Generator().manual_seed(vocab)
    tokens = 50
    full = (torch.randn(tokens, width * world, generator=generator) * 6).to(dtype)
    full[0, 3] = 80.0  # a sharp row, which overflows exp without the max
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[0], labels[1] = 3, vocab - 1
    grads = torch.randn(2, tokens, generator=generator)
    grads[:, 5] = 0.0

    mine = full[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    before = mine.detach().clone()
    log_probs, entropy = vocab_parallel_log_probs(
        mine, labels, group=dist.group.WORLD, vocab_size=vocab, temperature=temperature
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert torch.equal(mine.detach(), before), "the logits were changed in place"
    (grads[0] * log_probs + grads[1] * entropy).sum().backward()

    exact = full[:, :vocab].double().requires_grad_()
    want_log_probs, want_entropy = oracle(exact, labels, temperature)
    (grads[0] * want_log_probs + grads[1] * want_entropy).sum().backward()
    assert (log_probs - want_log_probs).abs().max() < 2e-5
    assert (entropy - want_entropy).abs().max() < 2e-5
    want = torch.zeros(tokens, width * world, dtype=torch.float64)
    want[:, :vocab] = exact.grad
    got, want = mine.grad, want[:, rank * width : (rank + 1) * width]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got - want).abs().max() < tolerance * max(1.0, want.abs().max().item())
    assert torch.equal(got[5], torch.zeros_like(got[5])), "a row without upstream gradient has one"


def check_not_finite_row() -> None:
    """A NaN row is NaN in value, and spoils neither other rows nor, unused, its own gradient."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    if dist.get_rank() == 0:
        logits[2, 1] = float("nan")
    logits.requires_grad_()
    labels = torch.zeros(4, dtype=torch.long)
    log_probs, _ = vocab_parallel_log_probs(
        logits, labels, group=dist.group.WORLD, vocab_size=6 * dist.get_world_size()
    )
    assert log_probs.isnan().tolist() == [False, False, True, False]
    torch.where(log_probs.isnan(), 0.0, log_probs).sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad[2] == 0).all()


class _Counter:
    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return self.function(*args, **kwargs)


def check_collectives() -> None:
    """Two per call, whatever the number of tokens."""
    world = dist.get_world_size()
    for tokens in (1, 300):
        # A Mock would keep the group it was called with, and a gloo group that outlives
        # destroy_process_group aborts the interpreter's exit now and then.
        counter = _Counter(dist.all_reduce)
        with mock.patch.object(dist, "all_reduce", counter):
            labels = torch.zeros(tokens, dtype=torch.long)
            logits = torch.randn(tokens, 8)
            vocab_parallel_log_probs(logits, labels, group=dist.group.WORLD, vocab_size=8 * world)
        assert counter.calls == (2 if world > 1 else 0)


def check_sequence_sums() -> None:
    """Sequences whose tokens lie on all ranks; lengths and values in decades, so a wrong rank would show."""
    world, rank = dist.get_world_size(), dist.get_rank()
    lengths = [1, 10, 100, 7]
    segment = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((6,), 4)])
    values = 10.0**segment + torch.arange(len(segment)) / 1000
    mask = (torch.arange(len(segment)) % 3 != 0) & (segment < 4)
    values[~mask] = float("nan")
    want = [values[mask & (segment == i)].double().sum().item() for i in range(4)]
    owner = torch.randint(0, world, (len(segment),), generator=torch.Generator().manual_seed(3)) == rank
    got = sequence_sums(values[owner], mask[owner], segment[owner], 4, group=dist.group.WORLD)
    assert got.shape == (4,)
    assert torch.allclose(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6)
    empty = sequence_sums(values[:2] * 0, mask[:2], segment[:2] * 0, 0, group=dist.group.WORLD)
    assert empty.shape == (0,)


def check_metrics() -> None:
    """(sum, denominator) pairs: the same mean for every split over ranks and micro-batches."""
    world, rank = dist.get_world_size(), dist.get_rank()
    values = torch.arange(1.0, 25.0)
    want = values.mean().item()
    for pieces in (1, 2, 5):
        mine = values[rank::world].tensor_split(pieces)
        parts = [
            {"a": torch.stack([v.sum(), torch.tensor(float(len(v)))]), "none": torch.zeros(2)} for v in mine
        ]
        reduced = reduce_metrics(add_metrics(parts), group=dist.group.WORLD)
        assert abs(reduced["a"] - want) < 1e-12 and reduced["none"] != reduced["none"]
    try:
        add_metrics([{"a": torch.ones(2)}, {"b": torch.ones(2)}])
        raise AssertionError("different names were added up")
    except KeyError:
        pass
    assert gather_lists([rank] * rank, group=dist.group.WORLD) == [r for r in range(world) for _ in range(r)]
    assert share({"rank": rank}, group=dist.group.WORLD) == {"rank": 0}
    device = torch.device("cpu")
    assert any_rank(rank == world - 1, device=device) and not any_rank(False, device=device)


def main() -> None:
    dist.init_process_group("gloo")
    for vocab in (64, 37):
        for temperature in (1.0, 0.6):
            for dtype in (torch.float32, torch.bfloat16):
                check_vocab(vocab, temperature, dtype)
    check_not_finite_row()
    check_collectives()
    check_sequence_sums()
    check_metrics()
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(f"all held on {dist.get_world_size()} ranks\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
