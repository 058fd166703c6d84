"""What the log-prob head is asked, and the float64 answer from all logits at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.parallel.head import linear_log_probs


def oracle(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@dataclass(kw_only=True)
class Problem:
    """Whole tensors, the same on every rank. What must not be looked at is NaN, or -100."""

    vocab: int = 37
    multiple: int = 1
    """The vocabulary is padded to a multiple of it times the number of ranks."""
    dtype: torch.dtype = torch.float64
    tokens: int = 24
    width: int = 8
    temperature: float = 1.0
    mask_of: str = "some"
    gradients_of: str = "both"
    sequence_parallel: bool = False
    seed: int = 0
    """Of everything but the weight."""
    hidden: Tensor = field(init=False, repr=False)
    weight: Tensor = field(init=False, repr=False)
    labels: Tensor = field(init=False, repr=False)
    mask: Tensor = field(init=False, repr=False)
    upstream: Tensor = field(init=False, repr=False)
    """[2, t]: gradients of the log-probs and of the entropies."""

    def __post_init__(self) -> None:
        step = self.multiple * dist.get_world_size()
        padded = -(-self.vocab // step) * step
        generator = torch.Generator().manual_seed(self.vocab)
        weight = torch.randn(padded, self.width, generator=generator, dtype=torch.float64)
        generator.manual_seed(self.seed)
        hidden = torch.randn(self.tokens, self.width, generator=generator, dtype=torch.float64) * 2
        # Rows 0 and 1 have a logit of 80, which overflows exp: that of the label, and another.
        hidden[:2] = 80 * self.temperature * weight[2] / weight[2].square().sum()
        self.labels = torch.randint(0, self.vocab, (self.tokens,), generator=generator)
        self.labels[:3] = torch.tensor([2, 0, self.vocab - 1])
        self.mask = torch.rand(self.tokens, generator=generator) < 0.7
        self.mask[:10] = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1, 1]) == 1
        if self.mask_of != "some":
            self.mask[:] = self.mask_of == "all"
        self.upstream = torch.randn(2, self.tokens, generator=generator, dtype=torch.float64)
        self.upstream[:, [4, 5, 9]] = 0.0
        self.upstream[0, 7] = self.upstream[1, 8] = 0.0
        if self.gradients_of != "both":
            self.upstream[1 if self.gradients_of == "log-probs" else 0] = 0.0
        hidden[~self.mask] = float("nan")
        hidden[5] = float("nan")
        self.labels[~self.mask] = -100
        weight[self.vocab :] = float("nan")
        self.hidden, self.weight = hidden.to(self.dtype), weight.to(self.dtype)

    @property
    def used(self) -> Tensor:
        """[t]: which rows have an upstream gradient."""
        return self.mask & (self.upstream != 0).any(0)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """This rank's hidden states and rows of the weight."""
        # A slice need not be contiguous.
        hidden = mine(self.hidden).t().contiguous().t() if self.sequence_parallel else self.hidden
        return hidden.clone().requires_grad_(), mine(self.weight).clone().requires_grad_()

    def run(self, hidden: Tensor, weight: Tensor, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        return linear_log_probs(
            hidden,
            weight,
            self.labels,
            self.mask.nonzero()[:, 0],
            group=dist.group.WORLD,
            vocab_size=self.vocab,
            temperature=self.temperature,
            sequence_parallel=self.sequence_parallel,
            chunk_tokens=chunk,
        )

    def loss(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        terms = (self.upstream * torch.stack(outputs)).sum(0)
        return torch.where((self.upstream != 0).any(0), terms, 0.0).sum()  # 0 · NaN would be NaN

    def exact(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs [t], entropies [t], and the gradients of all hidden states and of the whole weight."""
        rows = self.mask & self.hidden.isfinite().all(-1)
        hidden = self.hidden[rows].double().requires_grad_()
        weight = self.weight[: self.vocab].double().requires_grad_()
        outputs = torch.stack(oracle(hidden, weight, self.labels[rows], self.temperature))
        (self.upstream[:, rows] * outputs).sum().backward()
        values = torch.zeros(2, self.tokens, dtype=torch.float64)
        values[:, rows] = outputs.detach()
        grad_hidden = torch.zeros(self.hidden.shape, dtype=torch.float64)
        grad_weight = torch.zeros(self.weight.shape, dtype=torch.float64)
        grad_hidden[rows], grad_weight[: self.vocab] = hidden.grad, weight.grad
        if self.sequence_parallel:
            grad_hidden = mine(grad_hidden)
        return values[0], values[1], grad_hidden, mine(grad_weight)


def mine(whole: Tensor) -> Tensor:
    """This rank's slice of the first dimension."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """As exact as the arithmetic is; a bf16 result may be rounded once more."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else tolerance / 10
    torch.testing.assert_close(got.double(), want, rtol=rounding, atol=tolerance * scale)


def check_problem(problem: Problem, chunk: int | None, main_grad: torch.dtype | None) -> None:
    """Values and gradients; two micro-batches where there is a main_grad."""
    weight = problem.leaves()[1]
    padding = mine(problem.weight).isnan().any(-1)
    if main_grad is not None:
        weight.main_grad = torch.linspace(-1, 1, weight.numel()).view(weight.shape).to(main_grad)
    for batch in [problem] if main_grad is None else [problem, replace(problem, seed=1)]:
        before = None if main_grad is None else weight.main_grad.to(torch.float64, copy=True)
        hidden = batch.leaves()[0]
        outputs = batch.run(hidden, weight, chunk)
        batch.loss(outputs).backward()
        *want_outputs, want_hidden, want_weight = batch.exact()
        for got, want in zip(outputs, want_outputs, strict=True):
            check_values(batch, got.detach(), want)
        assert hidden.grad.dtype == batch.dtype
        assert_close(hidden.grad, want_hidden, batch.dtype, scale=10)
        unused = ~(mine(batch.used) if batch.sequence_parallel else batch.used)
        assert (hidden.grad[unused] == 0).all(), "a row without upstream gradient has one"
        if before is None:
            assert weight.grad.dtype == batch.dtype and (weight.grad[padding] == 0).all()
            assert_close(weight.grad, want_weight, batch.dtype, scale=40)
        else:
            assert weight.grad_added_to_main_grad is True and weight.main_grad.dtype == main_grad
            assert weight.grad.shape == weight.shape and (weight.grad == 0).all()
            assert (weight.main_grad[padding] == before[padding]).all()
            coarser = torch.float32 if main_grad == torch.float32 else batch.dtype
            assert_close(weight.main_grad, before + want_weight, coarser, scale=40)


def check_values(problem: Problem, got: Tensor, want: Tensor) -> None:
    """Against the oracle; 0 outside the mask; the same bits on every rank."""
    nan = problem.mask & problem.hidden.isnan().any(-1)
    assert got.dtype == (torch.float64 if problem.dtype == torch.float64 else torch.float32)
    assert torch.equal(got.isnan(), nan), "a row that is not finite spoils others"
    got = torch.where(nan, 0.0, got)
    assert_close(got, want, problem.dtype)
    assert (got[~problem.mask] == 0).all()
    others = [torch.empty_like(got) for _ in range(dist.get_world_size())]
    dist.all_gather(others, got)
    assert all(torch.equal(other, got) for other in others), "the ranks disagree"
