"""Which layouts a model can have, and which models can be trained: one line that names the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.sizes import check_parallel, check_trainable, check_world
from megatron_fspo.verify.cases import SMALL as DENSE
from megatron_fspo.weights import Architecture, Experts

TWO_OF_8 = Experts(count=8, per_token=2, ffn_size=40, normalize_top_k=True)
MOE = replace(DENSE, model_type="qwen3_moe", experts=TWO_OF_8)


@pytest.mark.parametrize(
    ("arch", "parallel", "message"),
    [
        (DENSE, {"expert": 2}, "parallel.expert = 2, but the model has no experts"),
        (MOE, {"expert": 3}, "parallel.expert = 3 does not divide the 8 experts of a layer"),
        (
            MOE,
            {"tensor": 2},
            "parallel.tensor = 2 with a mixture of experts needs parallel.sequence = true",
        ),
        (
            replace(MOE, experts=replace(TWO_OF_8, per_token=1)),
            {},
            "num_experts_per_tok = 1 with norm_topk_prob = true: Megatron has no such router",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model(
    arch: Architecture, parallel: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_parallel(arch, Parallel(**parallel))
    assert str(caught.value) == message


def test_layouts_that_fit_the_model() -> None:
    check_parallel(MOE, Parallel(expert=8))
    check_parallel(MOE, Parallel(tensor=4, sequence=True, expert=2))
    raw = replace(TWO_OF_8, per_token=1, normalize_top_k=False)
    check_parallel(replace(MOE, experts=raw), Parallel())
    check_world(Parallel(tensor=2, context=2, pipeline=2, expert=8), 16)


@pytest.mark.parametrize(
    ("parallel", "world_size", "message"),
    [
        ({"expert": 4}, 2, "parallel.expert = 4 does not divide the 2 ranks of a pipeline stage"),
        ({"pipeline": 2, "expert": 4}, 4, "parallel.expert = 4 does not divide the 2 ranks of a"),
        ({"tensor": 2, "context": 2}, 6, "parallel.tensor = 2 x parallel.context = 2 does not divide the"),
    ],
)
def test_a_layout_that_does_not_fit_the_ranks(
    parallel: dict[str, int], world_size: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_world(Parallel(**parallel), world_size)
    assert str(caught.value).startswith(message)


def test_mixtures_of_experts_are_not_trained() -> None:
    check_trainable(DENSE)
    with pytest.raises(InputError, match=r"mixture of experts \(qwen3_moe\): training these is not verified"):
        check_trainable(MOE)
