"""Parallel layouts by name, such as ``tp2.sp.pp2.vpp2.cp2``, and the list for ``--all``."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.sizes import check_parallel
from megatron_fspo.verify.cases import MIXTURE, SMALL, with_layers
from megatron_fspo.weights import Adapters, Architecture
from megatron_fspo.weights.table import adapter_targets

_SIZES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert"}
_FLAGS = {"sp": "sequence", "do": "distributed_optimizer", "overlap": "overlap_grad_reduce"}
LEGAL = (
    "words joined by dots: tpN, sp, ppN, vppN, cpN, epN, moe (a mixture of experts, implied by epN), dpN, do "
    "(distributed optimizer), overlap, recompute, lora"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One parallel layout of a model over the ranks of a job."""

    parallel: Parallel
    data: int
    """Data-parallel size."""
    recompute: bool = False
    moe: bool = False
    """The model is a mixture of experts; expert parallelism implies it."""
    lora: bool = False
    """Adapters are trained, and the matrices are frozen."""

    @property
    def name(self) -> str:
        """Name such as ``tp2.sp.cp2.dp2.do``, without sizes of 1."""
        sizes = {word: getattr(self.parallel, key) for word, key in _SIZES.items()} | {"dp": self.data}
        flags = {word: getattr(self.parallel, key) for word, key in _FLAGS.items()}
        flags |= {"recompute": self.recompute, "lora": self.lora}
        words = [f"{word}{size}" for word, size in sizes.items() if size > 1]
        # sp follows its tp; the other flags come last.
        if flags.pop("sp"):
            words.insert(1, "sp")
        if self.moe and self.parallel.expert == 1:
            words.insert(0, "moe")
        return ".".join([*words, *(word for word, on in flags.items() if on)]) or "single"


def parse_layout(text: str, *, world_size: int) -> Layout:
    """Parse a layout's name for ``world_size`` ranks; ``InputError`` if a word or a size does not fit."""
    parallel, data, flags = _parse(text)
    return on_ranks(f"layout {text}", parallel, data, world_size=world_size, **flags)


def on_ranks(
    what: str,
    parallel: Parallel,
    data: int | None,
    *,
    world_size: int,
    recompute: bool,
    moe: bool,
    lora: bool = False,
) -> Layout:
    """Return a layout on ``world_size`` ranks; ``data`` None: all that remain. Raises ``InputError``, which
    begins with ``what``, if a size does not fit."""
    rest, remainder = divmod(world_size, parallel.model_size)
    if remainder or (data is not None and data != rest):
        ranks = parallel.model_size * (data or 1)
        raise InputError(f"{what} needs {'' if data else 'a multiple of '}{ranks} ranks, not {world_size}")
    if (stage := world_size // parallel.pipeline) % parallel.expert:
        raise InputError(f"{what}: ep{parallel.expert} does not divide the {stage} ranks of a pipeline stage")
    return Layout(parallel=parallel, data=rest, recompute=recompute, moe=moe, lora=lora)


def count_ranks(text: str) -> int:
    """Return the smallest number of ranks for a layout."""
    parallel, data, _ = _parse(text)
    stage = parallel.tensor * parallel.context * (data or 1)
    return parallel.pipeline * math.lcm(stage, parallel.expert)


def _parse(text: str) -> tuple[Parallel, int | None, dict[str, bool]]:
    """Return parallel sizes, the data-parallel size if it is given, and the other fields of a layout."""
    values: dict[str, int] = {}
    flags, data = {"recompute": False, "moe": False, "lora": False}, None
    for word in text.split(".") if text != "single" else []:
        match = re.fullmatch(r"(tp|pp|vpp|cp|ep|dp)([1-9][0-9]*)", word)
        if match is not None and match[1] == "dp":
            data = int(match[2])
        elif match is not None:
            values[_SIZES[match[1]]] = int(match[2])
        elif word in _FLAGS:
            values[_FLAGS[word]] = True
        elif word in flags:
            flags[word] = True
        else:
            raise InputError(f"layout {text}: {word!r} is unknown. A layout is {LEGAL}")
    parallel = Parallel.model_validate(values)
    if parallel.sequence and parallel.tensor == 1:
        raise InputError(f"layout {text}: sp needs tp of at least 2")
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise InputError(f"layout {text}: vpp needs pp of at least 2")
    return parallel, data, {**flags, "moe": flags["moe"] or parallel.expert > 1}


def choose_model(layout: Layout, arch: Architecture | None) -> Architecture:
    """Return ``arch`` or a small model, cut to a layout's layers; ``InputError`` if the two do not fit."""
    if arch is not None and layout.moe and arch.experts is None:
        raise InputError(f"layout {layout.name}: the model has no experts")
    model = with_layers(arch or (MIXTURE if layout.moe else SMALL), layout.parallel)
    check_parallel(model, layout.parallel)
    if layout.lora:
        model = replace(model, adapters=Adapters(rank=3, scale=0.25, targets=adapter_targets(model)))
    return model


def all_layouts(arch: Architecture | None, *, world_size: int) -> list[Layout]:
    """Return tensor × pipeline × context parallel sizes that fit the ranks and the model, and a selection of
    layouts with other options. Layouts with experts need an ``arch`` that has experts or is None."""
    sizes = [2**i for i in range(world_size.bit_length())]
    names = [
        ".".join(filter(None, [f"tp{tp}", sp, f"pp{pp}", vpp, f"cp{cp}"]))
        for tp, pp, cp in product(sizes, repeat=3)
        for sp in (["", "sp"] if tp > 1 and pp * cp == 1 else ["sp"] if tp > 1 else [""])
        for vpp in (["", "vpp2"] if 1 < pp < 8 and cp <= 2 else [""])
        if tp == 1 or cp == 1 or not vpp
    ]
    names += [
        *("tp2.cp2", "tp2.pp2.cp2", "do", "overlap", "recompute", "do.overlap", "cp2.do"),
        *("pp2.vpp2.do.overlap.recompute", "tp2.sp.pp2.do", "tp2.sp.cp2.do.overlap.recompute"),
        *("ep2", "ep4", "ep8", "tp2.sp.ep2", "tp2.sp.ep4", "tp4.sp.ep2", "tp4.sp.ep4", "cp2.ep2", "cp2.ep4"),
        *("pp2.ep2", "pp2.ep4", "pp2.vpp2.ep2", "pp4.ep2", "tp2.sp.pp2.ep2", "tp2.sp.pp2.ep4", "pp2.cp2.ep2"),
        *(
            "tp2.sp.cp2.ep2",
            "tp2.sp.cp2.ep4",
            "tp2.sp.pp2.vpp2.ep2",
            "ep2.do",
            "ep2.overlap",
            "ep2.recompute",
        ),
        *("tp2.sp.ep2.do", "cp2.ep4.do.overlap", "pp2.vpp2.ep2.do.overlap.recompute"),
    ]
    names += ["lora", "tp2.lora", "tp2.sp.lora", "cp2.do.lora", "pp2.vpp2.recompute.lora", "ep2.lora"]
    if arch is None:
        names += ["moe", "moe.tp2.sp", "moe.tp4.sp", "moe.cp2", "moe.pp2", "moe.tp2.sp.do"]
    layouts = []
    for name in names:
        with suppress(InputError):  # skip layouts that do not fit
            layout = parse_layout(name, world_size=world_size)
            choose_model(layout, arch)
            layouts.append(layout)
    return layouts
