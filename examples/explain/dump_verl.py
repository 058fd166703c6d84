"""Dump a verl run for ``megatron-fspo explain``: a line for each response and update.

    PYTHONPATH=examples/explain EXPLAIN_DUMP=runs/verl python -m verl.trainer.main_ppo \
        actor_rollout_ref.model.external_lib=dump_verl \
        actor_rollout_ref.actor.policy_loss.loss_mode=gspo+dump …
    cat runs/verl/*.jsonl > runs/verl.jsonl; megatron-fspo explain runs/verl.jsonl

verl's own dump, ``trainer.rollout_data_dir``, has texts and scores but no log-probs. This module, which verl
imports as ``external_lib``, registers a loss ``<name>+dump`` for each policy loss, which writes its arguments
and then calls that loss. Each process writes its own file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss


def dumping(loss: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Wrap a policy loss so that it also appends a line for each response to a file."""

    def with_dump(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        columns = {
            "old_log_prob": old_log_prob,
            "log_prob": log_prob.detach(),
            "advantages": advantages,
            "response_mask": response_mask.int(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for values in zip(*(column.float().tolist() for column in columns.values()), strict=True):
                file.write(json.dumps(dict(zip(columns, values, strict=True))) + "\n")
        return loss(old_log_prob, log_prob, advantages, response_mask, *rest, **more)

    return with_dump


_PATH = Path(os.environ.get("EXPLAIN_DUMP", "explain_dump")) / f"{os.getpid()}.jsonl"
for _name, _loss in list(POLICY_LOSS_REGISTRY.items()):
    register_policy_loss(f"{_name}+dump")(dumping(_loss, _PATH))
