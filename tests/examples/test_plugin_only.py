"""The plugin in a Megatron loop of one's own, under every kind of parallelism that the example shows."""

from __future__ import annotations

import re

import pytest

from launch import forked, why

LINE = re.compile(r"step (\d)  J (\S+)  gradient norm (\S+)  even gap (\S+)")


def train(nproc: int, *words: str) -> list[list[float]]:
    """Per step J, gradient norm and even gap; each step is told by one rank."""
    result = forked(["examples/plugin_only/train.py", *words], nproc=nproc)
    assert result.returncode == 0, why(result.stderr)
    rows = LINE.findall(result.stdout)
    assert [int(step) for step, *_ in rows] == list(range(6)), result.stdout
    return [[float(number) for number in row] for _, *row in rows]


def test_what_it_prints_is_of_all_sequences() -> None:
    """It does not depend on how many ranks share them, up to the last digit."""
    for two, four in zip(train(2), train(4), strict=True):
        assert four == pytest.approx(two, abs=2e-3)


@pytest.mark.slow
def test_it_learns_under_model_parallelism() -> None:
    rows = train(4, "--tensor", "2", "--pipeline", "2")
    assert all(norm > 0 for _, norm, _ in rows)
    assert rows[-1][2] > rows[0][2] + 0.3
