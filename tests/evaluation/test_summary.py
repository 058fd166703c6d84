"""From completions to figures, comparisons in pairs, tables."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_fspo.errors import InputError
from megatron_fspo.evaluation.records import EvaluationManifest, Problem, Record, SavedEvaluation
from megatron_fspo.evaluation.results import summary_metrics, table, write
from megatron_fspo.evaluation.summary import compare, per_problem, summarize


def saved(
    right: Callable[[str, int, int], bool],
    sets: dict[str, range],
    samples: int = 4,
    model: str = "m",
    **facts: Any,
) -> SavedEvaluation:
    keys = [(name, i, n) for name, indices in sets.items() for i in indices for n in range(samples)]
    return SavedEvaluation(
        manifest=EvaluationManifest(model=model, samples=samples, facts=facts),
        problems=tuple(
            Problem(dataset=name, index=i, id=f"{name}{i}", prompt=f"^{i}=", answer=str(i))
            for name, indices in sets.items()
            for i in indices
        ),
        records=tuple(
            Record(
                dataset=name,
                index=i,
                sample=n,
                response="r",
                answer="yes" if right(name, i, n) else None,
                score=float(right(name, i, n)),
                tokens=10 + n,
                finish_reason="length" if n == 0 else "stop",
            )
            for name, i, n in keys
        ),
    )


def noisy(seed: int, chance: float) -> Callable[[str, int, int], bool]:
    return lambda name, i, n: random.Random(f"{seed}/{name}/{i}/{n}").random() < chance


def test_figures_by_hand() -> None:
    one = saved(lambda name, i, n: n < i, {"s": range(3)})  # of four right: 0, 1, 2
    found = summarize(per_problem(one.records), 4)
    values = {name: estimate.value for name, estimate in found.sets["s"].items()}
    assert values == pytest.approx(
        {
            "mean": 1 / 4, "pass@1": 1 / 4, "pass@2": (0 + 1 / 2 + 5 / 6) / 3, "pass@4": 2 / 3,
            "maj@1": 1 / 4, "maj@2": (0 + 1 / 2 + 5 / 6) / 3, "maj@4": 2 / 3,
            "length": 11.5, "truncated": 1 / 4, "unanswered": 3 / 4,
        }
    )  # fmt: skip
    assert found.problems == {"s": 3} and found.average["mean"] == found.sets["s"]["mean"]


def test_a_difference_in_pairs_is_narrower_than_its_sides() -> None:
    """Problems differ far more than the two models on any of them."""

    def hard(shift: int) -> Callable[[str, int, int], bool]:
        return lambda name, i, n: n < i % 4 + (shift if i % 5 == 0 and i % 4 < 3 else 0)

    before, after = (saved(hard(shift), {"s": range(100)}) for shift in (0, 1))
    found = compare(after, before)
    difference = found.differences.sets["s"]["mean"]
    assert difference.value == pytest.approx(15 / 100 / 4)
    assert 0 < difference.low < difference.value < difference.high
    side = summarize(per_problem(after.records), 4).sets["s"]["mean"]
    assert difference.high - difference.low < 0.4 * (side.high - side.low)
    back = compare(before, after).differences.sets["s"]["mean"]
    assert back.value == -difference.value and back.low < back.value < back.high < 0


def test_sets_with_a_k_of_their_own(tmp_path: Path) -> None:
    """A set's figures are what they are alone; the average has what all sets have."""
    few = saved(noisy(1, 0.5), {"a": range(6)}, samples=2)
    many = saved(noisy(2, 0.5), {"b": range(6, 10)}, samples=8)
    ks = {"a": 2, "b": 8}
    both = SavedEvaluation(
        manifest=EvaluationManifest(model="m", samples=ks, facts={}),
        problems=few.problems + many.problems,
        records=few.records + many.records,
    )
    found = summarize(per_problem(both.records), both.manifest.samples)
    assert found.samples == ks
    for one, name in ((few, "a"), (many, "b")):
        assert found.sets[name] == summarize(per_problem(one.records), ks[name]).sets[name]
    assert [name for name in found.average if "@" in name] == ["pass@1", "pass@2", "maj@1", "maj@2"]
    mean = [found.sets[name]["mean"].value for name in "ab"]
    assert found.average["mean"].value == pytest.approx(sum(mean) / 2)
    names = {name for name in summary_metrics(found) if name.count("/") == 2 and name[6:9] in ("mea", "maj")}
    assert names == {"val/a/mean@2", "val/b/mean@8", "val/a/maj@2", "val/b/maj@8"}
    write(tmp_path, both.manifest, found, compare(both, both))
    assert json.loads((tmp_path / "results.json").read_text())["samples"] == ks
    rows = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("|")]
    assert rows[0].endswith("| b maj@8 | average mean | average pass@2 | average maj@2 |")
    heads, _, first, second = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows[-4:])
    assert heads[:4] == ["set", "problems", "samples", "mean"] and heads.count("pass@8") == 1
    assert first[:3] == ["a", "6", "2"] and second[:3] == ["b", "4", "8"]
    assert first[heads.index("pass@8")] == "" and second[heads.index("pass@8")] != ""


def test_a_comparison_of_one_set_with_another_k() -> None:
    """The other set is compared as if nothing were; the larger k has no difference."""
    sets = {"a": range(6), "b": range(6, 10)}

    def with_b(samples: int, seed: int) -> SavedEvaluation:
        whole = saved(noisy(seed, 0.5), sets, samples=8)
        return replace(
            whole,
            manifest=EvaluationManifest(model="m", samples={"a": 8, "b": samples}, facts={}),
            records=tuple(r for r in whole.records if r.dataset == "a" or r.sample < samples),
        )

    this, other = with_b(2, 1), with_b(8, 2)
    found, alike = compare(this, other), compare(with_b(8, 1), other)
    assert found.differences.sets["a"] == alike.differences.sets["a"]
    assert "pass@2" in found.differences.sets["b"] and "pass@4" not in found.differences.sets["b"]
    text = table("m", summarize(per_problem(this.records), {"a": 8, "b": 2}), found)
    assert "| a maj@8 | b mean | b pass | b maj | average mean | average pass " in text


def test_problems_are_matched_by_what_they_ask() -> None:
    """The second file has them in another order, and one twice; sets come in another order, too."""
    one = saved(noisy(1, 0.5), {"a": range(6), "b": range(6, 9)})
    ids = {p.index: "twice" if p.index in (1, 4) else p.id for p in one.problems}
    one = replace(one, problems=tuple(replace(p, id=ids[p.index]) for p in one.problems))
    new = {0: 15, 1: 12, 2: 17, 3: 10, 4: 13, 5: 11, 6: 2, 7: 1, 8: 3}
    other = replace(
        one,
        problems=tuple(replace(p, index=new[p.index]) for p in reversed(one.problems)),
        records=tuple(replace(r, index=new[r.index]) for r in reversed(one.records)),
    )
    found = compare(one, other).differences
    for estimates in (*found.sets.values(), found.average):
        assert {(e.value, e.low, e.high) for e in estimates.values()} == {(0.0, 0.0, 0.0)}
    swapped = replace(
        other, records=tuple(replace(r, index={1: 2, 2: 1}.get(r.index, r.index)) for r in other.records)
    )
    assert compare(one, swapped).differences.sets["b"]["mean"].low < 0


def test_other_problems_are_refused_by_name() -> None:
    one = saved(noisy(1, 0.5), {"s": range(20)}, model="one")
    other = saved(noisy(1, 0.5), {"s": range(8, 21)}, model="two")
    with pytest.raises(InputError, match=r"first: s 0 .*, s 4 .*, 3 more; .* second: s 20 \('\^20='\)$"):
        compare(one, other)
    with pytest.raises(InputError, match="only in the second: t 0"):
        compare(one, replace(one, problems=tuple(replace(p, dataset="t") for p in one.problems)))


def test_the_table_and_the_results(tmp_path: Path) -> None:
    sets = {"a|b": range(6), "c": range(6, 7)}
    one = saved(noisy(1, 0.7), sets, model="after", temperature=0.6, **{"weights sha256": "1"})
    other = saved(noisy(2, 0.3), sets, model="before", temperature=1.0, **{"weights sha256": "2"})
    summary, comparison = summarize(per_problem(one.records), 4), compare(one, other)
    write(tmp_path, one.manifest, summary, comparison)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["sets"]["c"]["mean"]["low"] is None and found["sets"]["c"]["problems"] == 1
    assert found["average"]["mean"]["value"] == summary.average["mean"].value
    assert found["comparison"]["changed"] == {"temperature": [1.0, 0.6]}
    text = (tmp_path / "table.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].startswith(r"| model | a\|b mean@4 | a\|b pass@4 | a\|b maj@4 | c mean@4")
    assert rows[0].endswith("average mean@4 | average pass@4 | average maj@4 |")
    assert [row.split(" |")[0] for row in rows[2:5]] == ["| `before`", "| `after`", "| difference"]
    cell = rows[3].split(" | ")[1]
    mean = summary.sets["a|b"]["mean"]
    assert cell == f"{100 * mean.value:.1f} [{100 * mean.low:.1f}, {100 * mean.high:.1f}]"
    assert "[n/a]" in rows[3] and not math.isnan(mean.low)
    assert rows[4].split(" | ")[1].startswith("+")
    assert "Besides the weights, these settings differ: `temperature` 1.0 → 0.6." in text
    plain = table("m", summary)
    assert len([line for line in plain.splitlines() if line.startswith("| `")]) == 1 and "differ" not in plain
