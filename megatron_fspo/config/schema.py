"""The whole configuration of a run: its sections, and constraints between their keys.

A run is configured by TOML files and ``--section.key value`` overrides (see :mod:`.loading`) only, not by
environment variables. Unknown keys are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import model_validator

from megatron_fspo.config import sections
from megatron_fspo.config.correction import CorrectionConfig, NoCorrection
from megatron_fspo.config.data import Data
from megatron_fspo.config.environment import Environment
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.config.reward import Reward
from megatron_fspo.config.teacher import Teacher
from megatron_fspo.losses import FSPOLoss, PolicyLossConfig
from megatron_fspo.section import Section


class Config(Section):
    """One training run."""

    run: sections.Run
    model: sections.Model
    lora: sections.LoRA = sections.LoRA()
    fp8: FP8 = FP8()
    parallel: sections.Parallel = sections.Parallel()
    moe: sections.MoE = sections.MoE()
    data: Data
    reward: Reward
    environment: Environment = Environment()
    teacher: Teacher = Teacher()
    rollout: sections.Rollout
    vllm: sections.VLLM = sections.VLLM()
    loss: PolicyLossConfig = FSPOLoss()
    correction: CorrectionConfig = NoCorrection()
    batch: sections.Batch = sections.Batch()
    optimizer: sections.Optimizer = sections.Optimizer()
    evaluation: sections.Evaluation = sections.Evaluation()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    log: sections.Log = sections.Log()

    @property
    def supervised(self) -> bool:
        """True if the run learns the responses of the data, without rollouts."""
        return self.loss.SUPERVISED

    @property
    def samples(self) -> int:
        """Responses per prompt of a training step."""
        return 1 if self.supervised else self.rollout.samples

    @property
    def run_folder(self) -> Path:
        """The folder that this run writes to."""
        return self.run.folder / self.run.name

    @property
    def evaluation_samples(self) -> dict[str, int]:
        """Evaluation set → responses per prompt."""
        return {entry.title: entry.samples or self.evaluation.samples for entry in self.data.validation_sets}

    @property
    def longest_sequence(self) -> tuple[int, str]:
        """Maximum tokens of a sequence, and the keys that say so."""
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if (row := self.environment.context_tokens) is not None and row < longest:
            return row, "environment.context_tokens"
        return longest, "data.max_prompt_tokens + rollout.max_response_tokens"

    @property
    def optimizer_steps(self) -> int:
        return self.run.steps * self.batch.mini_batches * self.batch.epochs

    @property
    def off_policy_updates(self) -> int:
        """Number of optimizer steps per rollout whose S can calibrate a band.

        The first one counts only with ``rollout.old_log_probs = "sampled"`` (else its S is 0), and then only
        if it is the only one or the sampler's weights may be older: otherwise its S is pure mismatch.
        """
        updates, rollout = self.batch.mini_batches * self.batch.epochs, self.rollout
        first = rollout.old_log_probs == "sampled" and (rollout.max_staleness > 0 or updates == 1)
        return updates if first else updates - 1

    @property
    def rollouts_after_warmup(self) -> int:
        """Number of rollouts after the learning rate's warm-up."""
        updates = self.batch.mini_batches * self.batch.epochs
        return max(self.run.steps - math.ceil(self.optimizer.warmup_steps / updates), 0)

    @model_validator(mode="before")
    @classmethod
    def _defaults_without_rollouts(cls, tree: Any) -> Any:
        """SFT needs no reward, and takes one optimizer step per batch."""
        loss, batch = (tree.get(key, {}) if isinstance(tree, dict) else None for key in ("loss", "batch"))
        if isinstance(loss, dict) and isinstance(batch, dict) and loss.get("name") == "sft":
            return {"reward": {"name": "none"}} | tree | {"batch": {"mini_batches": 1} | batch}
        return tree

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        if self.rollout.prompts % self.batch.mini_batches:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} is not a multiple of "
                f"batch.mini_batches = {self.batch.mini_batches}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        # Context parallel pads every row to a multiple of two chunks per rank.
        chunks = 2 * self.parallel.context if self.parallel.context > 1 else 1
        padded = longest + (self.environment.most_rows - 1) * (chunks - 1)
        if self.batch.max_tokens < padded + -padded % chunks:
            rows = f", each row rounded up to a multiple of {chunks}" if chunks > 1 else ""
            raise ValueError(
                f"batch.max_tokens = {self.batch.max_tokens} is less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}{rows}: any sequence must fit in a micro-batch"
            )
        if self.parallel.sequence and self.parallel.tensor == 1:
            raise ValueError("parallel.sequence = true needs parallel.tensor > 1")
        if self.parallel.virtual_pipeline > 1 and self.parallel.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline = {self.parallel.virtual_pipeline} needs parallel.pipeline > 1"
            )
        if self.rollout.max_staleness and self.rollout.engine != "vllm":
            raise ValueError(
                f"rollout.max_staleness = {self.rollout.max_staleness} needs rollout.engine = vllm: "
                f"{self.rollout.engine} cannot sample ahead of training"
            )
        if self.vllm.colocated and self.rollout.max_staleness:
            raise ValueError(
                f"vllm.colocated = true needs rollout.max_staleness = 0, not {self.rollout.max_staleness}: "
                "trainer and servers take turns"
            )
        if self.model.backend == "cpu" and self.model.layers == "transformer_engine":
            raise ValueError("model.layers = transformer_engine needs model.backend = cuda")
        if self.rollout.engine == "vllm" and self.parallel.collective_seconds < 180:
            raise ValueError(
                f"parallel.collective_seconds = {self.parallel.collective_seconds:g} is less than 180, which "
                "rollout.engine = vllm needs: a server may take 130 s to load a part of the weights"
            )
        self.reward.check(max_response_tokens=self.rollout.max_response_tokens)
        sampled = self.rollout.old_log_probs == "sampled"
        corrected = self.correction.name != "none"
        if sampled and corrected:
            raise ValueError(
                "rollout.old_log_probs = sampled excludes "
                f"correction.name = {self.correction.name}: S already starts from the sampler's log-probs"
            )
        if (sampled or corrected) and self.rollout.top_p < 1:
            key = (
                "rollout.old_log_probs = sampled" if sampled else f"correction.name = {self.correction.name}"
            )
            raise ValueError(
                f"{key} needs rollout.top_p = 1, not {self.rollout.top_p}: log-probs of a cut vocabulary are "
                "renormalised, a bias that grows with length"
            )
        self.environment.check(rewards=self.reward.names, replay=self.moe.replay)
        self.moe.check(engine=self.rollout.engine, sampled=sampled)
        self.loss.check(off_policy_updates=self.off_policy_updates, sampled=sampled)
        self.fp8.check(dtype=self.model.dtype, layers=self.model.layers, backend=self.model.backend)
        return self

    @model_validator(mode="after")
    def _keys_fit_what_is_learned(self) -> Config:
        self.teacher.check(kl_coef=self.loss.kl_coef, temperature=self.rollout.temperature)
        if self.teacher.in_use and self.rollout.dynamic_sampling:
            raise ValueError("rollout.dynamic_sampling drops groups that [teacher] learns from: remove it")
        wrong = {
            "rollout.engine": self.rollout.engine == "vllm",
            "rollout.dynamic_sampling": self.rollout.dynamic_sampling,
            "rollout.temperature": self.rollout.temperature != 1,
            "rollout.old_log_probs": self.rollout.old_log_probs == "sampled",
            "correction.name": self.correction.name != "none",
            "environment.name": self.environment.name is not None,
            "moe.replay": self.moe.replay != "off",
        }
        if self.supervised and (keys := [key for key, is_set in wrong.items() if is_set]):
            raise ValueError(
                f"loss.name = {self.loss.name} learns the responses of data.train, without rollouts: remove "
                f"{', '.join(keys)}"
            )
        return self
