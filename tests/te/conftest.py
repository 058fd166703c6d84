from __future__ import annotations

from pathlib import Path

import pytest

from backend import ENGINE

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ENGINE:
        for item in items:
            if HERE in item.path.parents:
                reason = "needs Transformer Engine on a fake GPU: `make test-te`"
                item.add_marker(pytest.mark.skip(reason=reason))
