from __future__ import annotations

import pytest

from megatron_fspo.job import remote


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.005)
