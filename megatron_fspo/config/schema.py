"""The configuration of a run: every key, its default, and what is legal.

A run is one TOML file plus ``--section.key value`` overrides (see :mod:`.loading`). Nothing else steers it:
no environment variables, no flags hidden in code. Unknown keys are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_fspo.config.checkpoint import Checkpoint
from megatron_fspo.config.correction import CorrectionConfig, NoCorrection
from megatron_fspo.config.data import Data
from megatron_fspo.config.evaluation import Evaluation
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.config.log import Log
from megatron_fspo.config.reward import Reward
from megatron_fspo.losses import FSPOLoss, PolicyLossConfig
from megatron_fspo.section import Section, UnitInterval

Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]


def _whole(text: str) -> str:
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ValueError("U+FFFD stands for a part of a character, which no stop string can have")
    return text


StopString = Annotated[str, Field(min_length=1), AfterValidator(_whole)]


class Run(Section):
    """Where the run lives and what it repeats."""

    name: str = Field("fspo", pattern=r"^\w[\w.-]*$", description="folder of the run, under `run.folder`")
    folder: Path = Field(Path("runs"), description="parent folder of all runs")
    seed: NonNegativeInt = Field(1, description="names every random stream: prompts and samples")
    steps: PositiveInt = Field(description="rollouts to learn from; one step is one rollout")


class Model(Section):
    """The policy."""

    checkpoint: Path = Field(
        description="checkpoint folder with its tokenizer: Hugging Face, or converted to Megatron"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="parameters and activations")
    backend: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a GPU")
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="auto: Transformer Engine on cuda, ours on cpu"
    )
    recompute: Literal["none", "full"] = Field(
        "none", description="full: keep only layer inputs, compute each layer again in backward"
    )


class Parallel(Section):
    """How one model is spread. Data parallel is what remains of the world size."""

    tensor: PositiveInt = Field(1, description="tensor parallel size; divides heads, KV heads and FFN size")
    sequence: bool = Field(False, description="sequence parallel: norms and dropout split over tensor ranks")
    pipeline: PositiveInt = Field(1, description="pipeline stages")
    virtual_pipeline: PositiveInt = Field(
        1,
        description="model chunks per pipeline stage (interleaved schedule); stages x chunks divides layers",
    )
    context: PositiveInt = Field(
        1, description="context parallel size: the tokens of every sequence are spread over so many ranks"
    )
    expert: PositiveInt = Field(
        1,
        description="expert parallel size: a layer's experts are spread over so many ranks of a pipeline "
        "stage (tensor x context x data); tensor parallel does not cut them",
    )
    distributed_optimizer: bool = Field(
        False, description="split optimizer state and fp32 weights over data and context parallel ranks"
    )
    overlap_grad_reduce: bool = Field(
        False, description="reduce gradients while the last micro-batch's backward is still running"
    )
    collective_seconds: Seconds = Field(
        600.0,
        description="longest that a collective may last; for what takes long is waited elsewhere",
    )
    wait_seconds: Seconds = Field(
        14400.0,
        description="longest wait for rollouts, grades, files, and for ranks that are busy with them",
    )
    silence_seconds: Annotated[float, Field(ge=1, le=86400)] = Field(
        40.0,
        description="a rank that gives no sign of life for so long ends the run",
    )

    @property
    def interleaved(self) -> bool:
        """Whether ranks hold several chunks of the model."""
        return self.virtual_pipeline > 1

    @property
    def model_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor * self.pipeline * self.context


class Rollout(Section):
    """Sampling during training."""

    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="embedded: sample from the training model; vllm: from servers, see [vllm]"
    )
    prompts: PositiveInt = Field(description="prompts per step, over all ranks")
    samples: Annotated[int, Field(ge=2)] = Field(8, description="responses per prompt; at least 2")
    temperature: PositiveFloat = Field(1.0, description="the trainer scores under the same temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="below 1 the sampler is not the policy: the old pass of the trainer ignores the cut"
    )
    max_response_tokens: PositiveInt = Field(description="longest response, stop token included")
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(
        (), description="further tokens that end a response, besides the checkpoint's ends of text"
    )
    stop: tuple[StopString, ...] = Field(
        (),
        description="strings that end a response, with the token that completes the first of them in its "
        "text; that stays part of it. A vLLM server with a tokenizer stops there; what one without goes on "
        "to sample is cut off",
    )
    max_batch: PositiveInt = Field(256, description="responses decoded side by side (KV-cache rows)")
    max_staleness: NonNegativeInt = Field(
        0,
        description="versions that the weights behind a token may be older than the trainer's; above 0 so "
        "many steps are sampled ahead, while the trainer learns (vllm only)",
    )
    dynamic_sampling: bool = Field(
        False,
        description="replace groups whose rewards are all equal, which teach nothing, by those of further "
        "prompts, until the batch is full",
    )
    max_rounds: Annotated[int, Field(ge=2)] = Field(
        4, description="with dynamic_sampling: rounds of sampling in a step at most, the first included"
    )
    old_log_probs: Literal["recompute", "sampled"] = Field(
        "recompute",
        description="what S starts from: the trainer's own pass before the first update, or the sampler's "
        "log-probs without a pass; S then includes mismatch and staleness",
    )
    mismatch_limit: PositiveFloat | None = Field(
        None,
        description="alarm when trainer and sampler differ by more per token on average, in nats, where "
        "their weights are the same; default 1e-3 in float32, 0.05 in bfloat16, 0.3 in FP8",
    )


class VLLM(Section):
    """Servers that sample, for `rollout.engine = "vllm"`; `megatron-fspo serve` starts one."""

    urls: tuple[str, ...] = Field(("http://127.0.0.1:8000",), description="the servers", min_length=1)
    discovery: Path | None = Field(
        None,
        description="in place of urls: the folder of `megatron-fspo serve --announce`; servers come and go",
    )
    transfer: Literal["gloo", "nccl", "disk"] = Field(
        "gloo", description="how new weights get there: broadcast through the CPU, or by NCCL; or as files"
    )
    address: str | None = Field(
        None,
        description="name or IP address of the first rank's machine as the servers see it, for gloo and "
        "nccl; default: its address on the way to the first server of another machine, or 127.0.0.1",
    )
    folder: Path | None = Field(
        None, description="for disk: a folder that trainer and servers see under the same name"
    )
    in_flight: PositiveInt = Field(256, description="responses asked of one server at a time")
    colocated: bool = Field(
        False,
        description="servers are on the trainer's GPUs, of `megatron-fspo serve --colocated`: they sleep "
        "while the trainer trains, and it moves to the host while they sample",
    )
    recovery_seconds: PositiveFloat = Field(
        600.0, description="stop the run when no server has answered for so long"
    )
    canary_tolerance: PositiveFloat | None = Field(
        None,
        description="after an update, largest difference in log-prob between trainer and server on fixed "
        "sequences, in nats; default: 8 times that of the first update, 1e-4 to 1e-2 in float32 and 0.25 to "
        "1 in bfloat16",
    )

    @model_validator(mode="after")
    def _shares_gpus(self) -> VLLM:
        if self.colocated and self.transfer == "nccl":
            raise ValueError("colocated = true needs transfer gloo or disk: NCCL takes a GPU for one process")
        return self


class Batch(Section):
    """How one rollout becomes optimizer steps."""

    mini_batches: PositiveInt = Field(4, description="optimizer steps per epoch; divides `rollout.prompts`")
    epochs: PositiveInt = Field(1, description="passes over one rollout")
    max_tokens: PositiveInt = Field(
        16384,
        description="tokens per packed micro-batch, over all context ranks; at least one prompt plus one "
        "response",
    )
    balance: Literal["tokens", "attention"] = Field(
        "tokens",
        description="what micro-batches share out evenly: tokens, or compute with attention's square",
    )


class Optimizer(Section):
    """Megatron's Adam, with decoupled weight decay."""

    lr: PositiveFloat = Field(1e-6, description="peak learning rate, after the warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate goes on from there"
    )
    lr_decay_steps: PositiveInt | None = Field(
        None,
        description="optimizer steps, warm-up included, until it is `lr_min`; default: all of `run.steps`",
    )
    lr_min: Annotated[float, Field(ge=0)] = Field(0.0, description="lowest learning rate of a decay")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="of matrices and embeddings; norms and biases have none"
    )
    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = Field(1.0, description="largest global gradient norm")
    max_kl: PositiveFloat = Field(
        1.0,
        description="stop when the policy is further than this from the one that S starts from, in nats per "
        "token of a mini-batch (actor/ppo_kl, the k1 estimate)",
    )
    skip_norm_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="skip an optimizer step whose gradient norm, before clipping, is more than so many times "
        "the median of those before it; default: take every step",
    )
    skip_window: Annotated[int, Field(ge=8)] = Field(
        64, description="with skip_norm_ratio: last norms that the median is of; from 8 on steps are judged"
    )
    max_skips: NonNegativeInt = Field(
        3, description="with skip_norm_ratio: skipped steps in a row that do not end the run"
    )

    @model_validator(mode="after")
    def _schedule_falls(self) -> Optimizer:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min = {self.lr_min:g} is above lr = {self.lr:g}")
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps = {self.lr_decay_steps} includes the warm-up, so it must be more than "
                f"warmup_steps = {self.warmup_steps}"
            )
        return self

    def over(self, steps: int) -> Optimizer:
        """This, with ``lr_decay_steps`` as it is in a run of so many optimizer steps."""
        # A run that ends within the warm-up comes to no decay.
        decay_steps = self.lr_decay_steps or max(steps, self.warmup_steps + 1)
        return self.model_copy(update={"lr_decay_steps": decay_steps})


class Config(Section):
    """One training run."""

    run: Run
    model: Model
    fp8: FP8 = FP8()
    parallel: Parallel = Parallel()
    data: Data
    reward: Reward
    rollout: Rollout
    vllm: VLLM = VLLM()
    loss: PolicyLossConfig = FSPOLoss()
    correction: CorrectionConfig = NoCorrection()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @property
    def run_folder(self) -> Path:
        """Where this run writes."""
        return self.run.folder / self.run.name

    @property
    def evaluation_samples(self) -> dict[str, int]:
        """Responses per prompt, by evaluation set."""
        return {one.title: one.samples or self.evaluation.samples for one in self.data.validation_sets}

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.run.steps * self.batch.mini_batches * self.batch.epochs

    @property
    def off_policy_updates(self) -> int:
        """Optimizer steps per rollout before which S need not be 0."""
        updates = self.batch.mini_batches * self.batch.epochs
        return updates if self.rollout.old_log_probs == "sampled" else updates - 1

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        if self.rollout.prompts % self.batch.mini_batches:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} is not a multiple of "
                f"batch.mini_batches = {self.batch.mini_batches}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        # Context parallel pads every sequence to two chunks per rank.
        chunks = 2 * self.parallel.context if self.parallel.context > 1 else 1
        if self.batch.max_tokens < longest + -longest % chunks:
            raise ValueError(
                f"batch.max_tokens = {self.batch.max_tokens} is less than data.max_prompt_tokens + "
                f"rollout.max_response_tokens = {longest}"
                f"{f' rounded up to a multiple of {chunks}' if chunks > 1 else ''}: "
                "the longest sequence would fit no micro-batch"
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
                f"{self.rollout.engine} samples and trains in turns"
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
        self._check_sampled_log_probs()
        self.loss.check(off_policy_updates=self.off_policy_updates, sampled=sampled)
        self.fp8.check(dtype=self.model.dtype, layers=self.model.layers, backend=self.model.backend)
        return self

    def _check_sampled_log_probs(self) -> None:
        sampled = self.rollout.old_log_probs == "sampled"
        corrected = self.correction.name != "none"
        if sampled and corrected:
            raise ValueError(
                "rollout.old_log_probs = sampled leaves nothing to correct for "
                f"correction.name = {self.correction.name}: S starts from the sampler already"
            )
        if (sampled or corrected) and self.rollout.top_p < 1:
            key = (
                "rollout.old_log_probs = sampled" if sampled else f"correction.name = {self.correction.name}"
            )
            raise ValueError(
                f"{key} needs rollout.top_p = 1, not {self.rollout.top_p}: the log-probs of a cut vocabulary "
                "are renormalised, a bias that grows with length"
            )
