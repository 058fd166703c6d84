"""On every rank: the head's kernels, interpreted on the CPU, against float64. Prints one line when all of it
held. Start it with TRITON_INTERPRET=1."""

from __future__ import annotations

import gc
import os
import random
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

import head_problem
import head_worker
import torch
import torch.distributed as dist
from head_problem import Problem, check_problem, mine, oracle

from megatron_fspo.config import Parallel
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.parallel import head, triton_head
from megatron_fspo.parallel.head import linear_log_probs
from megatron_fspo.verify.cases import LOSSES
from passes import build, make_micro_batches, scoring_of
from sync_worker import samples

kernels = partial(linear_log_probs, kind="triton")


def check_problems() -> None:
    """fp32: values and gradients as exact as torch's, whatever is kept, split and fetched."""
    main_grads = (None, torch.float32, torch.bfloat16)
    cases = product(((37, 8), (90, 1), (3, 1)), (False, True), main_grads)
    for seed, ((vocab, multiple), sequence_parallel, main_grad) in enumerate(cases):
        choice = random.Random(seed).choice
        problem = Problem(
            vocab=vocab,
            multiple=multiple,
            dtype=torch.float32,
            temperature=choice([1.0, 0.6, 1.7]),
            mask_of=choice(["some", "some", "all", "none"]),
            gradients_of=choice(["both", "log-probs", "entropies"]),
            sequence_parallel=sequence_parallel,
        )
        sizes = {
            "KEEP_BYTES": choice([0, 24 * 16 * 4, 1 << 30]),  # nothing, a tile or two of columns, all
            "GRADIENT_BYTES": choice([0, 24 * 32 * 4, 1 << 29]),
        }
        launch = {
            "_PROGRAMS": choice([1, 1024]),
            "INTERPRETED": replace(triton_head.INTERPRETED, descriptors=choice([False, True])),
        }
        with mock.patch.multiple(head, **sizes), mock.patch.multiple(triton_head, **launch):
            try:
                check_problem(problem, None, main_grad)
            except Exception as error:
                error.add_note(f"rank {dist.get_rank()}, {main_grad=}, {sizes=}, {launch=}, {problem}")
                raise


def check_bf16() -> None:
    """fp32 logits of bf16 operands; gradients up to the rounding of one operand; labels on every border."""
    world = dist.get_world_size()
    tokens, width, padded, vocab, temperature = 40, 32, 48 * world, 48 * world - 5, 0.8
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = torch.randn(padded, width, generator=generator).div(4).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    borders = torch.tensor([0, vocab - 1, *(48 * rank + end for rank in range(1, world) for end in (-1, 0))])
    labels[5 : 5 + len(borders)] = borders
    rows = torch.arange(3, tokens, 2)
    rows = torch.cat([torch.arange(5, 5 + len(borders)), rows[rows >= 5 + len(borders)]])
    upstream = torch.randn(2, tokens, generator=generator)
    exact = hidden.double().requires_grad_(), weight[:vocab].double().requires_grad_()
    wanted = oracle(exact[0][rows], exact[1], labels[rows], temperature)
    torch.autograd.backward(wanted, [*upstream[:, rows].double()])
    want_weight = torch.zeros(padded, width, dtype=torch.float64)
    want_weight[:vocab] = exact[1].grad
    for keep in (0, 1 << 30):
        leaves = hidden.clone().requires_grad_(), mine(weight).clone().requires_grad_()
        leaves[1].main_grad = torch.zeros(leaves[1].shape)
        with mock.patch.object(head, "KEEP_BYTES", keep):
            outputs = kernels(
                *leaves, labels, rows, group=dist.group.WORLD, vocab_size=vocab, temperature=temperature
            )
        torch.autograd.backward(outputs, [*upstream])
        for got, want in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(got[rows].double(), want, rtol=1e-6, atol=1e-5)
        found = (leaves[0].grad, exact[0].grad), (leaves[1].main_grad, mine(want_weight))
        for got, want in found:
            assert (got - want).norm() < 5e-3 * want.norm(), (keep, (got - want).norm() / want.norm())


def check_kept() -> None:
    """Only for a backward pass, the first."""
    problem = Problem(dtype=torch.float32)
    hidden, weight = problem.leaves()
    with mock.patch.object(triton_head, "add_gradients", wraps=triton_head.add_gradients) as add:
        outputs = problem.run(hidden, weight)
        problem.loss(outputs).backward(retain_graph=True)
        once = hidden.grad.clone()
        problem.loss(outputs).backward()
        torch.testing.assert_close(hidden.grad, 2 * once, rtol=1e-5, atol=1e-4)
        assert [call.args[-2].shape[1] > 0 for call in add.call_args_list] == [True], "nothing was kept"
    with mock.patch.object(triton_head, "statistics", wraps=triton_head.statistics) as made, torch.no_grad():
        quiet = problem.run(hidden, weight)
    assert [call.args[-1] for call in made.call_args_list] == [0]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(quiet, outputs, strict=True))


def check_bounds() -> None:
    """Memory, in bytes; and the shapes that torch is told of, where nothing runs."""
    states, weight = torch.randn(40, 16), torch.randn(90, 16)
    columns = torch.arange(40)
    for keep_bytes, tiles in ((0, 0), (2 * 40 * 16 * 4 + 9, 2), (1 << 20, 6)):
        _, kept, tops = triton_head.statistics(states, weight, columns, 1.0, keep_bytes)
        assert kept.shape == (40, 16 * tiles) and tops.shape == (tiles, 40)
    arguments = (states, weight, columns, 1.0, 1 << 20)
    torch.library.opcheck(triton_head.statistics, arguments, test_utils=("test_schema", "test_faketensor"))
    stats = torch.rand(6, 40)
    grad_weight = torch.zeros(weight.shape)
    for block_bytes, tiles in ((0, 1), (3 * 40 * 16 * 4, 3)):
        with mock.patch.object(triton_head, "_logits_gradient") as made:
            triton_head.add_gradients(None, grad_weight, states, weight, columns, stats, columns, kept, tops,
                                      temperature=1.0, block_bytes=block_bytes)  # fmt: skip
        assert {call.args[0].shape for call in made.call_args_list} == {(40, 16 * tiles)}
        assert len(made.call_args_list) == 6 / tiles


def check_training(checkpoint: Path) -> None:
    """Megatron's schedule, layers and buffers: every parameter's gradient is that of the chunks in torch."""
    ranks = int(os.environ["WORLD_SIZE"])
    layout = Parallel(tensor=ranks, sequence=ranks > 1)
    found = []
    for kind in ("torch", "triton"):
        policy = build(checkpoint, layout)
        scoring = replace(scoring_of(policy), head=kind)
        loss = PolicyLoss(objective=LOSSES["fspo"].objective(), scoring=scoring, entropy_coef=0.1)
        with mock.patch.object(triton_head, "add_gradients", wraps=triton_head.add_gradients) as add:
            policy.backward(make_micro_batches(policy, samples(), 70), loss)
        assert add.called is (kind == "triton")
        found.append([p.main_grad.clone() for chunk in policy.chunks for p in chunk.parameters()])
        stop()
    for one, other in zip(*found, strict=True):
        # Sums in fp32, whose order differs by machine: an element is as exact as the largest one.
        assert (one - other).abs().max() <= 1e-6 + 1e-5 * one.abs().max()


def check_tried() -> None:
    """What ``auto`` tries before it takes them."""
    device = torch.device("cpu")
    assert head.tried(device) is None
    assert head.tried(device, 64, 18992) is None, "a model's own sizes"
    factors = triton_head._factors
    with mock.patch.object(triton_head, "_factors", lambda *given: 1.05 * factors(*given)):
        assert "d hidden" in (head.tried(device) or "")
    with mock.patch.object(triton_head, "statistics", side_effect=RuntimeError("no image for this GPU")):
        assert "no image for this GPU" in (head.tried(device) or "")


def main() -> None:
    if os.environ["WORLD_SIZE"] == "1":
        check_tried()
    check_training(Path(sys.argv[1]))
    dist.init_process_group("gloo")
    with (
        mock.patch.object(head_problem, "linear_log_probs", kernels),
        mock.patch.object(head_worker, "linear_log_probs", kernels),
    ):
        check_bf16()
        check_kept()
        check_bounds()
        head_worker.check_nearly_certain()
        head_worker.check_all_negative()
        check_problems()
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(f"all held on {dist.get_world_size()} ranks\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
