"""A route has flipped if the router chose another set of experts, in whatever order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.mcore.model.router import PolicyRouter

TOKENS, LAYERS, EXPERTS = 400, 3, 5


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
@pytest.mark.parametrize("place", [0, 2])
def test_flips_are_of_sets(place: int, experts_per_token: int, replay: bool) -> None:
    generator = torch.Generator().manual_seed(experts_per_token)

    def choices(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, EXPERTS, generator=generator).argsort(-1)[..., :experts_per_token]

    routes, own = choices(TOKENS, LAYERS).to(torch.uint8), choices(TOKENS)
    same = torch.arange(TOKENS) % 3 == 0
    routes[same, place] = own[same].flip(1).to(torch.uint8)  # the same experts in another order
    unknown = torch.arange(TOKENS) % 5 == 0
    routes[unknown] = 255
    work = SimpleNamespace(replay=replay, flipped={}, chosen={})
    router: Any = SimpleNamespace(
        place=place, _here=lambda values: values, config=SimpleNamespace(num_moe_experts=EXPERTS)
    )
    used, known = PolicyRouter._compared(router, SimpleNamespace(routes=routes, router=work), own)

    assert known.equal(~unknown)
    for token in range(TOKENS):
        there, here = ([] if unknown[token] else routes[token, place].tolist()), own[token].tolist()
        assert work.flipped[place][token].item() == bool(there and {*there} != {*here})
        wanted = there if there and replay else here
        assert used[token].tolist() == wanted == work.chosen[place][token].tolist()
    assert work.flipped[place].any()
    assert not work.flipped[place][same].any() or experts_per_token == 0
