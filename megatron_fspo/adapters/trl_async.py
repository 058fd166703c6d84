"""FSPO in TRL's asynchronous trainer: use ``AsyncFSPOTrainer`` instead of ``AsyncGRPOTrainer``::

    from megatron_fspo.adapters.trl_async import AsyncFSPOConfig, AsyncFSPOTrainer

The asynchronous trainer is experimental in TRL. Checked with TRL 1.16.

* S starts from the sampler's log-probs, like all ratios of this trainer, so it includes staleness and the
  mismatch of sampler and trainer; choose a band wide enough for both.
* J is averaged over the samples of the optimizer step, whose number is fixed and includes samples without a
  trained token. TRL's default ``token_budget``, which leaves the number open, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from megatron_fspo.adapters.sequence_loss import mean_loss, metrics, the_advantage
from megatron_fspo.adapters.trl import Limits, WithFSPO

_OTHERS = {
    "epsilon": "FSPO's limits are c_low, c_high and c_dual",
    "epsilon_high": "FSPO's limits are c_low, c_high and c_dual",
    "token_budget": "the number of samples of an optimizer step must be known at its beginning",
}


@dataclass
class AsyncFSPOConfig(Limits, AsyncGRPOConfig):
    """``AsyncGRPOConfig`` with FSPO's limits. Raises ``ValueError``, in one line, for an invalid limit or a
    setting that has no effect."""

    token_budget: int | None = field(
        default=0, metadata={"help": "must be 0: a fixed number of samples per micro-batch"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(_OTHERS)


class AsyncFSPOTrainer(WithFSPO, AsyncGRPOTrainer):
    """``AsyncGRPOTrainer`` with FSPO as its loss. ``args`` is an :class:`AsyncFSPOConfig`; another
    configuration raises ``TypeError``, a model with an auxiliary loss ``ValueError``."""

    _tag_names = ("trl", "async-fspo")
    _name = "AsyncFSPO"
    _config = AsyncFSPOConfig
    args: AsyncFSPOConfig

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the loss of one packed row. Everything except the loss and its clip rates stays TRL's."""
        outputs = []

        def watched(**keys: Any) -> Any:
            outputs.append(model(**keys))
            return outputs[-1]

        # For its accounting. Its loss is discarded, and so are the clip rates of that loss.
        selected, accounted = inputs["token_index"] >= 0, inputs
        if not bool(selected.any()):  # it needs a token
            first = {key: inputs[key].clone() for key in ("token_index", "segment_id")}
            for values in first.values():
                values.view(-1)[0] = 0
            accounted = inputs | first
        super().compute_loss(watched, accounted)
        for name in [name for name in self._metrics["train"] if name.startswith("clip_ratio/")]:
            del self._metrics["train"][name]

        log_probs = outputs[0].log_probs.flatten()[inputs["token_index"][selected]]
        segment = inputs["segment_id"][selected]
        n = int(segment.max()) + 1 if len(segment) else 1  # no trained token: an empty sample
        difference = log_probs.float() - inputs["old_log_probs"][selected].float()
        log_ratio_sum = difference.new_zeros(n).index_add(0, segment, difference)
        lengths = difference.new_zeros(n).index_add(0, segment, torch.ones_like(difference))
        given = inputs["advantages"][selected].float()
        lowest = given.new_full((n,), torch.inf).scatter_reduce(0, segment, given, "amin")
        highest = given.new_full((n,), -torch.inf).scatter_reduce(0, segment, given, "amax")
        advantages = the_advantage(lowest, highest, lengths > 0)
        # Metrics over all processes, whose rows differ in number of samples.
        columns = torch.stack([log_ratio_sum.detach(), lengths, advantages], dim=1)
        rows = self.accelerator.gather(self.accelerator.pad_across_processes(columns))
        sums, counts, of_each = rows.unbind(dim=1)
        for name, value in metrics(sums, counts, self._fspo.surrogate(sums, counts, of_each)).items():
            self._metrics["train"][name].append(value)
        # TRL averages gradients over processes and sums them over micro-batches.
        per_process = self.args.per_device_train_batch_size * self.current_gradient_accumulation_steps
        terms = self._fspo.surrogate(log_ratio_sum, lengths, advantages)
        return mean_loss(log_ratio_sum, terms, per_process)
