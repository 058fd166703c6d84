"""One training step of one rank, through the trainer's own functions: build, load, packs, old pass, updates,
weights for the servers, and memory lent to them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_fspo.config import Config
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.trace.record import Request
from megatron_fspo.lab.trace.watch import Watch
from megatron_fspo.mcore.machine import startup
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.state.hf_weights import fill, hf_tensors
from megatron_fspo.mcore.state.offload import Offload
from megatron_fspo.packing.pack import PackLayout, plan_step
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.parallel.buckets import in_buckets, to_bytes
from megatron_fspo.parallel.control import Control, Timeouts
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.record.log import RunLog
from megatron_fspo.rollout.client.send_weights import Bucket
from megatron_fspo.trainer.batch import pack_and_score
from megatron_fspo.trainer.optimize import OptimizerStep, observe, update
from megatron_fspo.trainer.prepare import DTYPES, Inputs
from megatron_fspo.trainer.rollout import Rollout, describe, make_layout, make_rollout
from megatron_fspo.trainer.training import State, Training
from megatron_fspo.types import Completion, Prompt
from megatron_fspo.weights import Architecture
from megatron_fspo.weights.table import expected_hf_shapes

MICRO_BATCHES = 2
"""Of each optimizer step; there are two, as the optimizer has all of its state only after the first."""


def take_step(request: Request, watch: Watch) -> dict[str, Any]:
    """Take the step; ``watch`` sees it. Returns facts beside the trace: ``state``, bytes held between steps;
    ``left``, those that stay while servers have the GPU; ``micro_batches`` and ``groups``."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.rank, world_size=request.world)
    startup._control = Control(Timeouts(wait=60, silence=60))  # alone: no rank is waited for
    fault: Any = nullcontext()
    if request.fault is not None:
        module, _, name = request.fault.partition(":")
        fault = getattr(import_module(module), name)()
    try:
        with fault:
            return _take(_shortened(Config.model_validate(request.config)), request, watch)
    finally:
        startup.stop()


def _shortened(config: Config) -> Config:
    """The configuration of a step with few micro-batches, which nothing ends."""
    tree = config.model_dump()
    tree["batch"] |= {"mini_batches": 2, "epochs": 1}
    tree["optimizer"] |= {"max_kl": 1e30, "skip_norm_ratio": None}
    tree["rollout"] |= {"mismatch_limit": 1e30, "prompts": 2}
    return Config.model_validate(tree)


def _take(config: Config, request: Request, watch: Watch) -> dict[str, Any]:
    arch = find_model(request.model)
    if request.layers is not None:
        arch = replace(arch.shortened(), num_layers=request.layers)
    if request.experts is not None and arch.experts is not None:
        arch = replace(arch, experts=replace(arch.experts, count=request.experts))
    backend = Backend(
        device=torch.device("cuda", 0),
        collectives="nccl",
        layers="local" if config.model.layers == "local" else "transformer_engine",
        head=config.model.head,
    )
    groups = startup.start(backend, parallel=config.parallel, seed=config.run.seed)
    layout = make_layout(config, arch, groups, backend)
    rollout, tokens = _rollout(config, layout, groups, uneven=request.job is not None)
    # What other ranks tell: the shape of what a stage hands on, and the metrics of the last stage.
    slices = config.parallel.tensor if config.parallel.sequence else 1
    watch.calls.incoming = {(torch.int64, (3,)): torch.tensor([tokens // slices, 1, arch.hidden_size])}
    watch.calls.totals = dict.fromkeys(("actor/ppo_kl", "fspo/kl_k3"), (0.0, 1.0))
    with watch:
        startup.connect_groups(groups, config.parallel, backend.device)
        run = _training(config, arch, backend, groups, layout, watch)
        with watch.during("old pass"):
            batch, _ = pack_and_score(run, rollout)
        steps: list[OptimizerStep] = []
        with watch.during("update"):
            for mini_batch in batch.mini_batches:
                steps.append(update(run, batch, mini_batch, before=steps))
                observe(steps[-1], run.state, groups, run.log, warm=batch.warm, fresh=True)
        facts: dict[str, Any] = {"micro_batches": len(batch.micro_batches)}
        del batch, mini_batch, steps
        run.policy.zero_gradients()
        watch.calls.headers = _headers(arch, config.parallel.pipeline, groups.pp.rank(), run.inputs.dtype)
        with watch.during("weights"):  # what their sender does, up to the sending
            bucket: Bucket = ()
            for bucket in in_buckets(hf_tensors(run.policy)):  # the one before is on its way meanwhile
                to_bytes([tensor for _, tensor in bucket], backend.device)
            del bucket
        facts |= {"state": watch.trace.live}
        if config.vllm.colocated:
            memory = Offload(run.policy, *([run.reference] if run.reference else []))
            with watch.during("lend"):
                memory.hold(weights=False, rest=False)
                facts |= {"left": watch.trace.live}
                memory.hold(weights=True, rest=True)
    names = ("tp", "cp", "dp", "dp_cp", "pp", "ep", "edp")
    return facts | {"groups": {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}}


def _headers(arch: Architecture, stages: int, mine: int, dtype: torch.dtype) -> Iterator[Any]:
    """Yield what the other pipeline stages announce of their weights, by evenly divided layers."""
    for stage in (other for other in range(1, stages) if other != mine):
        theirs = []
        for name, shape in expected_hf_shapes(arch).items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            place = (
                int(layer[1]) * stages // arch.num_layers if layer else (stages - 1) * ("embed" not in name)
            )
            if place == stage:
                theirs.append((name, torch.empty(shape, dtype=dtype, device="meta")))
        for bucket in in_buckets(theirs):
            yield [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        yield None


def _training(
    config: Config,
    arch: Architecture,
    backend: Backend,
    groups: ParallelGroups,
    layout: PackLayout,
    watch: Watch,
) -> Training:
    """A run as :func:`~megatron_fspo.trainer.build.build` makes it, without prompts, sampler and files."""
    inputs = Inputs(
        config=config,
        backend=backend,
        arch=arch,
        tokenizer=None,
        stop_token_ids=(),
        train=(),
        validation=(),
        noise=None,
    )
    made: dict[str, Any] = {
        "parallel": config.parallel,
        "dtype": DTYPES[config.model.dtype],
        "fp8": config.fp8,
    }
    policy = Policy(
        arch,
        backend,
        groups,
        optimizer=config.optimizer.over(config.optimizer_steps),
        recompute=config.model.recompute == "full",
        **made,
    )
    reference = Model(arch, backend, groups, **made) if config.loss.kl_coef else None
    with watch.during("load"):
        for model in filter(None, (policy, reference)):
            fill(model, _Zeros(expected_hf_shapes(arch)))
            model.weights_loaded()
    loss = config.loss.start(None, longest=config.rollout.max_response_tokens, updates=1)
    return Training(
        inputs=inputs,
        groups=groups,
        policy=policy,
        reference=reference,
        engine=None,  # type: ignore[arg-type]
        grader=None,
        scoring=Scoring(
            groups=groups,
            vocab_size=arch.vocab_size,
            temperature=config.rollout.temperature,
            head=backend.head,
        ),
        layout=layout,
        teacher=None,
        queue=None,  # type: ignore[arg-type]
        log=RunLog(config, writer=False, resume_step=None),
        state=State(step=0, loss=loss, norms=deque(maxlen=8), skips_in_a_row=0, saved=-1),
        resumed=False,
    )


@dataclass
class _Zeros:
    """A checkpoint that takes no memory."""

    shapes: Mapping[str, tuple[int, ...]]
    folder: Path = Path("zeros")

    def names(self) -> set[str]:
        return set(self.shapes)

    def file(self, name: str) -> Path:
        return self.folder

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        whole = torch.zeros((), dtype=torch.bfloat16).expand(self.shape(name))
        return whole if slices is None else whole[slices]


def _rollout(
    config: Config, layout: PackLayout, groups: ParallelGroups, *, uneven: bool
) -> tuple[Rollout, int]:
    """Responses for full packs, each on the rank that trains on it; and a rank's tokens of a pack. With
    ``uneven``, each pack is shorter than the one before it."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    context, room = layout.context_size, layout.max_tokens or 0
    samples = 1
    if layout.share_prompts:  # a pack is one prompt with its responses
        samples = max(1, (room - prompt + 1) // (response + 1))
        lengths = [(prompt, response)] * samples
    else:
        count, rest = divmod(room, padded_length(prompt + response, context))
        lengths = [(prompt, response)] * count
        if (short := max(1, rest * prompt // (prompt + response))) < rest - padded_length(1, context):
            lengths.append((short, rest - rest % padded_length(1, context) - short))
    in_pack = sum(padded_length(sum(pair), context) for pair in lengths) // context
    in_pack -= (samples - 1) * (prompt - 1)
    packs = MICRO_BATCHES * layout.data_size * layout.count_multiple_of
    # Together they lack less than a pack. Chunks that take turns get shapes in an order that is not followed.
    shorter = room // packs**2 if uneven and layout.count_multiple_of == 1 else 0
    (p, r), *others = lengths
    lengths = [pair for number in range(packs) for pair in ((p, r - number * shorter), *others)]
    same = [number // samples for number in range(len(lengths))]
    plan, _ = plan_step([p for p, _ in lengths], [r for _, r in lengths], layout, prompts=same)
    owner = {number: rank for rank, packs in enumerate(plan) for pack in packs for number in pack}
    prompts, rows, held = [], [], {}
    for number, (p, r) in enumerate(lengths * config.batch.mini_batches):
        if number % samples == 0:
            prompts.append(Prompt(index=number, text="", token_ids=(1,) * p, answer=""))
        completion = Completion(
            token_ids=[2] * r, log_probs=[0.0] * r, finish_reason="length", weight_version=0
        )
        rank = owner[number % len(lengths)]
        rows.append(describe(completion, rank, 1.0, 1.0))
        if groups.is_replica_leader and rank == layout.data_rank:
            held[number] = completion
    table = torch.tensor(rows, dtype=torch.float64)
    advantages = torch.ones(len(rows), dtype=torch.float64)
    tokens = in_pack + -in_pack % layout.multiple_of
    return replace(make_rollout(prompts, samples, table, held), advantages=advantages), tokens
