"""The log-prob head: on real ranks (head_worker.py), on random shapes, and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from head_problem import Problem, check_problem, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from launch import run_worker
from megatron_fspo.parallel import head
from megatron_fspo.parallel.head import HeadKind, linear_log_probs, triton_problem


@pytest.mark.parametrize("nproc", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_head_matches_a_float64_oracle(nproc: int) -> None:
    """Values, gradients, collectives and work on real ranks; see head_worker.py for each check."""
    worker = Path(__file__).with_name("head_worker.py")
    assert f"all held on {nproc} ranks" in run_worker(worker, nproc=nproc)


@pytest.mark.usefixtures("one_rank")
@settings(deadline=None)
@given(
    shape=st.fixed_dictionaries(
        {
            "vocab": st.integers(3, 50),
            "multiple": st.integers(1, 6),
            "tokens": st.integers(10, 30),
            "width": st.integers(1, 9),
            "temperature": st.floats(0.1, 5),
            "mask_of": st.sampled_from(["some", "all", "none"]),
            "seed": st.integers(0, 1000),
        }
    ),
    chunk=st.integers(1, 35) | st.none(),
)
def test_any_shape_and_chunk_give_the_same_as_the_whole_logits(
    shape: dict[str, Any], chunk: int | None
) -> None:
    check_problem(Problem(**shape), chunk, None)


def check_on(
    device: str,
    dtype: torch.dtype,
    main_grad: torch.dtype | None,
    gradients_of: str,
    tokens: int = 300,
    kind: HeadKind = "torch",
) -> None:
    """fp32 logits, whatever the operands, and gradients up to bf16 operands of their products."""
    generator = torch.Generator().manual_seed(0)
    width, vocab, padded = 64, 1000, 1024
    hidden = torch.randn(tokens, width, generator=generator).to(device, dtype)
    weight = torch.randn(padded, width, generator=generator).div_(4).to(device, dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    mask = (torch.rand(tokens, generator=generator) < 0.7).to(device)
    upstream = torch.randn(2, tokens, generator=generator).to(device)
    upstream[:, : tokens // 6] = 0.0
    if gradients_of == "log-probs":
        upstream[1] = 0.0

    mine = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    if main_grad is not None:
        mine[1].main_grad = torch.ones(weight.shape, device=device, dtype=main_grad)
    for chunk in (None, 128):
        outputs = linear_log_probs(
            *mine,
            labels,
            mask.nonzero()[:, 0],
            group=dist.group.WORLD,
            vocab_size=vocab,
            temperature=0.8,
            chunk_tokens=chunk,
            kind=kind,
        )
        torch.autograd.backward(outputs, [*upstream])

    theirs = (hidden.double().requires_grad_(), weight[:vocab].double().requires_grad_())
    exact = [torch.where(mask, x, 0.0) for x in oracle(*theirs, labels, 0.8)]
    torch.autograd.backward(exact, [*upstream.double()])
    for output, want in zip(outputs, exact, strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), want, rtol=1e-6, atol=2e-5)
    wanted = [2 * theirs[0].grad, torch.zeros_like(weight, dtype=torch.float64)]
    wanted[1][:vocab] = 2 * theirs[1].grad
    if main_grad is not None:
        assert (mine[1].grad == 0).all() and mine[1].grad_added_to_main_grad
        wanted[1] += 1
    gradients = (mine[0].grad, mine[1].grad if main_grad is None else mine[1].main_grad)
    for gradient, want in zip(gradients, wanted, strict=True):
        error = (gradient.double() - want).norm() / want.norm()
        assert error < (1e-2 if torch.bfloat16 in (dtype, gradient.dtype) else 1e-5), error


@pytest.mark.gpu
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("gradients_of", ["log-probs", "both"])
@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("torch", torch.float32), ("torch", torch.bfloat16), ("triton", torch.bfloat16)]
)
def test_a_gpu_says_the_same(
    kind: HeadKind,
    dtype: torch.dtype,
    main_grad: torch.dtype | None,
    gradients_of: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "triton" and (problem := triton_problem(torch.device("cuda"), dtype)) is not None:
        pytest.skip(f"the kernels in Triton: {problem}")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check_on("cuda", dtype, main_grad, gradients_of, tokens=3000, kind=kind)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("gradients_of", ["log-probs", "both"])
@pytest.mark.parametrize("main_grad", [None, torch.float32, torch.bfloat16])
def test_bf16_operands_are_multiplied_as_cuda_would(
    main_grad: torch.dtype | None, gradients_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtypes of the GPU's path, on a stand-in for ``torch.addmm`` with what CUDA demands of them."""
    products = []

    def addmm(
        given: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        beta: float,
        alpha: float,
        out: Tensor,
        out_dtype: torch.dtype,
    ) -> Tensor:
        assert left.dtype == right.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        assert given is out
        products.append(left.shape[0] * right.shape[1])
        made = alpha * (left.float() @ right.float())
        return out.copy_(made if beta == 0 else made + beta * out)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(head, "_operand", lambda weight, *_: weight)
    check_on("cpu", torch.bfloat16, main_grad, gradients_of)
    assert products
