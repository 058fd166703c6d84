"""What a reward reads of a response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fspo.trainer.sampling import response_text
from megatron_fspo.types import Completion

INPUTS: Any = SimpleNamespace(stop_token_ids=(9,), decode=lambda ids: "".join(f"<{token}>" for token in ids))


@pytest.mark.parametrize(
    ("token_ids", "reason", "text"),
    [
        ((4, 9), "stop", "<4>"),
        ((4, 5), "stop", "<4><5>"),  # at a stop string, which stays
        ((4, 5), "length", "<4><5>"),
        ((9,), "stop", ""),
    ],
)
def test_a_stop_token_goes_and_a_stop_string_stays(token_ids: Any, reason: Any, text: str) -> None:
    completion = Completion(
        token_ids=token_ids, log_probs=[-1.0] * len(token_ids), finish_reason=reason, weight_version=0
    )
    assert response_text(INPUTS, completion) == text
