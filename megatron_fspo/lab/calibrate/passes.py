"""The passes: the same responses scored in several ways, by the parts of a run that is not to train.

Model, packs, scoring, sampler and optimizer are those of ``train``. Weights go from the policy to a second
model of another precision as a Hugging Face checkpoint, so both hold the same values whatever their layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.errors import InputError
from megatron_fspo.lab.calibrate.emulate import emulate_fp8
from megatron_fspo.lab.explain.rows import location, read_rows
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.state.hf_weights import export_hf, load_hf
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.packing.zigzag import padded_length
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.record.records import as_tensors
from megatron_fspo.trainer.advantages import add_advantages
from megatron_fspo.trainer.batch import pack_and_score
from megatron_fspo.trainer.build import build
from megatron_fspo.trainer.mismatch import per_sample
from megatron_fspo.trainer.noise import own_precision
from megatron_fspo.trainer.optimize import OptimizerStep, update
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout, describe, make_mini_batches, make_rollout, with_advantages
from megatron_fspo.trainer.sampling import collect_and_grade
from megatron_fspo.trainer.training import Training
from megatron_fspo.types import Completion, Prompt
from megatron_fspo.weights import Architecture

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response."""
Kind = Literal["repeat", "packs", "sampler", "precision", "updates"]


@dataclass(frozen=True, kw_only=True)
class PassDifference:
    """The difference of two passes over the same responses."""

    kind: Kind
    """repeat: the same pass again; packs: with other packs; sampler: the trainer's minus the sampler's
    log-probs; precision: the coarser minus the finer; updates: what precision adds to S after the optimizer
    steps of one rollout, S in the coarser minus S in the finer."""
    precision: str
    """The coarser of the two, or that of both."""
    emulated: bool
    sums: Tensor
    """[n] over the responses, nats; on every rank."""
    flips: Tensor
    """[2, n] response tokens that a router sends to other experts in one pass than in the other, and their
    part of ``sums``. Zeros with other packs, where routes are not compared."""


class _Pass(NamedTuple):
    """Of the T tokens of this rank's micro-batches."""

    log_probs: Tensor
    """[T] float64."""
    routes: list[Tensor] | None
    """[t, layers, k] of each micro-batch; None of a dense model."""
    flipped: Tensor
    """[T] bool: other experts than the routes that the micro-batches had."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of all passes."""

    lengths: Tensor
    """[n] response lengths."""
    groups: Tensor
    """[n] the prompt of each."""
    differences: list[PassDifference]
    first_updates: tuple[Tensor, Tensor, Tensor] | None
    """S, L and prompt of the sequences that the first off-policy optimizer steps saw; None without any."""


def quiet(config: Config, *, given: bool) -> Config:
    """The run, as far as it is needed: one step, at the full learning rate, in a folder of its own."""
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": f"{config.run.name}.calibrate", "steps": 1},
        "evaluation": {"every": 0},
        "log": {"wandb": "off"},
        "optimizer": {"warmup_steps": 0},
        "rollout": {"max_staleness": 0, "dynamic_sampling": False},
    }
    if given:
        changes["rollout"]["engine"] = "embedded"
    sections = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return config.model_copy(update={**sections, "loss": config.loss.without_noise()})


def measure(inputs: Inputs, emulated: Sequence[FP8], given: Sequence[Row]) -> Measured:
    """Run the passes of a run that is :func:`quiet`, with FP8 recipes to imitate, over ``given`` responses,
    or those that the run samples first. Collective."""
    run = build(inputs)
    try:
        if given:
            rollout = as_rollout(list(given), run.groups)
        else:
            rollout = collect_and_grade(inputs, run.groups, run.queue.take(0))
            rollout = add_advantages(inputs, run.groups, rollout)
        return _Passes(run, rollout, emulated).measured(sampled=not given)
    finally:
        run.engine.close()
        run.log.close()


class _Passes:
    def __init__(self, run: Training, rollout: Rollout, emulated: Sequence[FP8]) -> None:
        self._run, self._rollout, self._emulated = run, rollout, emulated
        # Any advantage but 0: micro-batches leave out what teaches nothing.
        self._everything = with_advantages(rollout, torch.ones(len(rollout)))
        self._micro_batches = self._packed(run.inputs.config.batch.max_tokens)
        self._weights = run.inputs.config.run_folder / "weights"

    def measured(self, *, sampled: bool) -> Measured:
        run, rollout = self._run, self._rollout
        own, first = own_precision(run.inputs.config), self._scored(run.policy)
        again = self._scored(run.policy, beside=first)
        others = self._packed(self._other_size())
        (there,) = self._sums(self._scored(run.policy, others).log_probs[None], others)
        (here,) = self._sums(first.log_probs[None], self._micro_batches)
        none = torch.zeros(2, len(rollout))
        differences = [
            self._difference("repeat", own, again.log_probs - first.log_probs, again.flipped),
            PassDifference(kind="packs", precision=own, emulated=False, sums=there - here, flips=none),
        ]
        if sampled:
            sampler = torch.cat([batch.sampled_log_probs for batch in self._micro_batches])
            differences.append(self._difference("sampler", own, first.log_probs - sampler, first.flipped))
        before = self._in_all_precisions()
        differences += [self._difference("precision", name, *compared) for name, compared in before.items()]
        moved, first_updates = self._updates() if sampled else (False, None)
        if moved:
            for name, (delta, flipped) in self._in_all_precisions().items():
                then, had = before[name]
                differences.append(self._difference("updates", name, delta - then, flipped | had))
        if dist.get_rank() == 0:
            shutil.rmtree(self._weights, ignore_errors=True)
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(prompt.token_ids), len(numbers)) for prompt in rollout.prompts]
        return Measured(
            lengths=rollout.lengths,
            groups=torch.tensor(groups).repeat_interleave(rollout.samples),
            differences=differences,
            first_updates=first_updates,
        )

    def _packed(self, max_tokens: int) -> MicroBatches:
        run = self._run
        config = run.inputs.config
        config = config.model_copy(update={"batch": config.batch.model_copy(update={"mini_batches": 1})})
        layout = replace(run.layout, max_tokens=max_tokens)
        return make_mini_batches(config, self._everything, run.groups, layout)[0]

    def _other_size(self) -> int:
        """Tokens of packs that hold other sequences than the run's: as few as fit, or else twice as many."""
        rollout, size = self._rollout, self._run.groups.cp.size()
        lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
        rows = rollout.rows.tolist()
        tokens = [padded_length(n, size, rows=k) for n, k in zip(lengths, rows, strict=True)]
        usual = self._run.inputs.config.batch.max_tokens
        return max(tokens) if sum(sorted(tokens)[:2]) <= usual else 2 * usual

    def _scored(
        self, model: Model, micro_batches: MicroBatches | None = None, *, beside: _Pass | None = None
    ) -> _Pass:
        """A pass in which routers choose for themselves; flips are from the routes of ``beside``, of the same
        micro-batches, or from the sampler's."""
        micro_batches = self._micro_batches if micro_batches is None else micro_batches
        if beside is not None and beside.routes is not None:
            micro_batches = micro_batches.with_columns(routes=beside.routes)
        micro_batches, passes = model.with_routers(micro_batches)
        log_probs = torch.cat(model.score(micro_batches, self._run.scoring)).double()
        if passes is None:
            return _Pass(log_probs, None, torch.zeros_like(log_probs, dtype=torch.bool))
        return _Pass(log_probs, passes.routes(), torch.cat(passes.flipped()))

    def _difference(self, kind: Kind, precision: str, delta: Tensor, flipped: Tensor) -> PassDifference:
        """Of the differences [T] of tokens, of which some have flipped [T]."""
        values = torch.stack([delta, flipped.double(), torch.where(flipped, delta, 0.0)])
        sums = self._sums(values, self._micro_batches)
        emulated = precision in {fp8.recipe for fp8 in self._emulated}
        return PassDifference(kind=kind, precision=precision, emulated=emulated, sums=sums[0], flips=sums[1:])

    def _sums(self, values: Tensor, micro_batches: MicroBatches) -> Tensor:
        """[k, n] over the response tokens of each response, of [k, T]."""
        parts = iter(torch.split(values, [batch.loss_mask.numel() for batch in micro_batches.on_host], dim=1))

        def masked(batch: MicroBatch) -> Tensor:
            return torch.where(batch.loss_mask, next(parts), 0.0)

        group = self._run.groups.dp_cp
        return per_sample(micro_batches, masked, len(values), len(self._rollout), group=group).cpu()

    def _in_all_precisions(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Coarser precision → log-probs [T] in it less those in the finer one it is compared with, and which
        tokens have flipped."""
        run = self._run
        config, own = run.inputs.config, self._scored(run.policy)
        export_hf(run.policy, self._weights, source=config.model.checkpoint)
        compared: dict[str, tuple[Tensor, Tensor]] = {}
        precision = own_precision(config)
        if precision != "float32":
            if precision == "bfloat16":
                finer = self._copy(torch.float32, "local")
            else:
                finer = self._copy(torch.bfloat16, run.inputs.backend.layers)
            fine = self._scored(finer, beside=own)
            compared[precision] = own.log_probs - fine.log_probs, fine.flipped
        for fp8 in self._emulated:
            coarser = self._copy(run.inputs.dtype, "local")
            emulate_fp8(coarser, fp8)
            coarse = self._scored(coarser, beside=own)
            compared[fp8.recipe] = coarse.log_probs - own.log_probs, coarse.flipped
        return compared

    def _copy(self, dtype: torch.dtype, layers: Literal["local", "transformer_engine"]) -> Model:
        """The policy's weights in a model of another precision."""
        inputs = self._run.inputs
        model = Model(
            inputs.arch,
            replace(inputs.backend, layers=layers),
            self._run.groups,
            parallel=inputs.config.parallel,
            dtype=dtype,
            fp8=BF16,
        )
        load_hf(model, self._weights)
        return model

    def _updates(self) -> tuple[bool, tuple[Tensor, Tensor, Tensor] | None]:
        """Take the optimizer steps of the rollout; returns whether they changed anything, and S, L and prompt
        of what the off-policy ones saw."""
        self._run.engine.rest()
        batch, _ = pack_and_score(self._run, self._rollout)
        steps: list[OptimizerStep] = []
        for mini_batch in batch.mini_batches * self._run.inputs.config.batch.epochs:
            steps.append(update(self._run, batch, mini_batch, before=steps))
        moved = any(step.update.grad_norm > 0 for step in steps)
        # S is 0 until the first update that has a gradient.
        off_policy = (record for step in steps if not step.on_policy for record in step.records)
        records = [record for record in off_policy if record.counts and record.log_ratio_sum]
        if not records:
            return moved, None
        samples = torch.tensor([record.sample for record in records])
        return moved, (*as_tensors(records), samples // self._rollout.samples)


def read_responses(path: Path, config: Config, arch: Architecture) -> list[Row]:
    """The responses of a file of JSON lines with ``prompt_token_ids`` and ``token_ids``, and other keys.

    Raises:
        InputError: the file, the line, and what is wrong with it.
    """
    rows, most = [], config.batch.max_tokens
    keys, last = "prompt_token_ids and token_ids", arch.vocab_size - 1
    for number, content in read_rows(path):
        where = location(path, number)
        try:
            row = tuple(content["prompt_token_ids"]), tuple(content["token_ids"])
        except (KeyError, TypeError):
            raise InputError(f"{where}: needs an object with {keys}") from None
        ids = row[0] + row[1]
        if not row[0] or not row[1] or not all(type(i) is int and 0 <= i <= last for i in ids):
            raise InputError(f"{where}: {keys} need token ids from 0 to {last}")
        if len(ids) > most:
            raise InputError(f"{where}: {len(ids)} tokens, more than batch.max_tokens = {most}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} has no responses")
    return rows


def as_rollout(rows: list[Row], groups: ParallelGroups) -> Rollout:
    """Given responses as a run holds its own, one to a prompt; without rewards or log-probs."""
    size, rank = groups.dp.size(), groups.dp.rank()
    prompts = [Prompt(index=i, token_ids=prompt, text="", answer="") for i, (prompt, _) in enumerate(rows)]
    completions = [
        Completion(token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop", weight_version=0)
        for _, ids in rows
    ]
    table = torch.tensor([describe(completion, i % size) for i, completion in enumerate(completions)])
    held = (
        {i: completion for i, completion in enumerate(completions) if i % size == rank}
        if groups.is_replica_leader
        else {}
    )
    return make_rollout(prompts, 1, table.double(), held)
