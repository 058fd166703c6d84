"""The rows of a dump, JSON lines or parquet, and the names of their fields.

Names are ours, and those that TRL and verl give to the same quantities. TRL's are the names in
``GRPOTrainer._compute_loss`` (1.16.0) and of the column of its completions table; verl's those of its batch
and of the arguments of a policy loss (0.9.1); prime-rl's those of its token exports. Another name is given on
the command line, as in ``--fields advantage=adv``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_fspo.data.parquet import read_parquet
from megatron_fspo.data.rows import without_twins
from megatron_fspo.errors import InputError

try:
    import msgspec
except ImportError:  # in the environment of a peer, where this package is installed without its dependencies
    msgspec = None  # type: ignore[assignment]

NAMES: Mapping[str, tuple[str, ...]] = {
    "length": ("length", "L"),
    "log_ratio_sum": ("log_ratio_sum", "S"),
    "log_probs": ("log_probs", "per_token_logps", "log_prob", "trainer_logprobs"),
    "old_log_probs": ("old_log_probs", "old_per_token_logps", "old_log_prob", "inference_logprobs"),
    "sampled_log_probs": ("sampled_log_probs", "sampling_per_token_logps", "rollout_log_probs"),
    "mask": (
        *("mask", "completion_mask", "response_mask", "loss_mask", "loss_masks"),
        *("action_mask", "token_mask", "tool_mask", "env_mask", "rl_weights"),
    ),
    "advantage": ("advantage", "A", "advantages"),
    "update": ("update",),
    "flipped": ("flipped",),
    "flipped_log_ratio_sum": ("flipped_log_ratio_sum",),
    "reward": ("reward", "score"),
    "step": ("step",),
    "prompt": ("prompt", "uid"),
    "response": ("response",),
}
"""Field → names that it is known by, the first of which is ours. Of several masks all count."""
OTHER_MASKS = ("attention_mask", "prompt_mask", "padding_mask", "pixel_attention_mask")
"""Masks that are not of response tokens."""


def given_names(words: Iterable[str]) -> dict[str, str]:
    """``advantage=adv`` → the name in the file by field. ``InputError`` for an unknown field."""
    names = {}
    for word in words:
        field, _, name = word.partition("=")
        if field not in NAMES or not name:
            raise InputError(f"--fields {word}: must be FIELD=NAME, where FIELD is one of {', '.join(NAMES)}")
        names[field] = name
    return names


def names_in(keys: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The name of each field that a row with these keys has.

    Raises:
        InputError: the row has two names of one field, or lacks a name that was given.
    """
    names: dict[str, str] = {}
    for field, known in NAMES.items():
        here = [name for name in ([given[field]] if field in given else known) if name in keys]
        if field in given and not here:
            raise InputError(f"no field {given[field]!r}, which --fields gives for {field}")
        names |= {f"{field}_{number}": name for number, name in enumerate(here[1:]) if field == "mask"}
        if len(here) > 1 and field != "mask":
            raise InputError(
                f"{here[0]!r} and {here[1]!r} both mean {field}: keep one, or say --fields {field}=…"
            )
        if here:
            names[field] = here[0]
    for key in keys:
        if key.endswith(("mask", "masks")) and key not in (*names.values(), *OTHER_MASKS):
            raise InputError(f"{key!r} is an unknown mask: remove it, or say --fields mask={key}")
    _check_enough(names)
    return names


def _check_enough(names: Mapping[str, str]) -> None:
    """Raise ``InputError`` unless L, S and A follow from these fields."""

    def known(field: str) -> str:
        return " or ".join(map(repr, NAMES[field]))

    if "advantage" not in names:
        raise InputError(f"no field {known('advantage')}: the advantage says which side of a band clips")
    lacking = [field for field in ("log_probs", "old_log_probs") if field not in names]
    if len(lacking) == 2 and "log_ratio_sum" not in names:
        raise InputError(
            f"no field {known('log_ratio_sum')}, and no token log-probs of both policies ('log_probs' and "
            "'old_log_probs'); docs/explain.md has how TRL and verl write them"
        )
    if lacking and "log_ratio_sum" not in names:
        (other,) = {"log_probs", "old_log_probs"} & names.keys()
        raise InputError(f"{names[other]!r} without {known(lacking[0])}: a log-ratio needs both policies")
    if lacking and "length" not in names:
        raise InputError(f"no field {known('length')}: every band depends on the number of response tokens")
    if len(flips := {"flipped", "flipped_log_ratio_sum"} & names.keys()) == 1:
        raise InputError(f"{names[flips.pop()]!r} alone: flips need flipped and flipped_log_ratio_sum")
    if lacking and "sampled_log_probs" in names:
        raise InputError(f"{names['sampled_log_probs']!r} without 'log_probs' and 'old_log_probs'")


def location(path: Path, number: int) -> str:
    """The words of an error for a row, from 1: ``dump.jsonl:7`` or ``dump.parquet: row 7``."""
    return f"{path}: row {number}" if _is_parquet(path) else f"{path}:{number}"


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields number, from 1, and fields of every row; blank lines of JSON lines are left out.

    Raises:
        InputError: the file cannot be read, or a line is not an object in JSON; names file and line.
    """
    try:
        with path.open("rb") as file:
            if not _is_parquet(path):
                yield from (
                    (n, _parse(line, location(path, n))) for n, line in enumerate(file, 1) if line.strip()
                )
                return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        yield from enumerate(read_parquet(path), 1)
    except ImportError as error:
        raise InputError(
            f"{path}: parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    if msgspec is not None:  # in a third of the time
        # Only the standard parser reads NaN and says what is broken. A key that is there twice, which msgspec
        # takes, gives more colons than keys; so does text with colons.
        with suppress(ValueError, RecursionError):
            row = msgspec.json.decode(line)
            if isinstance(row, dict) and line.count(b":") == len(row):
                return row
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_twins)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not text in UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: not an object in JSON")
    return row
