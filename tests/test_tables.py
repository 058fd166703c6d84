"""Figures as text and as JSON: what is not there, what is not finite, what is a table."""

from __future__ import annotations

import math

import torch

from megatron_fspo.evaluation.intervals import Estimate
from megatron_fspo.evaluation.tables import (
    by_column,
    columns,
    interval,
    markdown,
    number,
    percent,
    plain,
    with_interval,
)


def test_numbers_and_intervals() -> None:
    assert [number(x) for x in (1.234, 0, None, math.nan, math.inf)] == ["1.23", "0.00", "-", "-", "-"]
    assert percent(0.256) == "25.6%" and number(math.nan, absent="–") == "–"
    assert interval(1, 2, ".1f") == "[1.0, 2.0]" and interval(math.nan, 2) == interval(None, 2) == ""
    assert with_interval(1, 0, 2, ".0f") == "1 [0, 2]"
    assert with_interval(1, math.nan, math.nan) == "1.00" and with_interval(math.nan, 0, 1) == "-"


def test_tables() -> None:
    head, rows = by_column({"name": ["a", "long"], "n": ["1", "22"]})
    assert list(columns(head, rows)) == ["name  n", "a     1", "long  22"]
    assert list(columns(*by_column({"a": [], "b": []}))) == ["a  b"]
    assert markdown(["a|b", "n"], [["x", "1"]]).splitlines() == [
        r"| a\|b | n |",
        "| --- | ---: |",
        "| x | 1 |",
    ]


def test_json_has_no_nan() -> None:
    value = {"e": Estimate(value=1.0, low=math.nan, high=math.inf), "t": (torch.tensor([1.5, math.nan]), 2)}
    assert plain(value) == {"e": {"value": 1.0, "low": None, "high": None}, "t": [[1.5, None], 2]}
