"""The plain sections of the configuration; the others have a module each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_fspo.section import Section, UnitInterval

Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]


def _whole(text: str) -> str:
    if "\N{REPLACEMENT CHARACTER}" in text:
        raise ValueError("contains U+FFFD, which stands for a part of a character")
    return text


StopString = Annotated[str, Field(min_length=1), AfterValidator(_whole)]


class Run(Section):
    """Name, place and length of the run."""

    name: str = Field("fspo", pattern=r"^\w[\w.-]*$", description="folder of the run, inside `run.folder`")
    folder: Path = Field(Path("runs"), description="parent folder of all runs")
    seed: NonNegativeInt = Field(1, description="seed of data order and sampling")
    steps: PositiveInt = Field(description="training steps, one rollout each")


class Model(Section):
    """The policy."""

    checkpoint: Path = Field(description="Hugging Face or converted Megatron checkpoint, with tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of parameters and activations")
    backend: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if there is a GPU")
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="auto: Transformer Engine on cuda, local on cpu; local on cuda is for debugging only",
    )
    head: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="log-prob kernels: chunked torch, or Triton; auto: Triton in bfloat16 on cuda",
    )
    recompute: Literal["none", "full"] = Field(
        "none", description="full: keep only layer inputs and recompute layers in backward"
    )


class LoRA(Section):
    """Low-rank adapters, trained instead of the matrices: `y = W x + scale * B A x`."""

    rank: NonNegativeInt = Field(0, description="adapter rank; 0: no adapters, train all weights")
    alpha: PositiveFloat = Field(32.0, description="scale = alpha / rank")
    rslora: bool = Field(False, description="scale = alpha / sqrt(rank)")
    targets: tuple[Literal["q", "k", "v", "o", "gate", "up", "down"], ...] = Field(
        (), description="adapted matrices; default: all, or only attention in a mixture of experts"
    )
    start: Path | None = Field(None, description="PEFT adapter folder to start from")

    @model_validator(mode="after")
    def _rank_is_given(self) -> LoRA:
        given = [name for name, field in LoRA.model_fields.items() if getattr(self, name) != field.default]
        if given and not self.rank:
            raise ValueError(f"lora.{given[0]} needs lora.rank > 0")
        return self


class Parallel(Section):
    """Layout of one model replica. The remaining ranks are data parallel."""

    tensor: PositiveInt = Field(
        1, description="tensor parallel size; must divide heads, KV heads and FFN size"
    )
    sequence: bool = Field(False, description="sequence parallel: split norms and dropout over tensor ranks")
    pipeline: PositiveInt = Field(1, description="pipeline stages")
    virtual_pipeline: PositiveInt = Field(
        1,
        description="model chunks per stage (interleaved schedule); stages x chunks must divide layers",
    )
    context: PositiveInt = Field(1, description="context parallel size: ranks that share every sequence")
    expert: PositiveInt = Field(
        1,
        description="expert parallel size, over a stage's tensor x context x data ranks; experts are not "
        "tensor parallel",
    )
    distributed_optimizer: bool = Field(
        False, description="shard optimizer state and fp32 weights over data and context parallel ranks"
    )
    overlap_grad_reduce: bool = Field(
        False, description="reduce gradients during the last micro-batch's backward"
    )
    collective_seconds: Seconds = Field(600.0, description="timeout of a collective")
    wait_seconds: Seconds = Field(
        14400.0, description="timeout for rollouts, grades, files, and ranks busy with them"
    )
    silence_seconds: Annotated[float, Field(ge=1, le=86400)] = Field(
        40.0, description="end the run when a rank sends no heartbeat for this long"
    )
    public_address: bool = Field(
        False, description="allow a public `MASTER_ADDR`: the ports of a job have no password"
    )

    @property
    def interleaved(self) -> bool:
        """True if ranks hold several model chunks (virtual pipeline stages)."""
        return self.virtual_pipeline > 1

    @property
    def model_size(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.tensor * self.pipeline * self.context


class MoE(Section):
    """Routers of a mixture of experts."""

    replay: Literal["off", "old_pass", "rollout"] = Field(
        "off",
        description="experts used in the update; off: the router's choice; old_pass: those of the "
        "old-log-prob pass; rollout: the sampler's, also in that pass (vllm only)",
    )
    aux_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="coefficient of the per-sequence load-balance loss"
    )
    z_loss_coef: Annotated[float, Field(ge=0)] = Field(
        0.0, description="coefficient of the per-sequence z-loss, the mean square of the router's log-sum-exp"
    )

    @property
    def in_use(self) -> bool:
        """True if any key is set, which needs a mixture of experts."""
        return self != MoE()

    def check(self, *, engine: str, sampled: bool) -> None:
        """Raise ``ValueError`` if ``replay`` has no source of routes. ``engine`` is ``rollout.engine``; with
        ``sampled``, S starts from the sampler's log-probs, without an old-log-prob pass."""
        if self.replay == "rollout" and engine != "vllm":
            raise ValueError(
                f"moe.replay = rollout needs rollout.engine = vllm: {engine} samples with the trainer's own "
                "routers; use moe.replay = old_pass"
            )
        if self.replay == "old_pass" and sampled:
            raise ValueError(
                "moe.replay = old_pass needs rollout.old_log_probs = recompute, which makes that pass"
            )


class Rollout(Section):
    """Sampling during training."""

    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="sample from the training model, or from servers, see [vllm]"
    )
    prompts: PositiveInt = Field(description="prompts per step, over all ranks")
    samples: Annotated[int, Field(ge=2)] = Field(8, description="responses per prompt")
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature; the trainer scores with it too"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="below 1, sampler and policy differ: the trainer's log-probs ignore the cut"
    )
    max_response_tokens: PositiveInt = Field(description="longest response, stop token included")
    stop_token_ids: tuple[NonNegativeInt, ...] = Field((), description="stop tokens besides the checkpoint's")
    stop: tuple[StopString, ...] = Field(
        (),
        description="stop strings; a response ends with the token that completes one",
    )
    max_batch: PositiveInt = Field(256, description="responses decoded together (KV-cache slots)")
    max_staleness: NonNegativeInt = Field(
        0,
        description="weight versions a token may be behind the trainer; above 0: sample that many steps "
        "ahead (vllm only)",
    )
    dynamic_sampling: bool = Field(
        False,
        description="replace groups with equal rewards by new prompts until the batch is full",
    )
    max_rounds: Annotated[int, Field(ge=2)] = Field(
        4, description="with dynamic_sampling: maximum sampling rounds per step"
    )
    old_log_probs: Literal["recompute", "sampled"] = Field(
        "recompute",
        description="reference of S: a trainer pass before the first update, or the sampler's log-probs "
        "(S then includes mismatch and staleness)",
    )
    mismatch_limit: PositiveFloat | None = Field(
        None,
        description="alarm above this mean log-prob difference per token between trainer and sampler "
        "with the same weights, in nats; default 1e-3 in float32, 0.05 in bfloat16, 0.3 in "
        "FP8",
    )


class VLLM(Section):
    """Sampling servers for `rollout.engine = "vllm"`; `megatron-fspo serve` starts one."""

    urls: tuple[str, ...] = Field(
        ("http://127.0.0.1:8000",), description="addresses of the servers", min_length=1
    )
    discovery: Path | None = Field(
        None,
        description="folder of `megatron-fspo serve --announce`, instead of urls; servers may come and go",
    )
    transfer: Literal["gloo", "nccl", "disk"] = Field(
        "gloo", description="weight transfer: CPU broadcast, NCCL broadcast, or files"
    )
    address: str | None = Field(
        None,
        description="first rank's host as servers see it (gloo, nccl); default: its address towards the "
        "first remote server, or 127.0.0.1",
    )
    folder: Path | None = Field(
        None, description="for disk: folder with the same path on trainer and servers"
    )
    delta: bool = Field(
        False,
        description="for gloo and nccl: send only changed values; needs a copy of the weights in host "
        "memory on the first rank's machine and per server worker",
    )
    in_flight: PositiveInt = Field(256, description="concurrent responses per server")
    colocated: bool = Field(
        False,
        description="servers of `megatron-fspo serve --colocated` share the trainer's GPUs, in turns",
    )
    recovery_seconds: PositiveFloat = Field(
        600.0, description="stop the run when no server has answered for this long"
    )
    canary_tolerance: PositiveFloat | None = Field(
        None,
        description="largest mean log-prob difference between trainer and server after an update, in "
        "nats; default: 8 times that of the first update (1e-4 to 1e-2) in float32, 2.5 "
        "times (0.25 to 0.5) in bfloat16",
    )

    @model_validator(mode="after")
    def _transfer_can(self) -> VLLM:
        if self.delta and self.transfer == "disk":
            raise ValueError("delta = true needs transfer gloo or nccl: files do not show who has read them")
        if self.colocated and self.transfer == "nccl":
            raise ValueError("colocated = true needs transfer gloo or disk: NCCL allows one process per GPU")
        return self


class Batch(Section):
    """How a rollout becomes optimizer steps."""

    mini_batches: PositiveInt = Field(
        4, description="optimizer steps per epoch; must divide `rollout.prompts`; default with `sft`: 1"
    )
    epochs: PositiveInt = Field(1, description="passes over a rollout")
    max_tokens: PositiveInt = Field(
        16384,
        description="tokens per packed micro-batch, over all context ranks; at least one prompt plus one "
        "response",
    )
    balance: Literal["tokens", "attention"] = Field(
        "tokens",
        description="what micro-batches share evenly: tokens, or compute with attention's square",
    )
    share_prompts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="compute a prompt once for its responses in a micro-batch; auto: with local layers; "
        "on: also with Transformer Engine, through FlashAttention-2; not with context "
        "parallel or router losses",
    )


class Optimizer(Section):
    """Megatron's Adam with decoupled weight decay."""

    lr: PositiveFloat = Field(1e-6, description="peak learning rate")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up")
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="schedule after the warm-up"
    )
    lr_decay_steps: PositiveInt | None = Field(
        None,
        description="optimizer steps until `lr_min`, with warm-up; default: the whole run",
    )
    lr_min: Annotated[float, Field(ge=0)] = Field(0.0, description="learning rate at the end of the decay")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="of matrices and embeddings; norms and biases have none"
    )
    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = Field(1.0, description="largest global gradient norm")
    max_kl: PositiveFloat = Field(
        1.0,
        description="stop when actor/ppo_kl (k1) of a mini-batch is larger, in nats per token",
    )
    skip_norm_ratio: Annotated[float, Field(gt=1)] | None = Field(
        None,
        description="skip optimizer steps whose unclipped gradient norm exceeds this multiple of the "
        "recent median; default: never",
    )
    skip_window: Annotated[int, Field(ge=8)] = Field(
        64, description="with skip_norm_ratio: norms in that median; active from 8 norms on"
    )
    max_skips: NonNegativeInt = Field(
        3, description="consecutive skipped optimizer steps before the run stops"
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
        """Return a copy with ``lr_decay_steps`` resolved for a run of ``steps`` optimizer steps."""
        # A run that ends within the warm-up does not decay.
        decay_steps = self.lr_decay_steps or max(steps, self.warmup_steps + 1)
        return self.model_copy(update={"lr_decay_steps": decay_steps})


class Evaluation(Section):
    """Sampling on the validation prompts."""

    every: NonNegativeInt = Field(
        10, description="steps between evaluations, also before the first and after the last; 0: never"
    )
    samples: PositiveInt = Field(
        4,
        description="responses per prompt: k of mean@k, pass@k and maj@k",
    )
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Checkpoint(Section):
    """Checkpoints to resume from."""

    every: NonNegativeInt = Field(
        10, description="steps between checkpoints, also after the last and on SIGTERM; 0: only then"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints to keep")
    milestones: NonNegativeInt = Field(
        0, description="steps between checkpoints that are never deleted; 0: none"
    )
    asynchronous: bool = Field(
        False,
        description="write in the background from a host copy of each rank's shard (up to 14 bytes per "
        "parameter)",
    )


class Log(Section):
    """Logs besides the console and `metrics.jsonl`."""

    wandb: Literal["off", "offline", "online"] = "off"
    entity: str | None = Field(None, description="wandb team or user; default: the API key's")
    project: str = Field("megatron-fspo", description="project in all trackers")
    group: str | None = Field(None, description="wandb group")
    tags: tuple[str, ...] = Field((), description="wandb tags")
    tensorboard: bool = Field(False, description="event files in the run's tensorboard/")
    trackers: tuple[Literal["mlflow", "swanlab", "trackio"], ...] = Field(
        (), description="further trackers, which their own environment variables set up"
    )
    peak_tflops: PositiveFloat | None = Field(
        None,
        description="peak TFLOP/s of one GPU, for perf/mfu; default: by the GPU's name, in bfloat16, if "
        "known",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="first and last step for torch's profiler; one trace per rank and step"
    )
    responses: NonNegativeInt = Field(
        16, description="responses per evaluation in samples.jsonl, with log-probs"
    )
    sequences: NonNegativeInt = Field(
        1024, description="maximum sequences per step kept for the report's plots"
    )
    tokens: NonNegativeInt = Field(
        0,
        description="maximum responses per step with token log-probs of each off-policy update in "
        "tokens/, for `explain` (about 10 bytes per token and update)",
    )

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> Log:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(f"profile = {list(self.profile)}: the first step comes after the last")
        return self
