"""Which layouts a model can have: one line that names the keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.sizes import check_parallel, check_world
from megatron_fspo.mcore.model.model import transformer_config
from megatron_fspo.verify.cases import SMALL as DENSE
from megatron_fspo.weights import Experts

TWO_OF_8 = Experts(count=8, per_token=2, ffn_size=40, normalize_top_k=True)
MOE = replace(DENSE, model_type="qwen3_moe", experts=TWO_OF_8)
ONE_OF_8 = replace(MOE, experts=replace(TWO_OF_8, per_token=1))


@pytest.mark.parametrize(
    ("check", "named"),
    [
        (lambda: check_parallel(DENSE, Parallel(expert=2)), "parallel.expert = 2, .* no experts"),
        (lambda: check_parallel(MOE, Parallel(expert=3)), "parallel.expert = 3 .* 8 experts"),
        (lambda: check_parallel(MOE, Parallel(tensor=2)), "parallel.tensor = 2 .* parallel.sequence = true"),
        (lambda: check_parallel(DENSE, Parallel(tensor=3)), "parallel.tensor = 3: "),
        (lambda: check_parallel(DENSE, Parallel(pipeline=3)), "parallel.pipeline = 3 .* 2 layers"),
        (lambda: check_parallel(ONE_OF_8, Parallel()), "num_experts_per_tok = 1 with norm_topk_prob = true"),
        (lambda: check_world(Parallel(expert=4), 2), "parallel.expert = 4 .* 2 ranks"),
        (lambda: check_world(Parallel(pipeline=2, expert=4), 4), "parallel.expert = 4 .* 2 ranks"),
        (
            lambda: check_world(Parallel(tensor=2, context=2), 6),
            "parallel.tensor = 2 x parallel.context = 2 .* 6",
        ),
    ],
)
def test_what_does_not_fit_is_named(check: Callable[[], None], named: str) -> None:
    with pytest.raises(InputError) as caught:
        check()
    assert re.match(f".*{named}", str(caught.value)) and "\n" not in str(caught.value)


def test_what_fits() -> None:
    check_parallel(MOE, Parallel(expert=8))
    check_parallel(MOE, Parallel(tensor=4, sequence=True, expert=2))
    raw = replace(TWO_OF_8, per_token=1, normalize_top_k=False)
    check_parallel(replace(MOE, experts=raw), Parallel())
    check_world(Parallel(tensor=2, context=2, pipeline=2, expert=8), 16)


def test_a_window_with_rings_of_transformer_engine_is_refused_before_a_model_is_built() -> None:
    backend: Any = SimpleNamespace(layers="transformer_engine")
    arch = replace(DENSE, model_type="mistral", window=8)
    with pytest.raises(InputError, match=r"^parallel\.context = 2: "):
        transformer_config(arch, backend, parallel=Parallel(context=2), dtype=torch.float32)
