"""Whatever way one batch is split into micro-batches and over ranks, the same numbers are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import found_by
from megatron_fspo.verify.cases import SPLITS
from split_worker import CASES, LAYOUTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = Path(__file__).with_name("split_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("splits"), nproc=2)


@pytest.mark.parametrize("loss", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_split_reports_the_same(found: dict[str, Any], layout: str, loss: str) -> None:
    want = found["dp2"][f"{loss} | {SPLITS[0]}"]
    assert 0 < want["actor/pg_clipfrac"] < 1 and want["fspo/lre_mean"] > 0 and want["actor/pg_loss"] != 0
    for split in SPLITS:
        got = found[layout][f"{loss} | {split}"]
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), (split, name)


def test_every_correction_acts(found: dict[str, Any]) -> None:
    numbers = {name: found["dp2"][f"{name} | {SPLITS[0]}"] for name in CASES}
    for name, (loss, correction) in CASES.items():
        shares = [value for key, value in numbers[name].items() if key.startswith("rollout/correction_")]
        assert not shares if correction is None else all(0 < value < 2 for value in shares[:1])
        if correction is not None:
            assert numbers[name]["grad_norm"] != pytest.approx(numbers[loss]["grad_norm"], rel=1e-3)
            assert numbers[name]["actor/pg_loss"] == numbers[loss]["actor/pg_loss"]
