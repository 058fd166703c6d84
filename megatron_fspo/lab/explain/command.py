"""The command: read, judge, write and print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.lab.explain.explanation import Explanation, explain_dump
from megatron_fspo.lab.explain.losses import known_for, with_limits
from megatron_fspo.lab.explain.rows import given_names
from megatron_fspo.lab.explain.text import as_json, outcomes


def explain(
    path: Path, limits: Sequence[str], fields: Sequence[str], *, step: int | None, rate: float | None
) -> Explanation:
    """Compare the losses on the dump: a file, or the folder of a run.

    ``limits`` and ``fields`` are words of the command line, ``--fspo.c-high 0.04`` and ``FIELD=NAME``;
    ``step`` is the optimizer step to read, None for all; ``rate`` the share out of band at which losses are
    compared, by default that of the first. Raises ``InputError`` for the first thing that is wrong.
    """
    losses, names = with_limits(limits), given_names(fields)
    if rate is not None and not 0 < rate < 1:
        raise InputError(f"--rate {rate:g}: must be a share between 0 and 1, such as 0.1")
    dump = read_dump(path, names, step)
    return explain_dump(dump, known_for(dump, losses), rate)


def write(explanation: Explanation, folder: Path) -> str:
    """Write the page, the figures, and the outcome of every response; says where."""
    from megatron_fspo.lab.explain.page import write_page

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"--out {folder}: is there and is no folder") from None
    page, figures, each = (folder / name for name in ("index.html", "explain.json", "outcomes.jsonl"))
    figures.write_text(json.dumps(as_json(explanation), indent=1) + "\n", encoding="utf-8")
    with each.open("w", encoding="utf-8") as file:
        file.writelines(outcomes(explanation))
    write_page(explanation, page)
    return f"\n  page      {page}\n  figures   {figures}\n  each one  {each}"
