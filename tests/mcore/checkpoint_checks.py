"""What :mod:`checkpoint_worker` does on every rank."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import Tensor

import passes
from backend import BACKEND
from megatron_fspo import config as options
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import join, stop
from megatron_fspo.mcore.model.model import is_expert
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.state import checkpoint
from megatron_fspo.mcore.state.checkpoint import begin_save, load_checkpoint, save_checkpoint
from megatron_fspo.mcore.state.hf_weights import hf_tensors, load_hf
from megatron_fspo.mcore.state.parameter_state import MOMENTS, parameter_states
from megatron_fspo.weights.chunks import ChunkWriter
from megatron_fspo.weights.folder import SUMS
from worker import step

FP32, BF16 = torch.float32, torch.bfloat16
OPTIMIZER = options.Optimizer(lr=1e-3, warmup_steps=2)
DO = options.Parallel(distributed_optimizer=True)
LAYOUTS = {
    "dp4": options.Parallel(),
    "dp4.do": DO,
    "tp2.sp.dp2.do": options.Parallel(tensor=2, sequence=True, distributed_optimizer=True),
    "tp2.pp2": options.Parallel(tensor=2, pipeline=2),
    "pp2.vpp2.cp2.do": options.Parallel(
        pipeline=2, virtual_pipeline=2, context=2, distributed_optimizer=True
    ),
    "ep2": options.Parallel(expert=2),
    "pp2.ep2": options.Parallel(pipeline=2, expert=2),
    "tp2.sp.ep4.do": options.Parallel(tensor=2, sequence=True, expert=4, distributed_optimizer=True),
}
State = dict[str, Tensor]
"""Hugging Face name, after ``weight.``, ``main.`` or a moment's name → the whole tensor; on rank 0 only."""


def build(model: Path, layout: str, dtype: torch.dtype) -> Policy:
    stop()  # a layout that is left alone keeps its groups, and they their threads: hundreds in the end
    return passes.build(model, LAYOUTS[layout], dtype=dtype, load=False, optimizer=OPTIMIZER)


def resumed(model: Path, folder: Path, layout: str, dtype: torch.dtype) -> Policy:
    policy = build(model, layout, dtype)
    assert load_checkpoint(policy, folder)["step"] == 2
    assert policy.optimizer_steps == 2
    return policy


def trained(model: Path, layout: str, dtype: torch.dtype) -> Policy:
    """After two steps."""
    policy = build(model, layout, dtype)
    load_hf(policy, model)
    step(policy, 512)
    step(policy, 512)
    return policy


def whole_state(policy: Policy) -> State:
    """Weights, what the optimizer updates, and its moments, whole."""
    found = {}
    names = {parameter: name for chunk in policy.chunks for name, parameter in chunk.named_parameters()}
    for what in ("weight", "main", *MOMENTS):
        values = {}
        for state in parameter_states(policy):
            held = {"main": state.main, **state.moments}.get(what, torch.empty(0))
            tensor = torch.zeros(state.parameter.shape)
            tensor.view(-1)[state.first : state.first + held.numel()] = held
            if policy.parallel.distributed_optimizer:
                expert = is_expert(names[state.parameter])
                dist.all_reduce(tensor, group=policy.groups.copies(expert=expert))
            values[state.parameter] = state.parameter.detach().float() if what == "weight" else tensor
        named = [[(name, values[p]) for name, p in chunk.named_parameters()] for chunk in policy.chunks]
        found |= {f"{what}.{name}": tensor.clone() for name, tensor in hf_tensors(policy, named)}
    return found


def same(got: State, want: State, *, tolerance: float = 0.0) -> bool:
    """Decided by rank 0, told to all."""
    answer = [got.keys() == want.keys()]
    for key in want if answer[0] else ():
        answer[0] &= bool((got[key] - want[key]).abs().max() <= tolerance)
    dist.broadcast_object_list(answer)
    return answer[0]


def as_dtype(state: State, dtype: torch.dtype) -> State:
    """What becomes of a state that is resumed with weights of ``dtype``: they are those of the main copy."""
    mains = {key: tensor for key, tensor in state.items() if key.startswith("main.")}
    weights = {key.replace("main.", "weight."): t.to(dtype).float() for key, t in mains.items()}
    return {**state, **weights}


# Saved by → resumed by, the same dtype; and resumed by in the other.
RESUMES = {
    ("tp2.sp.dp2.do", BF16): (["tp2.sp.dp2.do", "dp4", "pp2.vpp2.cp2.do"], "dp4.do"),
    ("dp4", BF16): (["dp4", "tp2.pp2", "dp4.do"], "dp4"),
    ("tp2.pp2", FP32): (["tp2.pp2", "tp2.sp.dp2.do"], "dp4"),
    ("dp4.do", FP32): (["dp4.do", "dp4"], "dp4.do"),
}
# The same of a mixture of experts.
RESUMES_OF_EXPERTS = {
    ("ep2", FP32): (["ep2", "dp4", "tp2.sp.dp2.do"], "pp2.ep2"),
    ("tp2.sp.ep4.do", BF16): (["tp2.sp.ep4.do", "ep2"], "dp4"),
}


def check_resume(model: Path, out: Path, resumes: dict[Any, Any] = RESUMES) -> dict[str, bool]:
    """From each run under other layouts, and in the other dtype."""
    found = {}
    for (origin, dtype), (layouts, retyped) in resumes.items():
        policy, folder = trained(model, origin, dtype), out / f"from-{origin}"
        save_checkpoint(policy, folder, {"step": 2})
        saved = whole_state(policy)
        # The weights are those of the main copy: a run of wrong values would not be.
        found[f"{origin}: main"] = same(as_dtype(saved, dtype), saved)
        step(policy, 512)
        later = whole_state(policy)
        for layout in layouts:
            policy = resumed(model, folder, layout, dtype)
            found[f"{origin}: {layout}"] = same(whole_state(policy), saved)
            if layout == origin or dtype == FP32:
                step(policy, 512)
                # Elsewhere sums have another order, and Adam's first steps are sign(g): near zero it flips.
                tolerance = 0.0 if layout == origin else 3e-3
                found[f"{origin}: {layout}, a step on"] = same(
                    whole_state(policy), later, tolerance=tolerance
                )
        other = FP32 if dtype == BF16 else BF16
        policy = resumed(model, folder, retyped, other)
        found[f"{origin}: {retyped} in {other}"] = same(whole_state(policy), as_dtype(saved, other))
    return found


def check_experts(model: Path, out: Path) -> dict[str, bool]:
    """The checkpoint of two killed ranks, each with half of the experts; and those of other runs."""
    found = {}
    for layout in ("ep2", "dp4", "tp2.sp.ep4.do"):
        state = whole_state(resumed(model, out / "experts", layout, FP32))
        found[f"killed: {layout}"] = same(state, torch.load(out / "experts.pt") if state else {})
    return found | check_resume(model, out, RESUMES_OF_EXPERTS)


def check_megatron(model: Path, out: Path) -> dict[str, bool]:
    """Megatron reads the weights of our checkpoints."""
    found = {}
    policy = build(model, "dp4", BF16)
    data = str(out / "from-tp2.sp.dp2.do/torch_dist")
    policy.chunks[0].load_state_dict(dist_checkpointing.load(policy.chunks[0].sharded_state_dict(), data))
    weights = {name: p.clone() for name, p in policy.chunks[0].named_parameters()}
    load_checkpoint(policy, out / "from-tp2.sp.dp2.do")
    now = policy.chunks[0].named_parameters()
    found["Megatron reads"] = all(torch.equal(weights[name], p) for name, p in now)
    return found


def check_background(model: Path, out: Path) -> dict[str, bool]:
    """Training goes on while a thread writes; what it writes is the state of before."""
    policy = trained(model, "dp4.do", BF16)
    saved, folder, gate = whole_state(policy), out / "background", threading.Event()
    with writer_that(lambda: gate.wait(60)):
        saving = begin_save(policy, folder, {"step": 2}, snapshot=True)
        found = {"not done at once": not saving.finish(wait=False) and not folder.exists()}
        step(policy, 512)
        found["trained on"] = not same(whole_state(policy), saved)
        gate.set()
        found["done"] = saving.finish(wait=True) and folder.exists()
    policy = resumed(model, folder, "dp4.do", BF16)
    found["the state of before"] = same(whole_state(policy), saved)

    def fail() -> None:
        if dist.get_rank() == 3:
            raise OSError(28, os.strerror(28))

    with writer_that(fail):
        saving = begin_save(policy, out / "failed", {"step": 2}, snapshot=True)
        found["an error is told"] = False
        try:
            saving.finish(wait=True)
        except TrainingError as error:
            start = f"{out / 'failed'}: the checkpoint could not be written: rank 3: [Errno 28] No space left"
            found["an error is told"] = str(error).startswith(start)
    found["and nothing looks complete"] = not (out / "failed").exists() and folder.exists()
    save_checkpoint(policy, out / "next", {"step": 2})
    found["which the next removes"] = not list(out.glob("*.partial"))
    resumed(model, out / "first", "dp4.do", BF16)
    return found


def check_damage(model: Path, out: Path) -> dict[str, bool]:
    """A flipped bit anywhere in any file is found before a weight is read, on every rank; or a lost list."""
    policy, folder = resumed(model, out / "next", "dp4.do", BF16), out / "next"
    found, random = {}, Random(5)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    chosen = [*files, *random.choices(files, [path.stat().st_size for path in files], k=20)]
    for path in chosen:
        place, bit = random.randrange(path.stat().st_size), random.randrange(8)
        for damaged in (True, False):
            on_first_rank(lambda: _flip(path, place, bit))  # noqa: B023 - called at once
            if damaged:
                name = f"{path.relative_to(folder)}, bit {bit} of byte {place}"
                found[name] = f"{path} is damaged: " in refusal(policy, folder)
    load_checkpoint(policy, folder)
    on_first_rank(lambda: (folder / SUMS).rename(out / SUMS))
    found["a lost list"] = f"{folder / SUMS} is missing" in refusal(policy, folder)
    on_first_rank(lambda: (out / SUMS).rename(folder / SUMS))
    return found


def on_first_rank(change: Callable[[], object]) -> None:
    """While no rank reads."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


def refusal(policy: Policy, folder: Path) -> str:
    """Why a checkpoint is not loaded; "" where it is."""
    try:
        load_checkpoint(policy, folder)
    except InputError as error:
        return str(error)
    return ""


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 1 << bit]))


def check_refusals(model: Path, other_model: Path, out: Path) -> dict[str, bool]:
    """One line, on every rank, for what no layout explains."""
    other = refusal(build(other_model, "dp4", FP32), out / "from-dp4")
    on_first_rank(lambda: os.truncate(out / "next/torch_dist/__1_0.distcp", 100))
    policy = build(model, "dp4", BF16)
    damaged = refusal(policy, out / "next")
    with pytest.MonkeyPatch.context() as patch:  # a model without one of the tensors
        states = list(checkpoint.parameter_states(policy))
        patch.setattr(checkpoint, "parameter_states", lambda _: states[:-1])
        left = refusal(policy, out / "from-dp4")
    return {
        "another model": "its weights are for" in other and "the run has" in other,
        "a tensor that the model lacks": states[-1].blocks[0].key in left,
        "a damaged file": "__1_0.distcp is damaged" in damaged,
    }


@contextmanager
def writer_that(before: Callable[[], object]) -> Iterator[None]:
    """The writer of files does something before each entry."""
    add = ChunkWriter.add

    def slow(self: ChunkWriter, key: str, offsets: tuple[int, ...], values: Tensor) -> None:
        before()
        add(self, key, offsets, values)

    with patch.object(ChunkWriter, "add", slow):
        yield


def check_memory(out: Path) -> dict[str, float]:
    """Bytes that a save, and a load, take at their peak, per parameter of a rank's own shard."""
    model = out / "wide"
    if dist.get_rank() == 0:
        config = json.loads((out / "model/config.json").read_text())
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config | WIDE))
    dist.barrier()
    policy = build(model, "dp4.do", BF16)
    for ddp in policy._ddp:
        ddp.zero_grad_buffer()
    policy.optimizer.step()
    shard = sum(parameter.numel() for parameter in policy.chunks[0].parameters()) / 4
    with patch.object(checkpoint, "_BOX_BYTES", 2**18):
        return {
            "save": peak(lambda: save_checkpoint(policy, out / "big", {"step": 1})) / shard,
            "load": peak(lambda: load_checkpoint(policy, out / "big")) / shard,
        }


WIDE = {
    **{"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 512, "head_dim": 64},
    **dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_key_value_heads"], 8),
    "layer_types": None,
}


def peak(action: Callable[[], object]) -> float:
    """Largest growth of the process, in bytes, on any rank."""
    done, most, before = threading.Event(), [0], resident()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    action()
    done.set()
    thread.join()
    found = torch.tensor(float(most[0]))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def be_killed(out: Path, model: Path, experts: Path) -> None:
    """Two ranks: checkpoints, ``first`` and ``experts``, and death in the middle of ``second``."""
    save_checkpoint(trained(model, "dp4", FP32), out / "first", {"step": 2})
    policy = trained(experts, "ep2", FP32)
    save_checkpoint(policy, out / "experts", {"step": 2})
    if state := whole_state(policy):
        torch.save(state, out / "experts.pt")
    with writer_that(lambda: time.sleep(0.1)):
        begin_save(policy, out / "second", {"step": 2}, snapshot=True)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


def run(out: Path, model: Path, experts: Path) -> None:
    join(choose_backend(BACKEND))
    found: dict[str, object] = {}
    for name, check in {
        "resume": lambda: check_resume(model, out),
        "experts": lambda: check_experts(experts, out),
        "megatron": lambda: check_megatron(model, out),
        "background": lambda: check_background(model, out),
        "damage": lambda: check_damage(model, out),
        "refusals": lambda: check_refusals(model, model.with_name("narrow"), out),
        "memory": lambda: check_memory(out),
    }.items():
        began = time.perf_counter()
        found[name] = check()
        if dist.get_rank() == 0:
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(every))
    stop()
