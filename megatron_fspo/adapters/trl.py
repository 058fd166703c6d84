"""FSPO in TRL: use ``FSPOTrainer`` and ``FSPOConfig`` instead of ``GRPOTrainer`` and ``GRPOConfig``::

    from megatron_fspo.adapters.trl import FSPOConfig, FSPOTrainer

Everything except the loss is TRL's: generation, rewards, advantages, data. Checked with TRL 1.16.

* J is averaged over the responses with tokens of the whole optimizer step, over all processes, so gradient
  accumulation and padding do not change it.
* S starts from the policy as TRL scores it before the first update. TRL's importance-sampling correction
  weighs or drops responses by exp ΣΔ, by default over the whole response, so it drops long responses first
  (huggingface/trl#5814). It is off here, and refused, as are settings of other losses.
* With TRL's defaults, each rollout has one optimizer step, where S = 0 and FSPO clips nothing: it warns then.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from megatron_fspo.adapters.sequence_loss import FSPO, log_ratio_sums, mean_loss, metrics
from megatron_fspo.objective.band import DEFAULT_C

_BAND = "FSPO's limits are c_low, c_high and c_dual"
_OTHERS = {
    "loss_type": "FSPO is the loss",
    "importance_sampling_level": "FSPO's ratio is that of the whole response, not its mean",
    "epsilon": _BAND,
    "epsilon_high": _BAND,
    "delta": _BAND,
    "beta": "this loss has no KL term",
    "entropy_coef": "this loss has no entropy term",
    "use_adaptive_entropy": "this loss has no entropy term",
    "top_entropy_quantile": "S is the sum over all tokens of a response",
    "off_policy_mask_threshold": "it drops responses by their mean log-ratio",
    "vllm_importance_sampling_correction": "exp of a summed difference drops long responses first",
}
"""Settings of other losses, and the reasons to refuse them."""

_MODEL_INPUTS = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes "
    "token_type_ids mm_token_type_ids image_position_ids"
).split()


@dataclass
class Limits:
    """FSPO's limits, in nats per √token, as keys of a TRL configuration."""

    c_low: float = field(
        default=DEFAULT_C, metadata={"help": "lower edge of the band: S >= -c_low * sqrt(L)"}
    )
    c_high: float = field(
        default=DEFAULT_C, metadata={"help": "upper edge of the band: S <= c_high * sqrt(L)"}
    )
    c_dual: float | None = field(
        default=None, metadata={"help": "S <= c_dual * sqrt(L) for A < 0; default: 2 * c_high"}
    )
    centred: bool = field(
        default=False,
        metadata={"help": "move all limits by -c^2 L / 8, for responses of thousands of tokens"},
    )

    def fspo(self) -> FSPO:
        """Return the limits."""
        return FSPO(c_low=self.c_low, c_high=self.c_high, c_dual=self.c_dual, centred=self.centred)

    def check(self, others: Mapping[str, str]) -> None:
        """Raise ``ValueError`` for an invalid limit, or one of ``others`` (with reasons) not at its
        default."""
        self.fspo()
        fields = type(self).__dataclass_fields__
        for name, why in others.items():
            value, default = getattr(self, name), fields[name].default
            if value != default:
                raise ValueError(f"{name} = {value!r} is not supported with FSPO: {why}; use {default!r}")


class WithFSPO:
    """Mixin that makes FSPO the loss of a TRL trainer."""

    _paper: ClassVar[dict[str, str]] = {
        "title": "Clip Your Sequences Fairly: Enforcing Length Fairness for Sequence-Level RL",
        "id": "2509.09177",
    }
    """The paper that model cards cite."""
    _config: ClassVar[Any]
    """The class of ``args``."""
    _tag_names: tuple[str, str]

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, **kwargs: Any) -> None:
        args = self._config(self._tag_names[1]) if args is None else args
        own, config = type(self).__name__, self._config.__name__
        if not isinstance(args, self._config):
            raise TypeError(f"args of {own} must be an {config}, got a {type(args).__name__}")
        super().__init__(model, reward_funcs, args=args, **kwargs)  # type: ignore[call-arg]
        if self.aux_loss_enabled:  # type: ignore[attr-defined]
            raise ValueError(f"{own} does not support router auxiliary losses: set router_aux_loss_coef=0")
        self._fspo: FSPO = args.fspo()


@dataclass
class FSPOConfig(Limits, GRPOConfig):
    """``GRPOConfig`` with FSPO's limits. Raises ``ValueError``, in one line, for an invalid limit or a
    setting that has no effect."""

    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "refused: it drops long responses first"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(_OTHERS)
        steps, accumulated = self.steps_per_generation, self.gradient_accumulation_steps
        if steps % accumulated:
            raise ValueError(
                f"steps_per_generation = {steps} must be a multiple of gradient_accumulation_steps = "
                f"{accumulated}: FSPO averages over all responses of an optimizer step"
            )
        if steps * self.num_iterations == accumulated:
            warnings.warn(
                f"steps_per_generation = {steps}, gradient_accumulation_steps = {accumulated} and "
                "num_iterations = 1 make one on-policy optimizer step of each rollout, so S = 0 and FSPO "
                f"clips nothing. Set for example steps_per_generation={4 * accumulated} or num_iterations=2",
                stacklevel=3,
            )


class FSPOTrainer(WithFSPO, GRPOTrainer):
    """``GRPOTrainer`` with FSPO as its loss. ``args`` is a :class:`FSPOConfig`; another configuration raises
    ``TypeError``, a model with an auxiliary loss ``ValueError``."""

    _tag_names = ("trl", "fspo")
    _name = "FSPO"
    _config = FSPOConfig
    args: FSPOConfig

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return a micro-batch, with the number of responses of its optimizer step."""
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        together = [inputs]
        if self.model.training:
            count = self.args.gradient_accumulation_steps
            first = self._step % self.args.steps_per_generation // count * count
            together = self._buffered_inputs[first : first + count]
        filled = torch.stack([_mask(part).any(dim=1).sum() for part in together]).sum()
        return inputs | {"num_sequences": self.accelerator.reduce(filled, reduction="sum")}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = _mask(inputs)
        log_probs, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            mask.size(1),
            compute_entropy=True,
            **{name: inputs.get(name) for name in _MODEL_INPUTS},
        )
        # TRL omits old log-probs if no update has moved the policy yet.
        old_log_probs = inputs.get("old_per_token_logps", log_probs)
        log_ratio_sum = log_ratio_sums(log_probs, old_log_probs, mask)
        lengths = mask.sum(dim=1)
        terms = self._fspo.surrogate(log_ratio_sum, lengths, inputs["advantages"])

        entropy = torch.where(mask, entropies.float(), 0.0).sum(dim=1)
        self._record(log_ratio_sum.detach(), lengths, inputs["advantages"], entropy)
        # TRL averages gradients over processes and sums them over micro-batches.
        per_process = inputs["num_sequences"].clamp(min=1) / self.accelerator.num_processes
        return mean_loss(log_ratio_sum, terms, per_process)

    def _record(self, *columns: Tensor) -> None:
        """Record metrics of one micro-batch over all processes, from S, L, A and the summed entropy, all
        [n]."""
        rows = self.accelerator.gather(torch.stack([column.float() for column in columns], dim=1))
        log_ratio_sum, lengths, advantages, entropy = rows.unbind(dim=1)
        means = metrics(log_ratio_sum, lengths, self._fspo.surrogate(log_ratio_sum, lengths, advantages))
        means["entropy"] = (entropy.sum() / lengths.sum().clamp(min=1)).item()
        mode = "train" if self.model.training else "eval"
        for name, value in means.items():
            self._metrics[mode][name].append(value)


def _mask(inputs: dict[str, Any]) -> Tensor:
    """Return bool [n, T]: tokens of the policy, without those of tools and of responses that are left out."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask
