"""What a vLLM server answered, read with suspicion. No I/O.

A log-prob that belongs to another token, or a response cut short, would train the policy on what it did not
do and show nowhere. So an answer is either exactly what was asked for, or a :class:`BadAnswer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from megatron_fspo.errors import TrainingError
from megatron_fspo.types import Completion, SamplingParams, VersionSpan

MODEL = "policy"
"""The name under which servers serve the policy (``--served-model-name``)."""
FIRST_VERSION = "default"
"""What vLLM calls the weights that it started with: version 0."""

_ROUNDING = 1e-6  # nats: a fp32 log-softmax of a certain token may come out this far above 0
_MINUS_INFINITY = -9999.0  # vLLM writes this for −∞ and NaN


class BadAnswer(TrainingError):
    """A server answered something that cannot be trained on. The message names the server."""


class _Wrong(Exception):
    """What is wrong with an answer; whose it is comes later."""


def parse(body: bytes, where: str) -> object:
    """The JSON of an answer; None for an empty one, which several routes send.

    Raises:
        BadAnswer: not JSON, or cut off.
    """
    if not body:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"{where}: the answer of {len(body)} bytes is not JSON ({error})") from None


def read_completion(answer: object, *, params: SamplingParams, where: str) -> Completion:
    """The one completion of an answer of ``/inference/v1/generate``.

    Args:
        params: what was asked for; ``n`` is not looked at, a request asks for one.
        where: the server, for messages.

    Raises:
        BadAnswer: anything but that completion.
    """
    with _named(where):
        choice = _only_choice(answer)
        token_ids = _token_ids(choice.get("token_ids"))
        finish_reason = _finish_reason(choice.get("finish_reason"), token_ids, params)
        log_probs = _log_probs(choice.get("logprobs"), token_ids)
        spans = _spans(choice.get("weight_versions"), len(token_ids))
    if params.temperature == 0:
        # A greedy choice is certain. vLLM reports the log-prob at temperature 1.
        log_probs = (0.0,) * len(token_ids)
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        finish_reason=finish_reason,
        weight_version=min(span.version for span in spans),
        version_spans=spans,
    )


def read_prompt_log_probs(answer: object, token_ids: Sequence[int], where: str) -> list[float]:
    """Log-prob of each prompt token but the first, given those before it, in nats.

    Args:
        token_ids: the prompt that was sent, N tokens.
        where: the server, for messages.

    Returns:
        N − 1 numbers.

    Raises:
        BadAnswer: anything but these log-probs.
    """
    with _named(where):
        entries = _body(answer).get("prompt_logprobs")
        if not isinstance(entries, list):
            raise _Wrong(f"prompt_logprobs is {_short(entries)}, not a list")
        if len(entries) != len(token_ids):
            raise _Wrong(f"{len(entries)} prompt log-probs for {len(token_ids)} tokens")
        log_probs = []
        for i, (entry, token) in enumerate(zip(entries[1:], token_ids[1:], strict=True), start=1):
            of_token = entry.get(str(token)) if isinstance(entry, dict) else None
            if not isinstance(of_token, dict):
                raise _Wrong(f"prompt position {i} has no log-prob of token {token}: {_short(entry)}")
            log_probs.append(_log_prob(of_token.get("logprob"), f"prompt position {i}"))
        return log_probs


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except _Wrong as wrong:
        raise BadAnswer(f"{where}: {wrong}") from None


def _body(answer: object) -> dict[str, object]:
    if not isinstance(answer, dict):
        raise _Wrong(f"the answer is {_short(answer)}, not an object")
    if "error" in answer:
        raise _Wrong(f"the answer is an error: {_short(answer['error'])}")
    if answer.get("model") != MODEL:
        raise _Wrong(f"the answer is from model {_short(answer.get('model'))}, not {MODEL!r}")
    return answer


def _only_choice(answer: object) -> dict[str, object]:
    choices = _body(answer).get("choices")
    if not isinstance(choices, list):
        raise _Wrong(f"choices is {_short(choices)}, not a list")
    if len(choices) != 1:
        raise _Wrong(f"{len(choices)} choices where 1 was asked for")
    if not isinstance(choices[0], dict):
        raise _Wrong(f"the choice is {_short(choices[0])}, not an object")
    return choices[0]


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise _Wrong(f"token_ids is {_short(value)}, not a list of token ids")
    if not value:
        raise _Wrong("no token in the completion")
    return tuple(value)


def _finish_reason(
    value: object, token_ids: tuple[int, ...], params: SamplingParams
) -> Literal["stop", "length"]:
    stops = [i for i, token in enumerate(token_ids) if token in params.stop_token_ids]
    count = len(token_ids)
    if count > params.max_tokens:
        raise _Wrong(f"{count} tokens where at most {params.max_tokens} were asked for")
    if stops and stops[0] < count - 1:
        raise _Wrong(f"stop token {token_ids[stops[0]]} at position {stops[0]} of {count}, not at the end")
    if value == "stop":
        if not stops:
            raise _Wrong(f"finish_reason 'stop' without a stop token: the last is {token_ids[-1]}")
        return "stop"
    if value == "length":
        if stops:
            raise _Wrong(f"finish_reason 'length' with stop token {token_ids[-1]} at the end")
        if count < params.max_tokens:
            raise _Wrong(
                f"cut off after {count} of {params.max_tokens} tokens:"
                " --max-model-len has to hold prompt and completion"
            )
        return "length"
    raise _Wrong(f"finish_reason {_short(value)}, not 'stop' or 'length'")


def _log_probs(value: object, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list):
        raise _Wrong(f"no log-probs: logprobs is {_short(value)}")
    if len(content) != len(token_ids):
        raise _Wrong(f"{len(content)} log-probs for {len(token_ids)} tokens")
    log_probs = []
    for i, (entry, token) in enumerate(zip(content, token_ids, strict=True)):
        if not isinstance(entry, dict):
            raise _Wrong(f"log-prob {i} is {_short(entry)}, not an object")
        if type(entry.get("token_id")) is not int or entry["token_id"] != token:
            raise _Wrong(f"log-prob {i} is of token {_short(entry.get('token_id'))}, the token is {token}")
        log_probs.append(_log_prob(entry.get("logprob"), f"token {i}"))
    return tuple(log_probs)


def _log_prob(value: object, what: str) -> float:
    if type(value) not in (int, float):
        raise _Wrong(f"the log-prob of {what} is {_short(value)}, not a number")
    # Compared before it becomes a float: an integer may be too large for one.
    assert isinstance(value, int | float)
    if not _MINUS_INFINITY < value <= _ROUNDING or not math.isfinite(value):
        raise _Wrong(f"the log-prob of {what} is {_short(value)}, not a finite number up to 0")
    return float(value)


def _spans(value: object, count: int) -> tuple[VersionSpan, ...]:
    if not isinstance(value, list):
        raise _Wrong(f"weight_versions is {_short(value)}, not a list")
    spans, position = [], 0
    for entry in value:
        start, end = (entry.get("start"), entry.get("end")) if isinstance(entry, dict) else (None, None)
        if not isinstance(entry, dict) or type(start) is not int or type(end) is not int:
            raise _Wrong(f"weight_versions holds {_short(entry)}, not a span")
        if start != position or end <= start:
            raise _Wrong(f"weight_versions goes from {start} to {end} where {position} comes next")
        spans.append(VersionSpan(version=_version(entry.get("version")), start=start, end=end))
        position = end
    if position != count:
        raise _Wrong(f"weight_versions covers {position} of {count} tokens")
    return tuple(spans)


def _version(value: object) -> int:
    if value == FIRST_VERSION:
        return 0
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()) or len(value) > 18:
        raise _Wrong(f"weight version {_short(value)}, not a number or {FIRST_VERSION!r}")
    return int(value)


def _short(value: object) -> str:
    """A value on one line, for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits; lists in lists in lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:120] + "…"
