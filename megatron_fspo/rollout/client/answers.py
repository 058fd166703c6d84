"""Parses and strictly validates answers of a vLLM server. No I/O.

A log-prob of another token or a truncated response would silently train the policy on wrong data. So an
answer is either exactly what was requested, or a :class:`BadAnswer`.

One process parses the answers of all servers while it trains, so parsing must be cheap: msgspec checks types
while it decodes, and skips fields that are not declared here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.client.routes import read_routes
from megatron_fspo.rollout.common import MODEL
from megatron_fspo.rollout.sampling import kept
from megatron_fspo.types import Completion, SamplingParams, VersionSpan

FIRST_VERSION = "default"
"""vLLM's name of the weights that it started with; becomes version 0."""

_ROUNDING = 1e-6  # nats: rounding may lift a fp32 log-softmax of a certain token this far above 0
_MINUS_INFINITY = -9999.0  # vLLM writes this for −∞ and NaN


class BadAnswer(TrainingError):
    """A server's answer is unusable. :class:`Server` adds its URL to the message."""


class StoppedElsewhere(BadAnswer):
    """The response ends at a stop string that is in the server's text but not in ours."""


class EndedEarly(BadAnswer):
    """The server ended the response early; another attempt may succeed. ``args``: message, finish_reason."""


UNFINISHED = {
    None: "the server gave no reason for the end",
    "abort": "the server aborted the request",
    "error": "the server's engine failed",
    "repetition": "the server stopped a repetition",
}
"""``finish_reason`` → what it means, if the response is no sample of the policy."""


# With gc=False, Python's garbage collector does not traverse one object per token.
class _LogProb(Struct, gc=False):
    logprob: float


class _Token(_LogProb, gc=False):
    token_id: int


class _LogProbs(Struct):
    content: list[_Token]


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    token_ids: list[Annotated[int, Meta(ge=0, lt=2**31)]]
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] = []
    routed_experts: str | None = None


class _Answer(Struct):
    error: Any = None
    model: str | None = None


class _Generated(_Answer):
    choices: list[_Choice] = []


class _Scored(_Answer):
    prompt_logprobs: list[dict[str, _LogProb] | None] = []


_A = TypeVar("_A", bound=_Answer)
_T = TypeVar("_T")
_GENERATED = msgspec.json.Decoder(_Generated)
_SCORED = msgspec.json.Decoder(_Scored)
_ANYTHING = msgspec.json.Decoder()


def parse(body: bytes) -> object:
    """Return the JSON of an answer; None for an empty one, as several routes send. Raises ``BadAnswer``."""
    return _decode(_ANYTHING, body) if body else None


def read_completion(body: bytes, params: SamplingParams, prompt_length: int) -> Completion:
    """Return the one completion of an answer of ``/inference/v1/generate``.

    A server may continue after a stop string: the further tokens are cut off. Unusable routes become None.

    Args:
        body: JSON of the answer.
        params: sampling parameters of the request; ``n`` is ignored.
        prompt_length: number of prompt tokens.

    Raises:
        StoppedElsewhere: the server stopped at a string that our text does not contain.
        BadAnswer: the answer is anything else than such a completion.
    """
    choices = _checked(_decode(_GENERATED, body)).choices
    if len(choices) != 1:
        raise BadAnswer(f"{len(choices)} choices, expected 1")
    (choice,) = choices
    token_ids, reason = choice.token_ids, choice.finish_reason
    if reason in UNFINISHED:
        raise EndedEarly(f"finish_reason {reason!r}: {UNFINISHED[reason]}", reason)
    if reason not in ("stop", "length") or choice.logprobs is None:
        raise BadAnswer(f"no log-probs, or an unknown finish_reason: {_short(reason)}")
    end = kept(token_ids, params)
    _check_end(token_ids, reason, params, stopped=end is not None)
    log_probs = _log_probs(choice.logprobs.content, token_ids)
    spans = _spans(choice.weight_versions, len(token_ids))
    if params.temperature == 0:
        # A greedy choice has probability 1, but vLLM reports the log-prob at temperature 1.
        log_probs = [0.0] * len(token_ids)
    routes, problem = None, ""
    if params.routing is not None:
        tokens, sent = prompt_length + len(token_ids), choice.routed_experts
        try:
            routes = read_routes(sent, params.routing, tokens=tokens, versions=len(spans))
        except ValueError as error:
            problem = str(error)
    if end is not None:
        routes = None if routes is None else routes[: prompt_length + end - 1]
        spans = tuple(replace(span, end=min(span.end, end)) for span in spans if span.start < end)
    return Completion(
        token_ids=token_ids[:end],
        log_probs=log_probs[:end],
        finish_reason="stop" if end is not None or reason == "stop" else "length",
        weight_version=min(span.version for span in spans),
        version_spans=spans,
        routes=routes,
        route_problem=problem,
    )


def read_prompt_log_probs(body: bytes, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs, in nats, of a prompt's N tokens but the first: N − 1 numbers. Raises
    ``BadAnswer`` if the answer is anything else."""
    entries = _checked(_decode(_SCORED, body)).prompt_logprobs
    if len(entries) != len(token_ids):
        raise BadAnswer(f"{len(entries)} prompt log-probs for {len(token_ids)} tokens")
    log_probs = []
    for i, (entry, token) in enumerate(zip(entries[1:], token_ids[1:], strict=True), start=1):
        if entry is None or str(token) not in entry:
            raise BadAnswer(f"prompt position {i} has no log-prob of token {token}")
        log_probs.append(entry[str(token)].logprob)
    _check_range(log_probs, "prompt position", first=1)
    return log_probs


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"the answer has the wrong format: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadAnswer(f"the answer of {len(body)} bytes is not JSON ({error})") from None


def _checked(answer: _A) -> _A:
    """Return the answer if it is the policy's and not an error, else raise :class:`BadAnswer`."""
    if answer.error is not None:
        raise BadAnswer(f"the answer is an error: {_short(answer.error)}")
    if answer.model != MODEL:
        raise BadAnswer(f"the answer is from model {_short(answer.model)}, not {MODEL!r}")
    return answer


def _check_end(token_ids: list[int], reason: str, params: SamplingParams, *, stopped: bool) -> None:
    """Check that the response ends where it should. ``stopped``: it contains a stop string."""
    if not token_ids:
        raise BadAnswer("the completion has no tokens")
    count = len(token_ids)
    stops = sorted(token_ids.index(token) for token in params.stop_token_ids if token in token_ids)
    if count > params.max_tokens:
        raise BadAnswer(f"{count} tokens, expected at most {params.max_tokens}")
    if stops and stops[0] < count - 1:
        raise BadAnswer(f"stop token {token_ids[stops[0]]} at position {stops[0]} of {count}, not at the end")
    if stopped:  # the caller cuts off the rest
        return
    if reason == "stop" and not stops:
        kind = StoppedElsewhere if params.stop else BadAnswer
        raise kind(f"finish_reason 'stop' without a stop token: the last token is {token_ids[-1]}")
    if reason == "length" and stops:
        raise BadAnswer(f"finish_reason 'length' with stop token {token_ids[-1]} at the end")
    if reason == "length" and count < params.max_tokens:
        raise BadAnswer(f"cut off after {count} of {params.max_tokens} tokens: --max-model-len is too small")


def _log_probs(content: list[_Token], token_ids: list[int]) -> list[float]:
    if len(content) != len(token_ids):
        raise BadAnswer(f"{len(content)} log-probs for {len(token_ids)} tokens")
    named = [entry.token_id for entry in content]
    if named != token_ids:
        i = next(i for i, token in enumerate(token_ids) if named[i] != token)
        raise BadAnswer(f"log-prob {i} is of token {named[i]}, but the token is {token_ids[i]}")
    log_probs = [entry.logprob for entry in content]
    _check_range(log_probs, "token", first=0)
    return log_probs


def _check_range(log_probs: Sequence[float], what: str, *, first: int) -> None:
    """Check that log-probs are finite and at most 0. ``first``: position of the first, for the message."""
    for worst in (min(log_probs, default=0.0), max(log_probs, default=0.0)):
        if not _MINUS_INFINITY < worst <= _ROUNDING:
            i = first + log_probs.index(worst)
            raise BadAnswer(f"the log-prob of {what} {i} is {worst}, not a finite number ≤ 0")


def _spans(entries: list[_Span], count: int) -> tuple[VersionSpan, ...]:
    spans, position = [], 0
    for entry in entries:
        if entry.start != position or entry.end <= entry.start:
            raise BadAnswer(f"weight_versions: {entry.start} to {entry.end} is no span from {position} on")
        digits = entry.version.isascii() and entry.version.isdigit() and len(entry.version) <= 18
        if not digits and entry.version != FIRST_VERSION:
            raise BadAnswer(f"weight version {_short(entry.version)} is not a number or {FIRST_VERSION!r}")
        version = int(entry.version) if digits else 0
        spans.append(VersionSpan(version=version, start=entry.start, end=entry.end))
        position = entry.end
    if position != count:
        raise BadAnswer(f"weight_versions covers {position} of {count} tokens")
    return tuple(spans)


def _short(value: object) -> str:
    """Return a value on one line, for a message."""
    try:
        text = repr(value)
    except RecursionError:  # deeply nested lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:120] + "…"
