"""The passes: the same responses scored in several ways, by the parts of a run that is not to train.

Model, packs, scoring, sampler and optimizer are those of ``train``. Weights go from the policy to a second
model of another precision as a Hugging Face checkpoint, so both hold the same values whatever their layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.lab.calibrate.responses import Row, as_rollout, groups_of
from megatron_fspo.mcore.emulate import emulate_fp8
from megatron_fspo.mcore.hf_weights import export_hf, load_hf
from megatron_fspo.mcore.policy import Model
from megatron_fspo.mismatch.measure import per_sample
from megatron_fspo.packing.batch import MicroBatch, Packs, padded_length
from megatron_fspo.record.records import as_tensors
from megatron_fspo.trainer.begin import roll_out, with_packs
from megatron_fspo.trainer.build import Training, build
from megatron_fspo.trainer.noise import own_precision
from megatron_fspo.trainer.optimize import optimize
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout, make_mini_batches, with_advantages

Kind = Literal["repeat", "packs", "sampler", "precision", "updates"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Between two passes over the same responses."""

    kind: Kind
    """repeat: the same pass again; packs: with other packs; sampler: the trainer's minus the sampler's
    log-probs; precision: the coarser minus the finer; updates: what precision adds to S after the optimizer
    steps of one rollout, S in the coarser minus S in the finer."""
    precision: str
    """The coarser of the two, or that of both."""
    emulated: bool
    sums: Tensor
    """[n] over the responses, nats; on every rank."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured."""

    lengths: Tensor
    """[n] response lengths."""
    groups: Tensor
    """[n] the prompt of each."""
    differences: list[Difference]
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
    return config.model_copy(update={**sections, "loss": config.loss.unmeasured()})


def measure(inputs: Inputs, emulated: Sequence[FP8], given: Sequence[Row]) -> Measured:
    """Run the passes. Collective.

    Args:
        inputs: of a run that is :func:`quiet`.
        emulated: FP8 recipes to imitate.
        given: responses to score; none: those that the run samples first.
    """
    run = build(inputs)
    try:
        rollout = as_rollout(list(given), run.groups) if given else roll_out(run)[0]
        return _Passes(run, rollout, emulated).measured(sampled=not given)
    finally:
        run.engine.close()
        run.log.close()


class _Passes:
    def __init__(self, run: Training, rollout: Rollout, emulated: Sequence[FP8]) -> None:
        self._run, self._rollout, self._emulated = run, rollout, emulated
        # Any advantage but 0: packs leave out what teaches nothing.
        self._everything = with_advantages(rollout, torch.ones(len(rollout)))
        self._packs = self._packed(run.inputs.config.batch.max_tokens)
        self._weights = run.inputs.config.run_folder / "weights"

    def measured(self, *, sampled: bool) -> Measured:
        run, rollout = self._run, self._rollout
        precision = own_precision(run.inputs.config)
        first = self._scored(run.policy)
        found: list[tuple[Kind, Tensor]] = [
            ("repeat", self._scored(run.policy) - first),
            ("packs", self._scored(run.policy, self._packed(self._other_size())) - first),
        ]
        if sampled:
            found.append(("sampler", first - self._sums(self._packs, "sampled_log_probs")))
        differences = [
            Difference(kind=kind, precision=precision, emulated=False, sums=sums) for kind, sums in found
        ]
        before = self._in_all_precisions()
        differences += [
            self._difference("precision", name, pair[0] - pair[1]) for name, pair in before.items()
        ]
        moved, first_updates = self._updates() if sampled else (False, None)
        if moved:
            after = self._in_all_precisions()
            differences += [
                self._difference("updates", name, (after[name][0] - coarse) - (after[name][1] - fine))
                for name, (coarse, fine) in before.items()
            ]
        if dist.get_rank() == 0:
            shutil.rmtree(self._weights, ignore_errors=True)
        return Measured(
            lengths=rollout.lengths,
            groups=groups_of([p.token_ids for p in rollout.prompts for _ in range(rollout.samples)]),
            differences=differences,
            first_updates=first_updates,
        )

    def _difference(self, kind: Kind, precision: str, sums: Tensor) -> Difference:
        emulated = precision in [fp8.recipe for fp8 in self._emulated]
        return Difference(kind=kind, precision=precision, emulated=emulated, sums=sums)

    def _packed(self, max_tokens: int) -> Packs:
        run = self._run
        config = run.inputs.config
        batch = config.batch.model_copy(update={"max_tokens": max_tokens, "mini_batches": 1})
        config = config.model_copy(update={"batch": batch})
        return make_mini_batches(
            config, run.inputs.arch, self._everything, run.groups, run.inputs.backend.device
        )[0]

    def _other_size(self) -> int:
        """Tokens of packs that hold other sequences than the run's: as few as fit, or else twice as many."""
        rollout, size = self._rollout, self._run.groups.cp.size()
        tokens = [padded_length(n, size) for n in (rollout.prompt_lengths + rollout.lengths).tolist()]
        usual = self._run.inputs.config.batch.max_tokens
        return max(tokens) if sum(sorted(tokens)[:2]) <= usual else 2 * usual

    def _scored(self, model: Model, packs: Packs | None = None) -> Tensor:
        """[n] log-probs of the responses under a model."""
        packs = self._packs if packs is None else packs
        return self._sums(
            packs.with_columns(old_log_probs=model.score(packs, self._run.scoring)), "old_log_probs"
        )

    def _sums(self, packs: Packs, column: str) -> Tensor:
        def values(batch: MicroBatch) -> Tensor:
            return torch.where(batch.mask, getattr(batch, column).double(), 0.0)[None]

        group = self._run.groups.dp_cp
        return per_sample(packs, values, 1, len(self._rollout), group=group)[0].cpu()

    def _in_all_precisions(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Coarser precision → log-probs [n] in it, and in the finer one it is compared with."""
        run = self._run
        config, own = run.inputs.config, self._scored(run.policy)
        export_hf(run.policy, self._weights, source=config.model.checkpoint)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        if config.fp8.on:
            finer = self._copy(torch.bfloat16, run.inputs.backend.layers)
            found[config.fp8.recipe] = own, self._scored(finer)
        elif config.model.dtype == "bfloat16":
            finer = self._copy(torch.float32, "local")
            found["bfloat16"] = own, self._scored(finer)
        for fp8 in self._emulated:
            coarser = self._copy(run.inputs.dtype, "local")
            emulate_fp8(coarser, fp8)
            found[fp8.recipe] = self._scored(coarser), own
        return found

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
        """Take the optimizer steps of the rollout; if they changed anything, and what off-policy ones saw."""
        step = with_packs(self._run, self._rollout, {})
        optimize(self._run, step)
        moved = any(update.grad_norm > 0 for update in step.updates)
        # S is 0 until the first update that has a gradient.
        records = [record for record in step.off_policy if record.counts and record.log_ratio_sum]
        if not records:
            return moved, None
        samples = torch.tensor([record.sample for record in records])
        return moved, (*as_tensors(records), samples // self._rollout.samples)
