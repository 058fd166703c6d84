"""The trainer's own step on GPUs that are not there: ``make test-fake-gpu``."""

from __future__ import annotations

import os
from typing import Any

import pytest
from checks import problems
from lane import OLDER, lane, request

from megatron_fspo.losses import loss_sections

CP = {"parallel__context": 2, "parallel__tensor": 2, "world": 16, "rank": 5}
STAGES = {"parallel__pipeline": 2, "parallel__tensor": 4}
VIRTUAL = STAGES | {"parallel__virtual_pipeline": 2, "layers": 4}
# Logits of 1.7 GiB, more than the head keeps of them.
ALONE = {"parallel__tensor": 1, "parallel__sequence": False, "world": 2}
LONG = {"rollout__max_response_tokens": 6144, "batch__max_tokens": 7168}
EXPERTS = {"model": "qwen3-30b-a3b", "parallel__tensor": 4, "parallel__expert": 8, "world": 16, "rank": 9}
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "TP": ((), {}),
    "TP without SP": ((), {"parallel__sequence": False}),
    "DP and overlap, colocated": (("two_nodes.toml", "colocated.toml"), {"world": 16, "rank": 9}),
    "DP alone": ((), ALONE | LONG),
    "CP, DP": (("two_nodes.toml",), CP),
    "PP, first": ((), STAGES),
    "PP, last": ((), STAGES | {"rank": 7}),
    "VPP, first": ((), VIRTUAL | {"rank": 3}),
    "VPP, last": ((), VIRTUAL | {"rank": 7}),
    "EP": ((), EXPERTS | {"moe__replay": "old_pass", "moe__aux_loss_coef": 0.01}),
    "shared prompts": ((), {"batch__share_prompts": "on", "batch__max_tokens": 8192}),
    "recompute": ((), {"model__recompute": "full"}),
    "reference": ((), {"loss__kl_coef": 0.01}),
    "entropy": ((), {"loss__entropy_coef": 0.01}),
    "head in torch": ((), {"model__head": "torch"}),
    "local": ((), {"model__layers": "local"}),
    "FP8 by block, colocated": (("two_nodes.toml", "fp8.toml", "colocated.toml"), {"layers": 4, "world": 16}),
    "FP8 by tensor": (("fp8.toml",), {"fp8__recipe": "tensorwise", "layers": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_does_what_the_tables_say(name: str) -> None:
    files, keys = LAYOUTS[name]
    asked = request(*files, **keys)
    assert problems(lane()(asked), asked) == []


def test_the_first_rank_receives_what_another_stage_exports() -> None:
    """Twice: by the first rank of the job, and by that of the other stage, whose tensors they are."""
    sent = []
    for rank in (0, 4):
        seen = lane()(request(**STAGES, rank=rank))
        (one,) = (c for c in seen["collectives"] if c["site"]["function"] == "_broadcast")
        sent.append((one["count"], one["sent"], one["largest"]))
    # Of the buckets, the output layer is the largest.
    assert sent[0] == sent[1] and sent[0][2] == 151_936 * 4096 * 2


@pytest.mark.skipif(not os.environ.get(OLDER), reason=f"{OLDER} names no folder: `make test-fake-gpu`")
@pytest.mark.parametrize("name", ["TP", "CP, DP", "EP", "PP, last", "VPP, first", "FP8 by block, colocated"])
def test_the_same_with_the_older_megatron(name: str) -> None:
    files, keys = LAYOUTS[name]
    asked = request(*files, **keys)
    assert problems(lane(older=True)(asked), asked) == []


def test_mxfp8_on_a_newer_gpu() -> None:
    asked = request("fp8.toml", fp8__recipe="mxfp8", layers=4)
    assert problems(lane(blackwell=True)(asked), asked) == []


@pytest.mark.parametrize(
    "loss",
    [section.model_fields["name"].default for section in loss_sections() if not section.SUPERVISED],
)
def test_every_loss(loss: str) -> None:
    asked = request(loss=loss, layers=1)
    assert problems(lane()(asked), asked) == []
