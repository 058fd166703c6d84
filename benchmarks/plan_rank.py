"""One rank of benchmarks/plan_memory.py, which starts it with torchrun: what the real thing allocates.

Each case is a policy with random weights and one backward over packs of given sequences, in the trainer's own
code, on a CPU. Bytes of tensors are counted, storage by storage: every operation shows what it made, and a
storage counts until it is freed. What a kernel or a collective allocates for itself does not show.
"""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fspo import config as options
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.policy import Policy, run_schedule
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.state.checkpoint import save_checkpoint
from megatron_fspo.mcore.state.hf_weights import hf_tensors
from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.surrogate import SequenceLevel
from megatron_fspo.packing.batch import MicroBatches, Sequences
from megatron_fspo.packing.pack import pack
from megatron_fspo.parallel.buckets import in_buckets, to_bytes
from megatron_fspo.parallel.groups import gather_lists, pack_layout
from megatron_fspo.verify.cases import SMALL, random_samples
from megatron_fspo.weights import Architecture, Experts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Case = Mapping[str, Any]
_EXPERTS = Experts(count=4, per_token=2, ffn_size=24, normalize_top_k=True)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made within it and are still there; and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What comes in without having come out was there before.
        self._see((args, kwargs), new=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, new=True)
        self.peak = max(self.peak, self.live)
        return out

    def _see(self, tree: Any, *, new: bool) -> None:
        for tensor in tree_leaves(tree):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            size = storage.nbytes() if new else 0
            self._known.add(key)
            self.live += size
            weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def architecture(case: Case) -> Architecture:
    """A published shape, or the small one of ``verify`` (with experts: ``small-moe``), with ``layers`` of its
    layers."""
    small = {"small": SMALL, "small-moe": replace(SMALL, model_type="qwen3_moe", experts=_EXPERTS)}
    arch = (small | PRESETS)[case["model"]]
    more = {key: case[key] for key in ("tied", "vocab_size") if key in case}
    return replace(arch, num_layers=case.get("layers", arch.num_layers), **more)


def build(case: Case) -> Policy:
    """A policy with random weights, in the case's layout."""
    parallel = options.Parallel(**case["parallel"])
    backend = choose_backend("cpu")
    policy = Policy(
        architecture(case),
        backend,
        start(backend, parallel=parallel, seed=1),
        parallel=parallel,
        dtype=DTYPES[case["dtype"]],
        optimizer=options.Optimizer(lr=1e-9),
        recompute=case.get("recompute", False),
    )
    with torch.no_grad():
        for parameter in (p for chunk in policy.chunks for p in chunk.parameters()):
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    policy.weights_loaded()
    return policy


def make_micro_batches(policy: Policy, case: Case) -> MicroBatches:
    """``packs`` packs of the sequences ``shapes``, (prompt, response), for each data-parallel rank."""
    groups = policy.groups
    layout = replace(
        pack_layout(
            groups, "cpu", sequence=policy.parallel.sequence, interleaved=policy.parallel.interleaved
        ),
        max_tokens=sum(p + r for p, r in case["shapes"]),
    )
    shapes = [tuple(shape) for shape in case["shapes"]] * (case.get("packs", 1) * groups.dp.size())
    samples = random_samples(shapes, vocab_size=policy.arch.vocab_size, seed=1)
    found = pack(
        Sequences.of(
            prompts=[s.prompt.token_ids for s in samples],
            responses=[s.completion.token_ids for s in samples],
            log_probs=[s.completion.log_probs for s in samples],
            advantages=[s.advantage for s in samples],
        ),
        layout,
    )
    assert len(found) == case.get("packs", 1), f"{len(found)} packs"
    return found


def step_bytes(policy: Policy, micro_batches: MicroBatches) -> dict[str, int]:
    """The most that is held between forward and backward, and the peak of an optimizer step's backward."""
    scoring = Scoring(groups=policy.groups, vocab_size=policy.arch.vocab_size, temperature=1.0)
    band = FSPOBand(c_low=0.03, c_high=0.03)
    loss = PolicyLoss(objective=SequenceLevel(band=band), scoring=scoring)
    policy.zero_gradients()
    counted = LiveBytes()
    held = []

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        out, then = loss.forward_step(iterator, model)
        held.append(counted.live)
        return out, then

    with counted:
        run_schedule(policy.modules, micro_batches, forward_step, forward_only=False)
    return {"held": max(held), "peak": counted.peak}


def state_bytes(policy: Policy) -> dict[str, int]:
    """After an optimizer step, when all that the optimizer keeps is there; without counters of steps."""
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    optimizer = policy.optimizer
    kept: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        kept += [p for group in inner.param_groups for p in group["params"]]
        kept += [x for values in inner.state.values() for x in values.values() if x.dim()]
    weights = _storages(parameters)
    return {
        "parameters": sum(weights.values()),
        "gradients": sum(_storages(p.main_grad for p in parameters).values()),
        "optimizer": sum(size for key, size in _storages(kept).items() if key not in weights),
    }


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage once."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


def checkpoint_bytes(policy: Policy) -> int:
    """Tensors that a saved checkpoint has, by its index."""
    with TemporaryDirectory() as mine:
        folder = Path(gather_lists([mine], group=dist.group.WORLD)[0]) / "saved"
        save_checkpoint(policy, folder, {})
        stored = FileSystemReader(folder / "torch_dist").read_metadata().state_dict_metadata.values()
        dist.barrier()
    tensors = [one for one in stored if isinstance(one, TensorStorageMetadata)]
    return sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors)


def cache_bytes(policy: Policy, rows: int, tokens: int) -> int:
    """KV cache of the embedded engine with so many rows."""
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=policy.arch.vocab_size)
    with decoder.session(slots=rows, max_tokens=tokens):
        decoder.feed([[1, 2]] * rows)
        layers = [layer for chunk in policy.chunks for layer in chunk.decoder.layers]
        return sum(x.nbytes for layer in layers for x in layer.self_attention.core_attention.cache)


def sent_bytes(policy: Policy) -> int:
    """The most that a weight update holds on this rank.

    gloo's thread may hold a gathered tensor for a moment after its collective has returned, which a busy
    machine stretches: the least of some passes is what the update itself holds.
    """
    return min(_sent_once(policy) for _ in range(4))


def _sent_once(policy: Policy) -> int:
    with torch.no_grad(), LiveBytes() as counted:
        named = [chunk.named_parameters() for chunk in policy.chunks]
        for bucket in in_buckets(hf_tensors(policy, named)):  # the one before is on its way meanwhile
            to_bytes([tensor for _, tensor in bucket], torch.device("cpu"))
    return counted.peak


def measured(case: Case) -> dict[str, Any]:
    """All that the case asks for, on this rank."""
    policy = build(case)
    micro_batches = make_micro_batches(policy, case)
    first = micro_batches[0]
    found: dict[str, Any] = {
        "stage": policy.groups.pp.rank(),
        "rank": policy.groups.dp_cp.rank(),
        "lengths": first.borders.diff().tolist(),
        "scored": int(first.loss_mask.sum()),
        **step_bytes(policy, micro_batches),
    }
    if case.get("state"):
        policy.step({}, policy.grad_norm())
        found |= state_bytes(policy) | {"checkpoint": checkpoint_bytes(policy)}
        found["cache"] = cache_bytes(policy, *case["rows"])
        found["sent"] = sent_bytes(policy)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="JSON: by case and rank what was found")
    parser.add_argument("cases", help="JSON: a list of cases")
    options = parser.parse_args()
    found = []
    for case in json.loads(options.cases):
        mine = measured(case)
        found.append(gather_lists([mine], group=dist.group.WORLD))
        first = dist.get_rank() == 0
        stop()
    if first:
        options.out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
