"""Layouts: their names, what is refused, and the list that ``--all`` runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.sizes import check_parallel
from megatron_fspo.verify.cases import MIXTURE, SMALL, with_layers
from megatron_fspo.verify.layouts import Layout, all_layouts, choose_model, parse_layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any that can be asked for."""
    tensor, pipeline = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    flags = {key: draw(st.booleans()) for key in ("distributed_optimizer", "overlap_grad_reduce")}
    context, data = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    expert = draw(st.sampled_from([1, tensor, context * data]))
    parallel = Parallel(
        tensor=tensor,
        sequence=tensor > 1 and draw(st.booleans()),
        pipeline=pipeline,
        virtual_pipeline=draw(st.integers(1, 4)) if pipeline > 1 else 1,
        context=context,
        expert=expert,
        **flags,
    )
    moe = expert > 1 or draw(st.booleans())
    return Layout(parallel=parallel, data=data, recompute=draw(st.booleans()), moe=moe)


def ranks(layout: Layout) -> int:
    parallel = layout.parallel
    return parallel.tensor * parallel.pipeline * parallel.context * layout.data


@given(layout=layouts(), seed=st.integers(0, 99))
def test_a_name_is_read_as_it_is_written(layout: Layout, seed: int) -> None:
    """In any order of its words, and without the data-parallel size."""
    world_size = ranks(layout)
    assert parse_layout(layout.name, world_size=world_size) == layout
    words = layout.name.split(".")
    random.Random(seed).shuffle(words)
    assert parse_layout(".".join(words), world_size=world_size) == layout
    rest = [word for word in words if not word.startswith("dp")]
    assert parse_layout(".".join(rest) or "single", world_size=world_size) == layout


def test_a_name_by_hand() -> None:
    sizes = {"tensor": 2, "sequence": True, "pipeline": 2, "context": 3}
    parallel = Parallel(**sizes, distributed_optimizer=True)
    assert Layout(parallel=parallel, data=5, recompute=True).name == "tp2.sp.pp2.cp3.dp5.do.recompute"
    assert Layout(parallel=Parallel(), data=1).name == "single"


def test_the_ranks_that_remain_are_data_parallel() -> None:
    assert parse_layout("tp2", world_size=8).data == 4
    assert parse_layout("single", world_size=3).name == "dp3"
    assert parse_layout("tp1.cp1.dp1", world_size=1).name == "single"


@pytest.mark.parametrize(
    "word", ["xp2", "tp", "tp0", "tp-2", "tp2x", "tp02", "sp2", "TP2", "", " tp2", "single"]
)
def test_a_word_that_is_none_is_named(word: str) -> None:
    with pytest.raises(InputError, match=f"^layout cp2[.]{word}: '{word}' .*tpN, sp, ppN"):
        parse_layout(f"cp2.{word}", world_size=2)


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("tp3", 4, "a multiple of 3 ranks, not 4"),
        ("tp2.pp2.cp2", 4, "a multiple of 8 ranks, not 4"),
        ("tp2.dp2", 8, "needs 4 ranks, not 8"),
        ("dp2", 1, "needs 2 ranks, not 1"),
        ("sp", 2, "sp needs tp of at least 2"),
        ("vpp2.cp2", 2, "vpp needs pp of at least 2"),
        ("pp2.ep4", 4, "ep4 does not divide the 2 ranks of a pipeline stage"),
    ],
)
def test_sizes_that_do_not_fit(text: str, world_size: int, message: str) -> None:
    with pytest.raises(InputError, match=f"^layout {text}.* {message}$|^layout {text}: {message}$"):
        parse_layout(text, world_size=world_size)


# What --all runs.


@pytest.mark.parametrize("world_size", [1, 3, 4, 8])
def test_all_layouts_fit_and_differ(world_size: int) -> None:
    found = all_layouts(SMALL, world_size=world_size)
    assert max(Counter(layout.name for layout in found).values()) == 1
    for layout in found:
        assert ranks(layout) == world_size
        check_parallel(with_layers(SMALL, layout.parallel), layout.parallel)


@pytest.mark.parametrize(("world_size", "fewest"), [(2, 5), (4, 20), (8, 30)])
def test_layouts_of_experts(world_size: int, fewest: int) -> None:
    small = all_layouts(None, world_size=world_size)
    experts = [layout for layout in small if layout.moe]
    assert len(experts) >= fewest and len({layout.name for layout in small}) == len(small)
    assert [layout for layout in small if not layout.moe] == all_layouts(SMALL, world_size=world_size)
    for layout in experts:
        assert choose_model(layout, None).experts is not None
    # A run's own experts are in all of its layouts, and sequence parallel beside tensor parallel.
    own = all_layouts(MIXTURE, world_size=world_size)
    assert {layout.name for layout in experts if layout.parallel.expert > 1} <= {one.name for one in own}
    assert all(layout.parallel.sequence for layout in own if layout.parallel.tensor > 1)
    with pytest.raises(InputError, match=r"^layout moe\.dp2: the model has no experts$"):
        choose_model(parse_layout("moe", world_size=2), SMALL)


def test_all_layouts_of_8_ranks() -> None:
    uncut = replace(SMALL, num_heads=6, num_kv_heads=3)
    assert {layout.parallel.tensor for layout in all_layouts(uncut, world_size=8)} == {1}
    names = {layout.name for layout in all_layouts(SMALL, world_size=8)}
    # The promise of the command.
    assert names >= {"tp2.pp2.cp2", "tp2.cp2.dp2", "pp2.cp2.dp2", "pp4.vpp2.dp2", "tp4.sp.dp2"}
    # Every product of three sizes that leaves a data-parallel size.
    sizes = [(t, p, c) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) for c in (1, 2, 4, 8) if t * p * c <= 8]
    parallels = [layout.parallel for layout in all_layouts(SMALL, world_size=8)]
    products = {(p.tensor, p.pipeline, p.context) for p in parallels}
    assert products == {size for size in sizes if size[0] <= SMALL.num_kv_heads}
    # Tensor parallel with and without sequence parallel, alone and beside others.
    assert names >= {"tp2.dp4", "tp2.sp.dp4", "tp4.dp2", "tp2.sp.pp2.cp2", "tp2.sp.cp2.dp2"}
    # Each option alone, all together, and beside the parallel sizes.
    assert names >= {"dp8", "dp8.do", "dp8.overlap", "dp8.recompute", "dp8.do.overlap", "cp2.dp4.do"}
    assert names >= {"pp2.vpp2.dp4.do.overlap.recompute", "tp2.sp.pp2.dp2.do"}
    assert "tp2.sp.cp2.dp2.do.overlap.recompute" in names
    # Virtual stages wherever there are stages, but for one layer per rank.
    assert names >= {"pp2.vpp2.dp4", "pp2.vpp2.cp2.dp2", "tp2.sp.pp4.vpp2", "tp4.sp.pp2.vpp2"}
