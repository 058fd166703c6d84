"""On every rank: the log-prob head against a float64 oracle. Prints one line when all of it held."""

from __future__ import annotations

import gc
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # a dispatch mode imports it, and then its default arguments would keep the group
import torch.nn.functional as F
from head_problem import Problem, assert_close, check_problem, mine, oracle
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fspo.parallel import head
from megatron_fspo.parallel.head import linear_log_probs

# Every collective that might be used, and what it does.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
TINY_BLOCKS = ({"cpu": 20}, {"cpu": 4})


def check_problems() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    layouts = ((37, 1), (37, 8), (3, 1))
    main_grads = (None, torch.float32, torch.bfloat16, torch.float64)
    cases = product(dtypes, (False, True), layouts, main_grads)
    for seed, (dtype, sequence_parallel, (vocab, multiple), main_grad) in enumerate(cases):
        choice = random.Random(seed).choice
        chunk = (1, 7, 100)[seed % 3]
        problem = Problem(
            vocab=vocab,
            multiple=multiple,
            dtype=dtype,
            temperature=choice([1.0, 0.6, 1.7]),
            mask_of=choice(["some", "some", "some", "all", "none"]),
            gradients_of=choice(["both", "log-probs", "entropies"]),
            sequence_parallel=sequence_parallel,
        )
        blocks = choice([TINY_BLOCKS, (head.BLOCK_LOGITS, head._BLOCK_COLUMNS)])
        with (
            mock.patch.object(head, "BLOCK_LOGITS", blocks[0]),
            mock.patch.object(head, "_BLOCK_COLUMNS", blocks[1]),
        ):
            try:
                check_problem(problem, chunk, main_grad)
            except Exception as error:
                error.add_note(f"rank {dist.get_rank()}, {chunk=}, {main_grad=}, {blocks=}, {problem}")
                raise


def of_labels(hidden: Tensor, weight: Tensor, labels: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Of all rows."""
    every = torch.arange(len(labels))
    return linear_log_probs(hidden, mine(weight), labels, every, group=dist.group.WORLD, vocab_size=vocab)


def check_nearly_certain() -> None:
    """The gradient of a label with p close to 1, which exp(z - lse) - 1 would lose to a rounded lse = 80."""
    vocab = 8 * dist.get_world_size()
    weight = torch.tensor([[80.0, 1.0], [69.0, 0.0], *[[-1000.0, 0.0]] * (vocab - 2)])
    for grad_entropy in (0.0, 1e-30):
        hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
        outputs = of_labels(hidden, weight, torch.tensor([0]), vocab)
        torch.autograd.backward(outputs, [torch.ones(1), torch.full((1,), grad_entropy)])
        want = 1 / (1 + math.exp(11))
        assert abs(hidden.grad[0, 1].item() / want - 1) < 0.01, hidden.grad[0, 1]


def check_all_negative() -> None:
    """Logits near -30000 beside ranks of only padding, whose max must not count."""
    world, vocab = dist.get_world_size(), 3
    weight = torch.tensor([[-30000.0], [-30001.0], [-30003.0], *[[math.nan]] * (3 * world)])
    weight = weight[: -(-vocab // world) * world]
    labels = torch.tensor([0, 2])
    got = of_labels(torch.ones(2, 1), weight, labels, vocab)
    want = oracle(torch.ones(2, 1).double(), weight[:vocab].double(), labels, 1.0)
    for value, right in zip(got, want, strict=True):
        assert_close(value, right, torch.float32)


@contextmanager
def collectives() -> Iterator[list[tuple[str, int]]]:
    """What is called inside: its kind, and the elements of its larger tensor."""
    made: list[tuple[str, int]] = []

    def counted(kind: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            # Sizes only: a gloo group that outlives destroy_process_group aborts the exit now and then.
            tensors = [x for x in tree_leaves(args) if torch.is_tensor(x)]
            assert all(x.is_contiguous() for x in tensors), "NCCL refuses it"
            made.append((kind, max((x.numel() for x in tensors), default=0)))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, kind in COLLECTIVES.items():
            if hasattr(dist, name):
                function = counted(kind, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, function))
        yield made


def check_collectives() -> None:
    """How many, and how much they carry: whatever the number of chunks, and on ranks of only padding."""
    world = dist.get_world_size()
    for vocab, sequence_parallel, chunk in product((37, 3), (False, True), (1, 100)):
        problem = Problem(vocab=vocab, tokens=48, sequence_parallel=sequence_parallel)
        leaves = problem.leaves()
        states = problem.tokens * problem.width
        forward = [("all_gather", world * 4 * int(problem.mask.sum()))]
        decided = ("broadcast", 2 * int(problem.mask.sum()))
        backward = [decided, ("all_reduce", int(problem.used.sum()) * problem.width)]
        if sequence_parallel:
            forward, backward = [("all_gather", states), *forward], [decided, ("reduce_scatter", states)]
        with collectives() as made:
            outputs = problem.run(*leaves, chunk)
        assert made == (forward if world > 1 else []), made
        loss, nothing = problem.loss(outputs), sum(output[:5].sum() * 0.0 for output in outputs)
        with collectives() as made:
            loss.backward(retain_graph=True)
        assert made == (backward if world > 1 else []), made
        before = [leaf.grad.clone() for leaf in leaves]
        with collectives() as made:
            nothing.backward()
            replace(problem, mask_of="none").run(*leaves, chunk)[0].sum().backward()
        assert made == ([decided] if world > 1 else []), made
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, before, strict=True))


class Work(TorchDispatchMode):
    """Notes the products [m, k] @ [k, n] inside as m · k · n, and the sizes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            left, right = [x for x in args if torch.is_tensor(x)][-2:]
            self.products += left.numel() * right.shape[-1]
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        for x in tree_leaves(result):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in given:
                self.sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return result


def check_work() -> None:
    """Only what is wanted is computed, and one buffer of logits [chunk, V / tp] is all there is of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for gradients_of, chunk in product(("log-probs", "both"), (16, 100, None)):
        problem = Problem(
            vocab=200 * world - 1,
            tokens=600,
            width=17,
            dtype=torch.float32,
            gradients_of=gradients_of,
        )
        hidden, weight = problem.leaves()
        weight.main_grad = torch.zeros_like(weight)
        real = 199 if rank == world - 1 else 200
        with mock.patch.object(head, "BLOCK_LOGITS", {"cpu": 2 * real}):
            with Work() as forward:
                outputs = problem.run(hidden, weight, chunk)
            with Work() as backward:
                torch.autograd.backward(outputs, [*problem.upstream.float()])
        for work, used, products in ((forward, problem.mask, 1), (backward, problem.used, 3)):
            rows = int(used.sum())
            assert work.products == products * rows * problem.width * real
            # As few chunks as do, all of about one size.
            logits = math.ceil(rows / math.ceil(rows / (256 if chunk is None else chunk))) * real
            larger = [size for size in work.sizes if size > hidden.numel()]
            assert larger == ([logits] if logits > hidden.numel() else []), (larger, logits)
        assert hidden.numel() not in forward.sizes, "hidden was copied"
        # What autograd gets; the gradient itself goes straight to main_grad.
        assert backward.sizes.count(weight.numel()) == 1


def check_tied() -> None:
    """With Megatron's hook, main_grad of a tied weight gets the head's gradient and the embedding's, once."""
    for mask_of, dtype in product(("some", "none"), (torch.float32, torch.bfloat16)):
        problem = Problem(dtype=dtype, mask_of=mask_of, multiple=8)
        hidden, weight = problem.leaves()
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
        fired = []

        def hook(weight: Tensor, fired: list[bool] = fired) -> None:
            fired.append(weight.grad_added_to_main_grad)
            if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None

        handle = weight.register_post_accumulate_grad_hook(hook)
        ids = torch.tensor([0, 1, 1])
        embedded = F.embedding(ids, weight).sum()
        (problem.loss(problem.run(hidden, weight)) + embedded).backward()
        handle.remove()
        assert fired == [True]
        want = problem.exact()[3]
        want.index_add_(0, ids, torch.ones(3, problem.width, dtype=torch.float64))
        assert_close(weight.main_grad, want, dtype, scale=40)


def check_one_decides() -> None:
    """Upstream gradients that are a little off, lost or NaN on one rank: the first rank's count, so that no
    rank works on other rows than the rest."""
    world, rank = dist.get_world_size(), dist.get_rank()
    spoilt: dict[str, Callable[[Tensor], Tensor]] = {
        "2 ulp, and rows more": lambda x: x.nextafter(x + 1).nextafter(x + 1),
        "no rows": torch.zeros_like,
        "not finite": lambda x: x * math.nan,
    }
    for sequence_parallel, gradients_of in product((False, True), ("both", "log-probs")):
        problem = Problem(sequence_parallel=sequence_parallel, gradients_of=gradients_of)
        for what, spoil in spoilt.items():
            hidden, weight = problem.leaves()
            problem.loss(problem.run(hidden, weight)).backward()
            for victim in range(1, world):
                found = problem.leaves()
                upstream = torch.where(problem.used, problem.upstream, 0.0)
                if rank == victim:
                    upstream = spoil(upstream)
                torch.autograd.backward(problem.run(*found), [*upstream])
                for leaf, want in zip(found, (hidden, weight), strict=True):
                    assert torch.equal(leaf.grad, want.grad), (what, victim, sequence_parallel)
        first = [leaf.clone().detach().requires_grad_() for leaf in problem.leaves()]
        nothing = problem.upstream * (rank > 0)
        torch.autograd.backward(problem.run(*first), [*nothing])
        assert all((leaf.grad == 0).all() for leaf in first), "not the first rank's"


def check_frozen() -> None:
    """Only one of the two wants a gradient, or neither; a saved weight that comes back as another object."""
    problem = Problem(gradients_of="log-probs")
    world = dist.get_world_size()
    _, _, want_hidden, want_weight = problem.exact()
    hidden, weight = problem.leaves()
    with collectives() as made:
        problem.loss(problem.run(hidden.detach(), weight)).backward()
    assert [kind for kind, _ in made] == ["all_gather", "broadcast"] * (world > 1), "nobody wants d hidden"
    assert hidden.grad is None
    assert_close(weight.grad, want_weight, torch.float64, scale=40)

    frozen = weight.detach()
    frozen.main_grad = torch.zeros_like(frozen)
    problem.loss(problem.run(hidden, frozen)).backward()
    assert_close(hidden.grad, want_hidden, torch.float64, scale=10)
    assert (frozen.main_grad == 0).all() and not hasattr(frozen, "grad_added_to_main_grad")

    with torch.no_grad():
        quiet = problem.run(hidden, weight)
    outputs = problem.run(hidden, weight)
    for first, again in zip(quiet, outputs, strict=True):
        assert not first.requires_grad and torch.equal(first.nan_to_num(), again.nan_to_num())

    weight.main_grad = torch.zeros_like(weight)
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        outputs = problem.run(hidden, weight)
    problem.loss(outputs).backward()
    assert weight.grad_added_to_main_grad is True
    assert_close(weight.main_grad, want_weight, torch.float64, scale=40)


def check_second_derivative() -> None:
    problem = Problem()
    hidden, weight = problem.leaves()
    log_probs, _ = problem.run(hidden, weight)
    (gradient,) = torch.autograd.grad(log_probs[:3].square().sum(), hidden, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        assert "once_differentiable" in str(error)
    else:
        raise AssertionError("a second derivative that was never written")


def check_errors() -> None:
    problem = Problem(vocab=37, multiple=8, mask_of="all")
    hidden, weight = problem.leaves()
    rows = problem.mask.nonzero()[:, 0]
    legal = {"vocab_size": 37, "labels": problem.labels, "rows": rows}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"labels": problem.labels[1:]}, "24 hidden states, 23 labels"),
        ({"rows": problem.mask}, "rows of torch.bool"),
        ({"sequence_parallel": True}, f"{24 * dist.get_world_size()} hidden states"),
        ({"vocab_size": 65}, "vocab_size 65"),
        ({"chunk_tokens": 0}, "chunk_tokens 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": float("nan")}, "temperature nan"),
    ]
    for wrong, message in cases:
        if "sequence_parallel" in wrong and dist.get_world_size() == 1:
            continue
        try:
            linear_log_probs(hidden, weight, group=dist.group.WORLD, **{**legal, **wrong})
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{wrong} was taken")
    right = problem.run(hidden, weight)
    for wrong_label in (37, 64, -1):  # 37 is a row of padding
        labels = problem.labels.index_fill(0, torch.tensor(3), wrong_label)
        got = linear_log_probs(hidden, weight, labels, rows, group=dist.group.WORLD, vocab_size=37)
        assert not right[0][3].isnan() and got[0][3].isnan()
        assert torch.equal(got[0].nan_to_num(), right[0].index_fill(0, torch.tensor(3), 0.0).nan_to_num())
        assert torch.equal(got[1].nan_to_num(), right[1].nan_to_num())


def main() -> None:
    warnings.simplefilter("error", FutureWarning)  # names that torch gives up
    dist.init_process_group("gloo")
    check_errors()
    check_one_decides()
    check_frozen()
    check_tied()
    check_nearly_certain()
    check_all_negative()
    check_second_derivative()
    check_collectives()
    check_work()
    check_problems()
    gc.collect()  # cycles, too, keep groups
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(f"all held on {dist.get_world_size()} ranks\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
