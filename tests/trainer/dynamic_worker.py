"""A small training run that writes down what it learns from, one JSON line a step, and may be cut short.

dynamic_worker.py FOLDER NAME DIE_IN_STEP [OPTION ...]: in that step (0: never), the process ends after the
first round of responses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_fspo.cli import main
from megatron_fspo.trainer import begin
from megatron_fspo.trainer.sampling import RolloutQueue
from runs import CONFIG, SMALL

BATCHES = "batches.jsonl"


def train() -> int:
    folder, name, die_in_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    make, further = begin.make_mini_batches, RolloutQueue.further

    def written(config: Any, rollout: Any, groups: Any, layout: Any) -> Any:
        row = {
            "prompts": [prompt.index for prompt in rollout.prompts],
            "lengths": rollout.lengths.tolist(),
            "rewards": rollout.rewards.tolist(),
            "advantages": rollout.advantages.view(-1, rollout.samples).tolist(),
            "owner": rollout.owner.tolist(),
        }
        mine = {number: [*completion.token_ids] for number, completion in rollout.held.items()}
        held: list[dict[int, list[int]]] = [{}] * dist.get_world_size()
        dist.all_gather_object(held, mine)
        row["tokens"] = sorted(item for part in held for item in part.items())
        row["holders"] = [[rank for rank, part in enumerate(held) if n in part] for n in range(len(rollout))]
        if dist.get_rank() == 0:
            with (Path(folder) / name / BATCHES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return make(config, rollout, groups, layout)

    def asked(self: RolloutQueue, step: int, number: int, prompts: int) -> Any:
        if step + 1 == die_in_step:
            os._exit(9)
        return further(self, step, number, prompts)

    arguments = ["train", "--config", str(CONFIG), "--run.folder", folder, "--run.name", name, *SMALL]
    with (
        mock.patch.object(begin, "make_mini_batches", written),
        mock.patch.object(RolloutQueue, "further", asked),
    ):
        return main([*arguments, *sys.argv[4:]])


if __name__ == "__main__":
    sys.exit(train())
