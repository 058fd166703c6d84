"""The traced process: standard input has requests, a line each, standard output a trace for each.

:mod:`megatron_fspo.lab.trace.command` starts it, above a CUDA runtime without a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from megatron_fspo.lab.trace import engine
from megatron_fspo.lab.trace.record import Request, Site, Trace, sum_sent
from megatron_fspo.lab.trace.watch import Watch

_AS_IT_IS = ("flops", "launches", "mixed", "early", "peaks", "peak")


def main() -> None:
    """Answer requests until there are no more."""
    # Whatever is printed on the way is no answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    watch = Watch()
    _prepare(watch)
    from megatron_fspo.lab.trace.step import take_step

    for line in sys.stdin:
        asked = Request(**json.loads(line))
        facts: dict[str, Any] = {"error": None}
        watch.begin(asked)
        try:
            facts |= take_step(asked, watch) | watch.calls.compare()
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        json.dump(_as_json(watch.trace) | facts, answers)
        answers.write("\n")
        answers.flush()
    os._exit(0)  # libraries of CUDA would ask the GPU for their memory back


def _prepare(watch: Watch) -> None:
    """Replace what would need a GPU, before Megatron is imported."""
    # Compiled functions are kernels: what they hold while they run is no memory of the step.
    torch.compile = lambda function=None, **_: (  # type: ignore[assignment]
        watch.kernel if function is None else watch.kernel(function)
    )
    dist.get_backend = lambda group=None: "nccl"  # type: ignore[assignment, return-value]
    watch.calls.install()
    if engine.is_there():
        engine.install(watch)
    if find_spec("triton") is not None:
        _count_head()
    from megatron.core.tensor_parallel import random

    # Random states stay on the host; a model in training has no dropout.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    _spread_tokens(watch)


def _spread_tokens(watch: Watch) -> None:
    """Have routers spread tokens evenly over experts: what they would choose is in no small tensor."""
    from megatron_fspo.mcore.model.router import PolicyRouter

    routing = PolicyRouter.routing

    def evenly(router: Any, *args: Any, **kwargs: Any) -> Any:
        probabilities, chosen = routing(router, *args, **kwargs)
        with _disable_current_modes():
            values = watch.memory.values(chosen)
            if values is None:
                raise NotImplementedError(f"routers of {len(chosen)} tokens: too many to follow")
            tokens, experts = values.shape
            places = torch.arange(tokens * router.topk).view(tokens, -1) % experts
            values.copy_(torch.zeros_like(values).scatter_(1, places, True))
        return probabilities, chosen

    PolicyRouter.routing = evenly  # type: ignore[method-assign, assignment]


def _count_head() -> None:
    """Have the products of the head's kernels counted."""
    import megatron_fspo.parallel.triton_head  # noqa: F401 (its operations)

    def forward(states: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
        return 2 * len(states) * weight.numel()

    def backward(block: Tensor, states: Tensor, weight: Tensor, *more: Any, **_: Any) -> int:
        _, _, _, start, _, kept, _ = more
        return 0 if start < kept.shape[1] else 2 * states.numel() * (len(weight) - start)

    register_flop_formula(torch.ops.fspo_head.statistics, get_raw=True)(forward)
    register_flop_formula(torch.ops.fspo_head.logits_gradient, get_raw=True)(backward)


def _as_json(seen: Trace) -> dict[str, Any]:
    """Return a trace as JSON types."""
    return {
        "syncs": [asdict(key) | {"count": n} for key, n in sorted(seen.syncs.items(), key=str)],
        "collectives": sum_sent(seen.events),
        **{name: _by_line(getattr(seen, name)) for name in ("allocations", "wide", "at_peak")},
        **{name: getattr(seen, name) for name in _AS_IT_IS},
    }


def _by_line(values: Mapping[tuple[str, Site], int]) -> list[dict[str, Any]]:
    return [
        {"phase": phase, "site": asdict(site), "value": value}
        for (phase, site), value in sorted(values.items(), key=lambda item: -item[1])
        if value
    ]


if __name__ == "__main__":
    main()
