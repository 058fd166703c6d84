"""The sections of the configuration that are plain keys; the others have a file each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_fspo.losses.section import Section, UnitInterval

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
        "auto",
        description="auto: Transformer Engine on cuda, local on cpu; local on cuda is slow, to debug with",
    )
    head: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="log-probs by chunks in torch, or Triton's kernels; auto: these in bfloat16 on cuda",
    )
    recompute: Literal["none", "full"] = Field(
        "none", description="full: keep only layer inputs, compute each layer again in backward"
    )


class LoRA(Section):
    """Adapters that are trained in place of the matrices: y = W x + scale * B A x."""

    rank: NonNegativeInt = Field(0, description="rows of A; 0: no adapters, all weights are trained")
    alpha: PositiveFloat = Field(32.0, description="scale = alpha / rank, or alpha / sqrt(rank)")
    rslora: bool = Field(False, description="alpha / sqrt(rank)")
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = Field(
        (), description="matrices; default: all, of a mixture of experts those of attention"
    )
    start: Path | None = Field(None, description="folder of adapters, as PEFT writes it, to begin with")

    @model_validator(mode="after")
    def _rank_is_given(self) -> LoRA:
        given = [name for name, field in LoRA.model_fields.items() if getattr(self, name) != field.default]
        if given and not self.rank:
            raise ValueError(f"lora.{given[0]} does nothing without lora.rank")
        return self


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
        600.0, description="longest that a collective may last; for what takes long is waited elsewhere"
    )
    wait_seconds: Seconds = Field(
        14400.0, description="longest wait for rollouts, grades, files, and for ranks that are busy with them"
    )
    silence_seconds: Annotated[float, Field(ge=1, le=86400)] = Field(
        40.0, description="a rank that gives no sign of life for so long ends the run"
    )

    @property
    def interleaved(self) -> bool:
        """True if ranks hold several chunks of the model."""
        return self.virtual_pipeline > 1

    @property
    def model_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor * self.pipeline * self.context


class MoE(Section):
    """Routers of a mixture of experts."""

    replay: Literal["off", "old_pass", "rollout"] = Field(
        "off",
        description="experts of a token in the update; off: as its router chooses; old_pass: those of the "
        "old pass; rollout: those of the sampler, in the old pass too (vllm only)",
    )
    aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="factor of the load-balance loss of each sequence, averaged over sequences"
    )
    z_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="factor of the mean square of the router's log-sum-exp, averaged over sequences"
    )

    @property
    def in_use(self) -> bool:
        """True if a key asks for something that only a mixture of experts has."""
        return self != MoE()

    def check(self, *, engine: str, sampled: bool) -> None:
        """Raise ``ValueError`` where a rollout cannot give what is replayed.

        Args:
            engine: that samples.
            sampled: S starts from the sampler's log-probs, without an old pass.
        """
        if self.replay == "rollout" and engine != "vllm":
            raise ValueError(
                f"moe.replay = rollout needs rollout.engine = vllm: {engine} samples with the trainer's own "
                "routers; use old_pass"
            )
        if self.replay == "old_pass" and sampled:
            raise ValueError(
                "moe.replay = old_pass needs rollout.old_log_probs = recompute: there is no pass"
            )


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
    delta: bool = Field(
        False,
        description="for gloo and nccl: send what changed since the last update; takes a copy of the weights "
        "in the memory of the first rank's machine, and one per worker of a server",
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
        description="after an update, largest mean difference in log-prob between trainer and server on "
        "fixed sequences, in nats; default: 8 times that of the first update, 1e-4 to 1e-2, in float32, and "
        "2.5 times, 0.25 to 0.5, in bfloat16",
    )

    @model_validator(mode="after")
    def _transfer_can(self) -> VLLM:
        if self.delta and self.transfer == "disk":
            raise ValueError("delta = true needs transfer gloo or nccl: a file cannot tell who has read it")
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
    share_prompts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute a prompt once for its responses in a micro-batch, with the same gradients; "
        "auto: on with local layers; on: with Transformer Engine's, too, where its attention gives way to "
        "FlashAttention-2; neither with context parallel or losses of the routers",
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
        """Copy this, with ``lr_decay_steps`` as it is in a run of so many optimizer steps."""
        # A run that ends within the warm-up comes to no decay.
        decay_steps = self.lr_decay_steps or max(steps, self.warmup_steps + 1)
        return self.model_copy(update={"lr_decay_steps": decay_steps})


class Evaluation(Section):
    """Sampling on the validation prompts."""

    every: NonNegativeInt = Field(
        10, description="steps between evaluations, also before the first and after the last; 0: never"
    )
    samples: PositiveInt = Field(
        4,
        description="responses per prompt, k of mean@k, pass@k and maj@k; a set may have `samples` of its "
        "own",
    )
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Checkpoint(Section):
    """What a run can resume from."""

    every: NonNegativeInt = Field(
        10, description="steps between checkpoints, also after the last and on SIGTERM; 0: only then"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints to keep")
    milestones: NonNegativeInt = Field(
        0, description="every so many steps a checkpoint that is kept for ever, besides the newest; 0: none"
    )
    asynchronous: bool = Field(
        False,
        description="train on while files are written, from a copy in host memory of each rank's part "
        "(up to 14 bytes per parameter of it); the checkpoint appears after the step that finds them written",
    )


class Log(Section):
    """Besides the console and metrics.jsonl."""

    wandb: Literal["off", "offline", "online"] = "off"
    entity: str | None = Field(None, description="wandb team or user; default: that of the API key")
    project: str = Field("megatron-fspo", description="wandb project")
    group: str | None = Field(None, description="wandb group, of runs that belong together")
    tags: tuple[str, ...] = Field((), description="wandb tags")
    tensorboard: bool = Field(False, description="event files in tensorboard/ of the run's folder")
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="TFLOP/s of one GPU at most, for perf/mfu; default: by the name of the GPU, in bfloat16; "
        "without either there is no perf/mfu",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="first and last step that torch's profiler records, a trace per rank and step"
    )
    responses: NonNegativeInt = Field(
        16, description="per evaluation, so many responses kept in samples.jsonl, with their log-probs"
    )
    sequences: NonNegativeInt = Field(
        1024, description="per step, at most so many (L, S, A, clipped) kept for the report's pictures"
    )
    tokens: NonNegativeInt = Field(
        0,
        description="per step, at most so many responses whose token log-probs in every off-policy update go "
        "to tokens/, for `explain`: some 10 bytes a token and update; 0: none",
    )

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> Log:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(f"profile = {list(self.profile)}: the first step comes after the last")
        return self
