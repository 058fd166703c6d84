"""What a person reads, and what a program reads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from megatron_fspo.verify.run import Result

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}


def header() -> str:
    """Column titles."""
    return (
        "Largest errors of each layout, over losses, splits, and a tied and an untied model, against one\n"
        "process in float64. gradient: relative to the parameter's largest entry; |grad|: of the norm;\n"
        "TP, CP: collectives of head and loss per micro-batch; one without response tokens has none.\n\n"
        f"{'layout':<36} {'dtype':<9}{'gradient':>9} {'worst parameter':<32}{'log-prob':>9}{'S':>9}"
        f"{'loss':>9}{'|grad|':>9}{'TP':>4}{'CP':>3}  verdict"
    )


def lines(layout: str, results: Sequence[Result]) -> str:
    """One line per precision."""
    found = []
    for dtype in dict.fromkeys(result.dtype for result in results):
        rows = [result for result in results if result.dtype == dtype]
        worst = max(rows, key=lambda row: row.errors.gradient)
        failed = sum(bool(row.problems) for row in rows)
        verdict = f"{failed} of {len(rows)} FAIL" if failed else f"{len(rows)} pass"
        found.append(
            f"{layout:<36} {_NAMES[dtype]:<9}{worst.errors.gradient:>9.0e} {_short(worst):<32}"
            f"{max(row.errors.log_prob for row in rows):>9.0e}"
            f"{max(row.errors.log_ratio_sum for row in rows):>9.0e}"
            f"{max(row.errors.loss for row in rows):>9.0e}"
            f"{max(row.errors.grad_norm for row in rows):>9.0e}"
            f"{max(row.collectives['tp'] for row in rows):>4.2g}"
            f"{max(row.collectives['cp'] for row in rows):>3.2g}  {verdict}"
        )
    return "\n".join(found)


def failures(results: Sequence[Result], limit: int = 10) -> list[str]:
    """What failed, a few lines each."""
    failed = [result for result in results if result.problems]
    found = [
        f"{result.layout}, {_NAMES[result.dtype]}, {result.case.name}, {result.case.split}"
        f"{', tied' if result.tied else ''}:\n" + "\n".join(f"  {problem}" for problem in result.problems)
        for result in failed[:limit]
    ]
    return found + ([f"… and {len(failed) - limit} more; --json has all"] if len(failed) > limit else [])


def verdict(results: Sequence[Result]) -> str:
    """One line; names the worst parameter of a run that failed."""
    failed = [result for result in results if result.problems]
    layouts = len({result.layout for result in results})
    if not failed:
        return f"{layouts} layouts, {len(results)} cases: the same gradient in all of them"
    worst = max(failed, key=lambda result: result.errors.gradient)
    return (
        f"{len(failed)} of {len(results)} cases FAILED; worst parameter {worst.errors.worst_parameter} "
        f"(relative error {worst.errors.gradient:.1e}, layout {worst.layout}, {worst.case.name})"
    )


def as_json(results: Sequence[Result], *, world_size: int, collectives: str) -> dict[str, Any]:
    """Every case, with the versions it ran on."""
    return {
        "world_size": world_size,
        "collectives": collectives,
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "passed": not any(result.problems for result in results),
        "cases": [
            {
                "layout": result.layout,
                "dtype": _NAMES[result.dtype],
                "tied": result.tied,
                "loss": result.case.name,
                "split": result.case.split,
                "gradient_error": result.errors.gradient,
                "parameter": result.errors.worst_parameter,
                "log_prob_error": result.errors.log_prob,
                "log_ratio_sum_error": result.errors.log_ratio_sum,
                "loss_error": result.errors.loss,
                "grad_norm": result.grad_norm,
                "grad_norm_error": result.errors.grad_norm,
                "tp_collectives": result.collectives["tp"],
                "cp_collectives": result.collectives["cp"],
                "problems": result.problems,
            }
            for result in results
        ],
    }


def _short(result: Result) -> str:
    """A parameter's name without what is the same in all."""
    name = result.errors.worst_parameter.removeprefix("model.").replace(".weight", "")
    return (
        name.replace("self_attn.", "")
        .replace("layernorm", "norm")
        .replace(" (the copy on the last stage)", " (copy)")
    )
