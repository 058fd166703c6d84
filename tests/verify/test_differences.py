"""A difference of 2 ulp on one rank: the same decisions on all, in every layout that ``verify --all`` has."""

from __future__ import annotations

from pathlib import Path

import pytest
from difference_worker import SEQUENCE

from launch import found_by
from megatron_fspo.verify.cases import SMALL
from megatron_fspo.verify.layouts import all_layouts

pytestmark = pytest.mark.slow

LAYOUTS = {layout.name: layout for layout in all_layouts(SMALL, world_size=4)}
Found = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Layout → what was forced apart → what came of it, on any rank. That it came to an end is half of it."""
    worker = Path(__file__).with_name("difference_worker.py")
    return found_by(worker, tmp_path_factory.mktemp("differences"), nproc=4, timeout=900)


# Several ranks compute the loss of one sequence.
SHARED = [name for name, one in LAYOUTS.items() if one.parallel.tensor * one.parallel.context > 1]


@pytest.mark.parametrize("name", SHARED)
def test_nothing_comes_of_it(found: Found, name: str) -> None:
    """Not in S, clips and gradients of a loss that decides by sequence; where tensor-parallel ranks share all
    tokens, not in those of one that decides by token."""
    for what in (*SEQUENCE, *(["tokens"] if LAYOUTS[name].parallel.tensor > 1 else [])):
        assert found[name][what] == [], what


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_says_what_the_band_is_what_a_correction_drops_and_what_is_sampled(
    found: Found, name: str
) -> None:
    assert found[name]["c"] == found[name]["gate"] == found[name]["draws"] == []


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in SHARED])
def test_where_a_rank_has_its_sequences_to_itself_2_ulp_decide(found: Found, name: str) -> None:
    assert found[name]["S"] == ["clipped", "gradients", "out_of_band"]


@pytest.mark.parametrize("name", [name for name in SHARED if "tp" not in name])
def test_without_one_that_decides_context_ranks_part(found: Found, name: str) -> None:
    """The same difference as above, and no word from the first rank."""
    assert "gradients" in found[name]["S, and each decides for itself"]
