"""``megatron-fspo status --hang``: whom the ranks of a job wait for, from dumps of torch's flight recorder.

torch writes one of each rank when a collective of NCCL takes too long: a pickle of plain types, or JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.lab.trace.match import find_awaited
from megatron_fspo.lab.trace.record import Call, Made, Site, shortened
from megatron_fspo.weights.safe_pickle import Unpickler

_MOST_BYTES = 2**28


def examine(dumps: Path) -> list[str]:
    """Return what is wrong by the dumps in a folder, or with names that begin like ``dumps``.

    Raises:
        InputError: there are none, or a file is none.
    """
    read: dict[int, tuple[Any, list[Call]]] = {}
    for file in dumps.iterdir() if dumps.is_dir() else dumps.parent.glob(f"{dumps.name}*"):
        if (number := re.search(r"\d+$", file.stem)) and file.is_file():
            if file.stat().st_size > _MOST_BYTES:
                raise InputError(f"{file} has {file.stat().st_size} bytes, and a dump at most {_MOST_BYTES}")
            data = file.read_bytes()
            try:
                dump = json.loads(data) if data[:1] == b"{" else Unpickler(data, ()).load()
                read[int(number[0])] = dump, [_read_call(entry) for entry in dump["entries"]]
            except Exception as error:  # a damaged pickle raises nearly anything
                raise InputError(f"{file} is no dump of torch's flight recorder: {error!r}") from None
    if not read:
        raise InputError(f"--hang {dumps}: no file's name ends with a rank, such as comm_lib_trace_rank_0")
    return find_awaited({rank: calls for rank, (_, calls) in read.items()}, _read_groups(read))


def _read_groups(read: Mapping[int, tuple[Any, list[Call]]]) -> dict[str, Made]:
    """Return the groups that have calls. gloo does not write who is in them: then it is who called."""
    groups: dict[str, Made] = {}
    for rank, (dump, _) in sorted(read.items()):
        for name, about in dict(entry["process_group"] for entry in dump["entries"]).items():
            written = json.loads(dump["pg_config"].get(name, {}).get("ranks") or "[]")
            callers = [*(groups[name].ranks if name in groups else ()), rank]
            ranks = written or (range(max(read) + 1) if about == "default_pg" else callers)
            groups[name] = Made(name, tuple(ranks), about)
    return groups


def _read_call(entry: Mapping[str, Any]) -> Call:
    """Return an entry as a call: of a collective, or of a message such as ``recv 1<-0``."""
    name, *ends = entry["profiling_name"].partition(":")[2].split()
    frames = entry.get("frames") or [{"filename": "?", "line": 0, "name": "?"}]
    ours = [one for one in frames if shortened(one["filename"])]
    frame = [*ours, *(one for one in frames if "/torch/" not in one["filename"]), frames[0]][0]
    return Call(
        group=entry["process_group"][0],
        name=name,
        dtypes=tuple(sorted({*entry["input_dtypes"], *entry["output_dtypes"]})),
        counts=tuple(math.prod(size) for size in (*entry["output_sizes"], *entry["input_sizes"])),
        root=int(re.split("->|<-", ends[0])[1]) if ends else None,
        number=None if entry["is_p2p"] else entry["collective_seq_id"],
        pending=not entry["retired"] and entry["state"] != "completed",
        site=Site(shortened(frame["filename"]) or frame["filename"], frame["line"], frame["name"]),
    )
