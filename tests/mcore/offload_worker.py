"""On two ranks: a policy that lends its memory between optimizer steps learns what one does that keeps it.

offload_worker.py CHECKPOINT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import LAYOUTS
from megatron_fspo import config as options
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.mcore.state.offload import Offload
from megatron_fspo.mcore.state.parameter_state import parameter_states
from megatron_fspo.weights import read_architecture
from passes import new_groups
from worker import step


def weights(model: Model) -> list[Tensor]:
    return [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def held(policy: Policy) -> Iterator[Tensor]:
    """All that is as large as the weights, found in other ways than the code under test finds it."""
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            yield from (parameter.data, parameter.main_grad)  # type: ignore[attr-defined]
    for state in parameter_states(policy):
        yield from (state.main, *state.moments.values())


def round_of_phases(offload: Offload, policy: Policy, *others: Model) -> None:
    kept = [weights(model) for model in (policy, *others)]
    tensors = [*held(policy), *(p for o in others for chunk in o.chunks for p in chunk.parameters())]
    offload.hold(weights=True, rest=False)
    assert equal(weights(policy), kept[0])
    offload.hold(weights=True, rest=False)  # as after a failure
    offload.hold(weights=False, rest=False)
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    offload.hold(weights=True, rest=False)
    assert equal(weights(policy), kept[0])
    offload.hold(weights=True, rest=True)
    assert all(equal(weights(model), before) for model, before in zip((policy, *others), kept, strict=True))


def check(checkpoint: Path, parallel: options.Parallel, dtype: torch.dtype) -> None:
    backend, groups = new_groups(parallel)
    arch = read_architecture(checkpoint)
    optimizer = options.Optimizer(lr=1e-2, weight_decay=0.1)
    keeps, lends = (
        Policy(arch, backend, groups, parallel=parallel, dtype=dtype, optimizer=optimizer) for _ in range(2)
    )
    reference = Model(arch, backend, groups, parallel=parallel, dtype=dtype)
    for model in (keeps, lends, reference):
        load_hf(model, checkpoint)
    offload = Offload(lends, reference)
    with pytest.raises(ValueError, match="rest=True"):
        offload.hold(weights=False, rest=True)
    for _ in range(2):
        round_of_phases(offload, lends, reference)
        theirs, ours = (step(policy, 512) for policy in (keeps, lends))
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
        assert equal(weights(keeps), weights(lends))
    assert not equal(weights(lends), weights(reference)), "nothing was learned"
    before, alone = weights(reference), Offload(reference)  # as an evaluation has it
    alone.hold(weights=False, rest=False)
    assert not any(p.untyped_storage().nbytes() for chunk in reference.chunks for p in chunk.parameters())
    alone.hold(weights=True, rest=True)
    assert equal(weights(reference), before)
    stop()


def main() -> None:
    cases = [(name, dtype) for name in ("dp2", "dp2do") for dtype in (torch.float32, torch.bfloat16)]
    for name, dtype in [*cases, ("tp2sp", torch.bfloat16), ("pp2", torch.float32)]:
        if name in LAYOUTS[2]:
            check(Path(sys.argv[1]), LAYOUTS[2][name], dtype)
    print("equal")


if __name__ == "__main__":
    main()
