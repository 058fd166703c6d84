"""The files of a run read back as arrays: its metrics by step, and the sequences it kept.

Shapes: N records; a record is one sequence in one optimizer step. Units: S in nats, L in response tokens.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.objective import LengthReweightingError, effective_sample_size, length_reweighting_error
from megatron_fspo.objective.calibration import FASTEST
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.record.rows import METRICS, SEQUENCES, is_evaluation, parse_row, read_rows, rows_from_end

Array = npt.NDArray[Any]
_RECORD_BYTES = 32 * 2**20
"""Bytes of a ``sequences.jsonl`` that are read: some 250,000 records, in half a second."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric over the steps that logged it."""

    steps: Array
    values: Array
    """NaN where the run logged null."""

    def __len__(self) -> int:
        return len(self.steps)

    def __bool__(self) -> bool:
        return bool(np.isfinite(self.values).any())

    def first(self, count: int = 5) -> float:
        """Return the mean over the first steps; NaN where there is nothing to average."""
        return _mean(self.values[:count])

    def last(self, count: int = 5) -> float:
        """Return the mean over the last steps."""
        return _mean(self.values[-count:])

    def total(self) -> float:
        return float(np.nansum(self.values))


class History:
    """The metrics of a run, or its ``newest`` rows of them; ``InputError`` if the folder holds none."""

    def __init__(self, folder: Path, *, newest: int | None = None) -> None:
        path = folder / METRICS
        if not path.exists():
            raise InputError(f"{folder}: holds no {METRICS}; give the folder of a run, such as runs/demo")
        rows = read_rows(path) if newest is None else reversed([*islice(rows_from_end(path), newest)])
        # Of rows with the same names a table of numbers: as dictionaries, 50,000 would take a gigabyte.
        self._tables: dict[tuple[str, ...], array[float]] = {}
        for number, row in enumerate(rows):
            values = [math.nan if value is None else value for value in row.values()]
            self._tables.setdefault(tuple(row), array("d")).extend([number, *values])
        if not self._tables:
            raise InputError(f"{path}: holds no step; there is nothing to report yet")

    def series(self, name: str) -> Series:
        """Return a metric by name; an empty series if the run never logged it."""
        logged = [np.zeros((3, 0))]
        for names, table in self._tables.items():
            if name in names:
                columns = np.frombuffer(table).reshape(-1, 1 + len(names)).T
                logged.append(columns[[0, 1 + names.index("step"), 1 + names.index(name)]])
        numbers, steps, values = np.concatenate(logged, axis=1)
        order = numbers.argsort()
        return Series(steps=steps[order].astype(np.int64), values=values[order])

    def names(self) -> list[str]:
        """Return the metrics, each once, as they first came."""
        return [*dict.fromkeys(name for names in self._tables for name in names)]

    def evaluation(self) -> str | None:
        """Name of the result on the first set of validation prompts, ``val/<set>/mean@k`` or ``/loss``."""
        return next(filter(is_evaluation, self.names()), None)


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records that a run kept, one row each; all arrays [N].

    Only those that count in a rate: L > 0 and a finite S.
    """

    step: Array
    update: Array
    """The optimizer step on its rollout."""
    prompt: Array
    """Of the rollout, from 0."""
    length: Array
    log_ratio_sum: Array
    """S, in nats."""
    advantage: Array
    clipped: Array
    """bool: a clip removed the gradient (token-level losses: of at least one token)."""
    out_of_band: Array
    """bool: outside the band on either side, whatever the sign of A."""
    ratio: Array
    """Importance weight, 0 where a clip acts; NaN where tokens have their own."""
    turns: Array
    """Of the policy in the trajectory; 1 without an environment."""

    def __len__(self) -> int:
        return len(self.step)

    def select(self, rows: Array) -> Records:
        """Return some of the rows, by a mask or by indices."""
        return Records(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def tail(self, share: float, least: int) -> Records:
        """Return those of the last steps: a share of all steps, at least so many."""
        steps = np.unique(self.step)
        kept = steps[-max(least, math.ceil(share * len(steps))) :]
        return self.select(np.isin(self.step, kept))

    def thinned(self, most: int) -> Records:
        """Return at most so many rows, evenly over the run."""
        if len(self) <= most:
            return self
        return self.select(np.linspace(0, len(self) - 1, most).astype(np.int64))


def read_records(folder: Path) -> Records:
    """Return the sequences that a run kept; none for a run that made only on-policy optimizer steps.

    A file above 32 MiB (500 steps with 1,024 sequences each) is read in part: so many bytes of steps, evenly
    over the run, the last step among them.
    """
    types: dict[str, type] = dict.fromkeys(("step", "update", "prompt", "length", "turns"), np.int64)
    types |= dict.fromkeys(("clipped", "out_of_band"), np.bool_)
    columns: dict[str, list[Array]] = {
        field.name: [np.zeros(0, types.get(field.name, np.float64))] for field in fields(Records)
    }
    for row in _rows_over_run(folder / SEQUENCES):
        for name, arrays in columns.items():
            count = len(row["length"])
            values = [row["step"]] * count if name == "step" else row.get(name, [1] * count)
            arrays.append(np.array(values, arrays[0].dtype))
    everything = Records(**{name: np.concatenate(arrays) for name, arrays in columns.items()})
    return everything.select(np.isfinite(everything.log_ratio_sum) & (everything.length > 0))


def steady(records: Records, history: History) -> Records:
    """Return the records after the step in which calibration moved the band, by more than c moves where it
    follows S; all where nothing moved."""
    widths = history.series("fspo/c_high")
    changes = np.abs(np.diff(np.log(widths.values)))
    moved = np.flatnonzero(changes > math.log(FASTEST) + 1e-6) + 1
    return records.select(records.step > widths.steps[moved[-1]]) if len(moved) else records


def _rows_over_run(path: Path) -> Iterator[dict[str, Any]]:
    """Yield rows of a file, in order: all, or :data:`_RECORD_BYTES` of them."""
    size = path.stat().st_size if path.exists() else 0
    if size <= _RECORD_BYTES:
        yield from read_rows(path)
        return
    last = next(rows_from_end(path))
    count = _RECORD_BYTES // len(json.dumps(last))
    with path.open("rb") as file:
        for number in range(count):
            if (offset := size * number // count) < file.tell():
                continue
            file.seek(offset)
            if offset:
                file.readline()  # the rest of a row
            line = file.readline()
            if line.endswith(b"\n") and (row := parse_row(line, path))["step"] < last["step"]:
                yield row
    yield last


@dataclass(frozen=True, kw_only=True)
class BinRates:
    """Clip rates of the records with low <= L <= high, or so many turns."""

    low: int
    high: int
    records: int
    out_of_band: float
    """Share of ``records`` outside the band."""
    judged: int
    """Records with A ≠ 0: the others can never be clipped."""
    clipped: float
    """Share of ``judged`` that a clip removed; NaN if there are none."""
    falling: int
    """Records with A < 0."""
    clipped_falling: float
    rising: int
    """Records with A > 0."""
    clipped_rising: float
    ess: float
    """Effective sample size of the importance weights, as a share of ``judged``; NaN where tokens have their
    own."""


def clip_rates(records: Records, by: str = "length", num_bins: int = 8) -> list[BinRates]:
    """Clip rates per bin of ``length`` or of ``turns``: quantiles, equal ones in one bin."""
    bins = length_bins(torch.from_numpy(getattr(records, by)), num_bins).numpy()
    return [overall_rates(records.select(bins == number), by) for number in np.unique(bins)]


def overall_rates(records: Records, by: str = "length") -> BinRates:
    """Clip rates of all records; there must be some."""
    falling, rising = records.advantage < 0, records.advantage > 0
    judged, clipped = falling | rising, records.clipped.astype(np.float64)
    return BinRates(
        low=int(getattr(records, by).min()),
        high=int(getattr(records, by).max()),
        records=len(records),
        out_of_band=float(records.out_of_band.mean()),
        judged=int(judged.sum()),
        clipped=_mean(clipped[judged]),
        falling=int(falling.sum()),
        clipped_falling=_mean(clipped[falling]),
        rising=int(rising.sum()),
        clipped_rising=_mean(clipped[rising]),
        ess=effective_sample_size(torch.from_numpy(records.ratio[judged])) if judged.any() else math.nan,
    )


def pooled_lre(records: Records) -> LengthReweightingError:
    """Return the LRE of out-of-band acceptance over the records of many steps; NaN where there are none.

    Pooled, the null floor is far below that of one step. Records of one prompt in one rollout go together.
    """
    accepted, length = torch.from_numpy(~records.out_of_band), torch.from_numpy(records.length)
    return length_reweighting_error(accepted, length, clusters=_clusters(records))


def signed_errors(records: Records) -> dict[str, LengthReweightingError]:
    """Return how uneven what a clip really removes is, over the records with A ≠ 0, as :func:`pooled_lre`.

    Returns:
        ``length``: LRE; ``within_sign`` and ``within_update``: LRE among those with one sign of A, or in one
        optimizer step of the rollout; ``sign`` and ``update``: the same error between those.
    """
    judged = records.select(records.advantage != 0)
    accepted, length, sign, update = map(
        torch.from_numpy, (~judged.clipped, judged.length, 1 + (judged.advantage > 0), judged.update)
    )
    error = partial(length_reweighting_error, accepted, clusters=_clusters(judged))
    return {
        "length": error(length),
        "within_sign": error(length, strata=sign),
        "within_update": error(length, strata=update),
        "sign": error(sign),
        "update": error(update),
    }


def _clusters(records: Records) -> Tensor:
    """Return [N] the prompt of a rollout."""
    return torch.from_numpy(records.step * (1 + records.prompt.max(initial=0)) + records.prompt)


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
