"""A dump as tensors: the effect of a policy update on each of N responses, whoever trained it.

A row is one response, or, as in the ``sequences.jsonl`` of our runs, one step whose fields are lists with an
item for each response.

Shapes: N responses with L > 0 and finite figures, T response tokens of all of them. Units: nats; L in tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.rows import location, names_in, read_rows

Values = np.ndarray[Any, Any]
_MAX_NONFINITE = 0.05
_MOST = 2_000_000
"""Maximum responses of a dump: about a gigabyte without token log-probs."""
"""Share of responses that are not finite; as ``loss.max_nonfinite_share`` is by default."""
_SEQUENCES = "sequences.jsonl"
_IN_ALL_ROWS = {"log_probs", "old_log_probs", "sampled_log_probs", "prompt", "response"}
"""Fields that no row may lack if one has them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dump:
    """Responses and their figures."""

    path: Path
    rows: Tensor
    """[N] the row of each, from 1."""
    lengths: Tensor
    """[N] L, int64."""
    log_ratio_sum: Tensor
    """[N] S, float64."""
    advantages: Tensor
    """[N] float64."""
    rewards: Tensor | None
    """[N] float64."""
    log_ratio: Tensor | None
    """[T] log π_new − log π_old of the tokens, response by response, float64; None where rows have S only."""
    old_log_probs: Tensor | None
    """[T] log π_old of the tokens."""
    sampler_gap: Tensor | None
    """[T] log π_old − log π_sampler; None where rows do not have the sampler's log-probs."""
    updates: Tensor
    """[N] int64, the optimizer step on the rollout; 0 where rows do not say."""
    flipped: Tensor
    """[N] response tokens that a router would have sent to other experts than the old pass did; 0 where rows
    do not say."""
    flipped_log_ratio_sum: Tensor
    """[N] float64, their part of S."""
    clusters: Tensor
    """[N] int64; rows of different clusters are independent."""
    clustered_by: Literal["prompt", "response", "row"]
    """The kind of a cluster: the best of these that the dump names, unless all rows have the same."""
    empty: int
    """Responses with L = 0, which are left out."""
    nonfinite: int
    """Responses with an S or A that is not finite, which are left out."""
    unread: tuple[str, ...]
    """Names of the fields in the file that have no meaning here."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def clusters_count(self) -> int:
        """Different clusters."""
        return len(set(self.clusters.tolist()))


@dataclass
class _Response:
    """One response as it is read."""

    row: int
    length: int
    log_ratio_sum: float
    advantage: float
    reward: float
    update: int = 0
    flipped: int = 0
    flipped_log_ratio_sum: float = 0.0
    prompt: Hashable = None
    response: Hashable = None
    """Identity: the field, or a hash of the old log-probs, which are the same in all its updates."""
    log_ratio: Values | None = None
    old_log_probs: Values | None = None
    sampler_gap: Values | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.log_ratio_sum + self.flipped_log_ratio_sum + self.advantage)


def read_dump(path: Path, given: Mapping[str, str], step: int | None = None) -> Dump:
    """The responses of a file, or of a folder of one of our runs, or its ``tokens``: those of a ``step``, or
    all. ``given`` are names of fields in the file, where they are none of ``rows.NAMES``.

    Raises:
        InputError: the first thing that is wrong; names file, row and field.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.parquet")) or [path / _SEQUENCES]
    unread: set[str] = set()
    every = (response for file in files for response in _responses(file, given, step, unread))
    responses = [*islice(every, _MOST)]
    if next(every, None) is not None:
        raise InputError(f"{path}: holds more than {_MOST:,} responses: give a part of them, or a --step")
    if not responses:
        raise InputError(f"{path}: holds no responses{'' if step is None else f' of step {step}'}")
    full = [response for response in responses if response.length > 0]
    kept = [response for response in full if response.finite]
    if (nonfinite := len(full) - len(kept)) > _MAX_NONFINITE * len(full):
        first = next(response.row for response in full if not response.finite)
        raise InputError(
            f"{location(path, first)}: S or the advantage is not finite, as in {nonfinite} of {len(full)} "
            f"responses: more than {_MAX_NONFINITE:.0%} are no run to learn from"
        )
    if not kept:
        raise InputError(f"{path}: all {len(responses)} responses are empty (length 0)")
    if not any(response.log_ratio_sum for response in kept):
        raise InputError(
            f"{path}: log_ratio_sum is 0 in all {len(kept)} responses: on policy nothing is clipped; dump "
            "optimizer steps after the first of a rollout"
        )
    left_out = {"empty": len(responses) - len(full), "nonfinite": nonfinite, "unread": (*sorted(unread),)}
    return _as_tensors(path, kept, left_out)


def _as_tensors(path: Path, kept: list[_Response], left_out: dict[str, Any]) -> Dump:
    def collect(field: str) -> Tensor:
        return torch.tensor([getattr(response, field) for response in kept], dtype=torch.float64)

    def tokens(field: str) -> Tensor | None:
        arrays = [getattr(response, field) for response in kept]
        return None if arrays[0] is None else torch.from_numpy(np.concatenate(arrays))

    rewards = collect("reward")
    clustered_by: Literal["prompt", "response", "row"] = "row"
    clusters = list(range(len(kept)))
    for field in ("prompt", "response"):
        keys = [getattr(response, field) for response in kept]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        if len(numbers) > 1:
            clustered_by, clusters = field, [numbers[key] for key in keys]
            break
    return Dump(
        path=path,
        rows=torch.tensor([response.row for response in kept]),
        lengths=torch.tensor([response.length for response in kept]),
        log_ratio_sum=collect("log_ratio_sum"),
        advantages=collect("advantage"),
        rewards=None if rewards.isnan().all() else rewards,
        log_ratio=tokens("log_ratio"),
        old_log_probs=tokens("old_log_probs"),
        sampler_gap=tokens("sampler_gap"),
        updates=torch.tensor([response.update for response in kept]),
        flipped=torch.tensor([response.flipped for response in kept]),
        flipped_log_ratio_sum=collect("flipped_log_ratio_sum"),
        clusters=torch.tensor(clusters),
        clustered_by=clustered_by,
        **left_out,
    )


def _responses(
    path: Path, given: Mapping[str, str], step: int | None, unread: set[str]
) -> Iterator[_Response]:
    names: dict[str, str] = {}
    keys: list[str] = []
    same: frozenset[str] | None = None
    for number, row in read_rows(path):
        try:
            if list(row) != keys:
                keys = list(row)
                names = names_in(keys, given)
                here = names.keys() & _IN_ALL_ROWS
                if same is not None and here != same:
                    raise InputError(f"{min(here ^ same)} is in some rows and not in others: all need it")
                same = frozenset(here)
                unread |= {*keys} - {*names.values(), "remove_sample"}
            fields = {field: row[name] for field, name in names.items()}
            if step is not None and _whole(fields.get("step")) != step:
                continue
            if row.get("remove_sample"):  # slime's; it counts as empty
                fields = {"length": 0, "log_ratio_sum": 0.0, "advantage": 0.0}
            if isinstance(fields.get("length"), float):
                fields["length"] = _whole(fields["length"])
            if isinstance(fields.get("length"), list):
                yield from _parse_step(number, fields)
            else:
                yield _response(number, fields)
        except InputError as error:
            raise InputError(f"{location(path, number)}: {error}") from None


def _parse_step(number: int, fields: Mapping[str, Any]) -> Iterator[_Response]:
    """The responses of a row that holds an optimizer step."""
    names = ("length", "log_ratio_sum", "advantage", "update", "flipped", "flipped_log_ratio_sum", "prompt")
    columns = {field: fields[field] for field in names if field in fields}
    for field, column in columns.items():
        if not isinstance(column, list) or len(column) != len(columns["length"]):
            raise InputError(f"{field} must be a list as long as length, {len(columns['length'])} responses")
    for values in zip(*columns.values(), strict=True):
        response = _response(number, dict(zip(columns, values, strict=True)))
        if response.prompt is not None:  # an index into the step's own rollout
            response.prompt = number, response.prompt
        yield response


def _response(number: int, fields: Mapping[str, Any]) -> _Response:
    length = fields.get("length", 0)
    if type(length) is not int or not 0 <= length < 2**31:
        raise InputError(f"length = {_short(length)}: must be a number of tokens, from 0 to {2**31 - 1}")
    values = [_array("mask", value) for field, value in fields.items() if field.partition("_")[0] == "mask"]
    # Nulls only: prime-rl's weights that are all 1.
    masks = [_mask(value) for value in values if not len(value) or not np.isnan(value).all()]
    if len(lengths := {len(mask) for mask in masks}) > 1:
        raise InputError(f"the masks have {' and '.join(map(str, sorted(lengths)))} tokens")
    mask = np.logical_and.reduce(masks) if masks else None
    reward, s = fields.get("reward"), fields.get("log_ratio_sum", math.nan)
    response = _Response(
        row=number,
        length=length,
        log_ratio_sum=_number("log_ratio_sum", s),
        advantage=_advantage(fields["advantage"], mask),
        reward=math.nan if reward is None else _number("reward", reward),
        prompt=json.dumps(fields["prompt"]) if "prompt" in fields else None,
        response=json.dumps(fields["response"]) if "response" in fields else None,
    )
    if "log_probs" in fields and "old_log_probs" in fields:
        _add_tokens(response, fields, mask)
    if "update" in fields:
        response.update = fields["update"]
        if type(response.update) is not int or not 0 <= response.update < 2**53:
            raise InputError(f"update = {_short(response.update)}: must be the number of an optimizer step")
    if "flipped" in fields:
        response.flipped = fields["flipped"]
        if type(response.flipped) is not int or not 0 <= response.flipped <= response.length:
            raise InputError(f"flipped = {_short(response.flipped)}: must be some of the response's tokens")
        response.flipped_log_ratio_sum = _number("flipped_log_ratio_sum", fields["flipped_log_ratio_sum"])
    return response


def _add_tokens(response: _Response, fields: Mapping[str, Any], mask: Values | None) -> None:
    """Add the figures from token log-probs; check L and S if the row has them, too."""
    new, old = (_log_probs(name, fields[name], mask) for name in ("log_probs", "old_log_probs"))
    if len(new) != len(old):
        raise InputError(f"log_probs has {len(new)} tokens and old_log_probs {len(old)}")
    if "length" in fields and response.length != len(new):
        raise InputError(f"length = {response.length}, but log_probs has {len(new)} response tokens")
    with np.errstate(invalid="ignore"):  # -inf less -inf
        response.log_ratio, response.old_log_probs = new - old, old
    # Difference first, sum later.
    total = float(response.log_ratio.sum())
    # The trainer's sum may be one of float32, in another order.
    if "log_ratio_sum" in fields and (
        abs(response.log_ratio_sum - total) > 1e-4 + 1e-4 * float(np.abs(response.log_ratio).sum())
    ):
        raise InputError(
            f"log_ratio_sum = {response.log_ratio_sum:g}, but log_probs − old_log_probs sum to {total:g}: S "
            "is the sum over the response tokens, and not their mean"
        )
    response.length = len(new)
    if response.response is None:
        response.response = hash(old.tobytes())
    if "log_ratio_sum" not in fields or not math.isfinite(total):
        response.log_ratio_sum = total
    if "sampled_log_probs" in fields:
        sampled = _log_probs("sampled_log_probs", fields["sampled_log_probs"], mask)
        if len(sampled) != len(old):
            raise InputError(f"old_log_probs has {len(old)} tokens and sampled_log_probs {len(sampled)}")
        if not np.isfinite(sampled).all():
            raise InputError("sampled_log_probs must be finite for every response token")
        response.sampler_gap = old - sampled


def _log_probs(field: str, value: Any, mask: Values | None) -> Values:
    """Log-probs [L] of response tokens."""
    values = _masked(field, value, mask)
    # A probability given for its logarithm is above 0; so is what rounding makes of log 1.
    if len(values) and values.max() > 1e-3:
        at = int(values.argmax())
        raise InputError(f"{field}[{at}] = {values[at]:g}: a log-probability is not above 0")
    return values


def _whole(value: Any) -> Any:
    """Convert ``"3"`` and ``3.0``, as other tools write whole numbers, to 3."""
    with suppress(TypeError, ValueError, OverflowError):
        return int(value) if float(value) == int(float(value)) else value
    return value


def _mask(values: Values) -> Values:
    if not np.isin(values, (0.0, 1.0)).all():
        raise InputError("mask must be 1 for response tokens and 0 elsewhere")
    return values.astype(np.bool_)


def _masked(field: str, value: Any, mask: Values | None) -> Values:
    """Numbers of the tokens; where there is a mask, of those in it."""
    values = _array(field, value)
    if mask is not None and len(mask) != len(values):
        raise InputError(f"mask has {len(mask)} tokens and {field} {len(values)}")
    return values if mask is None else values[mask]


def _advantage(value: Any, mask: Values | None) -> float:
    """The response's advantage: one number, or the same one at each of its tokens, as verl has it."""
    if not isinstance(value, list):
        return _number("advantage", value)
    values = _masked("advantage", value, mask)
    if not len(values):
        return 0.0
    if not np.allclose(values, values[0], rtol=1e-6, atol=0.0, equal_nan=True):
        raise InputError(
            f"advantage is {values.min():g} at one token and {values.max():g} at another: a loss that "
            "decides for a response needs one advantage for it"
        )
    return float(values[0])


def _array(field: str, value: Any) -> Values:
    """[L] float64."""
    try:
        values = np.asarray(value if isinstance(value, list) else None)
        if values.dtype == object and None in value:  # null: prime-rl's for what is not finite
            values = np.asarray([math.nan if item is None else item for item in value])
    except (ValueError, OverflowError):  # lists of different lengths
        values = np.asarray(None)
    kinds = "fiub" if field == "mask" else "fiu"
    if values.ndim != 1 or (len(values) and values.dtype.kind not in kinds):
        raise InputError(f"{field} = {_short(value)}: must be a list with a number for each token")
    return values.astype(np.float64)


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise InputError(f"{field} = {_short(value)}: must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
