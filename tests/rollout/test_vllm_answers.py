"""Answers: the good one is read, and nothing else is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
from fake_server import PARAMS, good_answer, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.client.answers import (
    BadAnswer,
    StoppedElsewhere,
    parse,
    read_completion,
    read_prompt_log_probs,
)
from megatron_fspo.types import Completion, VersionSpan

WHERE = "http://server:8000"
SEED = 3 + 50 * 5 + 50 * 50 * 8
TOKENS = (3, 5, 8)
STOPPING = replace(PARAMS, stop_token_ids=(8, 9))


def read(answer: object, params: Any = PARAMS) -> Completion:
    return read_completion(json.dumps(answer).encode(), params=params, where=WHERE)


def answer(**choice: Any) -> dict[str, Any]:
    """The good answer with parts of its choice replaced."""
    good = good_answer(SEED)
    good["choices"][0] |= choice
    return good


def content(*entries: tuple[object, object]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": value} for token, value in entries]}


def spans(*entries: tuple[object, object, object]) -> list[dict[str, object]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in entries]


def test_the_good_answer() -> None:
    assert tokens_of(SEED) == TOKENS
    assert read(good_answer(SEED)) == Completion(
        token_ids=TOKENS,
        log_probs=(-0.5, -1.5, -2.5),
        finish_reason="length",
        weight_version=0,
        version_spans=(VersionSpan(version=0, start=0, end=3),),
    )


def test_a_stop() -> None:
    assert read(answer(finish_reason="stop"), STOPPING).finish_reason == "stop"


def decode(ids: Any) -> str:
    return "".join(f"<{token}>" for token in ids)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_what_a_server_samples_after_a_stop_string_is_cut_off(reason: str) -> None:
    """Also what it sampled with later weights, and a stop token there."""
    params = replace(STOPPING, stop=("3><5",), decode=decode)
    sent = answer(finish_reason=reason, weight_versions=spans(("12", 0, 2), ("13", 2, 3)))
    assert read(sent, params) == Completion(
        token_ids=TOKENS[:2],
        log_probs=(-0.5, -1.5),
        finish_reason="stop",
        weight_version=12,
        version_spans=(VersionSpan(version=12, start=0, end=2),),
    )
    whole = read(answer(finish_reason="stop"), replace(params, stop=("9",)))
    assert tuple(whole.token_ids) == TOKENS and whole.finish_reason == "stop"


def test_a_server_that_reads_another_text_is_told_apart() -> None:
    params = replace(PARAMS, stop=("x",), decode=decode)
    with pytest.raises(StoppedElsewhere, match="'stop' without a stop token: the last is 8"):
        read(answer(finish_reason="stop"), params)
    with pytest.raises(BadAnswer, match="'stop' without a stop token") as raised:
        read(answer(finish_reason="stop"))
    assert not isinstance(raised.value, StoppedElsewhere)


def test_versions_that_changed_under_way() -> None:
    completion = read(answer(weight_versions=spans(("12", 0, 1), ("13", 1, 3))))
    assert completion.weight_version == 12
    assert completion.version_spans == (
        VersionSpan(version=12, start=0, end=1),
        VersionSpan(version=13, start=1, end=3),
    )


def test_a_certain_token_may_round_above_zero() -> None:
    found = read(answer(logprobs=content((3, 1e-7), (5, 0), (8, -1))))
    assert found.log_probs.tolist() == pytest.approx([1e-7, 0.0, -1.0])


def test_a_greedy_choice_is_certain() -> None:
    assert list(read(good_answer(SEED), replace(PARAMS, temperature=0.0)).log_probs) == [0.0, 0.0, 0.0]


GARBAGE: dict[str, tuple[object, str]] = {
    "nothing": (None, "Expected `object`, got `null`"),
    "list": ([], "Expected `object`, got `array`"),
    "error with status 200": (
        {"error": {"message": "EngineCore"}},
        "the answer is an error: {'message': 'Engi",
    ),
    "error beside an answer": (good_answer(SEED) | {"error": "late"}, "the answer is an error: 'late'"),
    "other model": (good_answer(SEED) | {"model": "base"}, "from model 'base', not 'policy'"),
    "no model": ({"choices": []}, "from model None"),
    "no choices": ({"model": "policy"}, "0 choices where 1"),
    "null choices": (good_answer(SEED) | {"choices": None}, "got `null` - at `$.choices`"),
    "empty choices": (good_answer(SEED) | {"choices": []}, "0 choices where 1"),
    "two choices": (good_answer(SEED) | {"choices": good_answer(SEED)["choices"] * 2}, "2 choices where 1"),
    "choice of null": (good_answer(SEED) | {"choices": [None]}, "at `$.choices[0]`"),
    "no tokens": (answer(token_ids=[]), "no token in the completion"),
    "null tokens": (answer(token_ids=None), "got `null` - at `$.choices[0].token_ids`"),
    "tokens as text": (answer(token_ids=["3", "5", "8"]), "got `str` - at `$.choices[0].token_ids[0]`"),
    "a token of true": (answer(token_ids=[3, True, 8]), "got `bool` - at `$.choices[0].token_ids[1]`"),
    "a negative token": (answer(token_ids=[3, -5, 8]), ">= 0 - at `$.choices[0].token_ids[1]`"),
    "no log-probs": (answer(logprobs=None), "got `null` - at `$.choices[0].logprobs`"),
    "log-probs without content": (answer(logprobs={"content": None}), "at `$.choices[0].logprobs.content`"),
    "a log-prob too few": (answer(logprobs=content((3, -1), (5, -1))), "2 log-probs for 3 tokens"),
    "log-prob of null": (answer(logprobs={"content": [None] * 3}), "logprobs.content[0]`"),
    "other token": (
        answer(logprobs=content((3, -1), (8, -1), (5, -1))),
        "log-prob 1 is of token 8, the token is 5",
    ),
    "token of 3.0": (answer(logprobs=content((3.0, -1), (5, -1), (8, -1))), "got `float`"),
    "log-prob as text": (answer(logprobs=content((3, "-1"), (5, -1), (8, -1))), "`float`, got `str`"),
    "log-prob of true": (answer(logprobs=content((3, False), (5, -1), (8, -1))), "`float`, got `bool`"),
    "NaN": (answer(logprobs=content((3, -1), (5, float("nan")), (8, -1))), "is not JSON"),
    "infinite": (answer(logprobs=content((3, -1), (5, float("-inf")), (8, -1))), "is not JSON"),
    "vLLM's -9999": (answer(logprobs=content((3, -1), (5, -9999.0), (8, -1))), "token 1 is -9999.0"),
    "positive": (answer(logprobs=content((3, -1), (5, -1), (8, 0.01))), "token 2 is 0.01"),
    "too large for a float": (answer(logprobs=content((3, -(10**400)), (5, -1), (8, -1))), "out of range"),
    "aborted": (answer(finish_reason="abort"), "'abort' - at `$.choices[0].finish_reason`"),
    "no reason": (answer(finish_reason=None), "at `$.choices[0].finish_reason`"),
    "stop without one": (answer(finish_reason="stop"), "without a stop token: the last is 8"),
    "no versions": (answer(weight_versions=None), "at `$.choices[0].weight_versions`"),
    "empty versions": (answer(weight_versions=[]), "covers 0 of 3"),
    "versions too short": (answer(weight_versions=spans(("1", 0, 2))), "covers 2 of 3"),
    "versions too long": (answer(weight_versions=spans(("1", 0, 4))), "covers 4 of 3"),
    "a gap": (answer(weight_versions=spans(("1", 0, 1), ("2", 2, 3))), "from 2 to 3 where 1 comes next"),
    "an overlap": (answer(weight_versions=spans(("1", 0, 2), ("2", 1, 3))), "from 1 to 3 where 2"),
    "an empty span": (answer(weight_versions=spans(("1", 0, 0), ("2", 0, 3))), "from 0 to 0"),
    "span of null": (answer(weight_versions=[None]), "at `$.choices[0].weight_versions[0]`"),
    "span of text": (answer(weight_versions=spans(("1", "0", "3"))), "weight_versions[0].start`"),
    "version by name": (answer(weight_versions=spans(("v7", 0, 3))), "weight version 'v7'"),
    "version as number": (answer(weight_versions=spans((7, 0, 3))), "weight_versions[0].version`"),
    "negative version": (answer(weight_versions=spans(("-1", 0, 3))), "weight version '-1'"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage(name: str) -> None:
    garbage, message = GARBAGE[name]
    with pytest.raises(BadAnswer) as raised:
        read(garbage)
    assert isinstance(raised.value, TrainingError)
    assert str(raised.value).startswith(f"{WHERE}: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("params", "finish_reason", "message"),
    [
        (replace(PARAMS, max_tokens=2), "length", "3 tokens where at most 2"),
        (replace(PARAMS, max_tokens=4), "length", "cut off after 3 of 4 tokens: --max-model-len"),
        (replace(PARAMS, stop_token_ids=(5,)), "length", "stop token 5 at position 1 of 3"),
        (replace(PARAMS, stop_token_ids=(8, 5)), "stop", "stop token 5 at position 1 of 3"),
        (STOPPING, "length", "'length' with stop token 8 at the end"),
    ],
)
def test_not_what_was_asked_for(params: Any, finish_reason: str, message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        read(answer(finish_reason=finish_reason), params)


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [])
    )
    return [path, *(found for key, child in children for found in paths(child, (*path, key)))]


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return value


def read_or_bad(value: object) -> Completion | None:
    try:
        return read(value)
    except BadAnswer:
        return None


GOOD = good_answer(SEED)
PLACES = [path for path in paths(GOOD) if path]
# A number in place of a number could be a good answer to another question; these cannot.
JUNK = st.sampled_from(
    [None, True, "", "x", [], {}, [[]], {"a": 1}, 10**9, 10**400, 1.5, float("nan"), float("inf"), -(10**6)]
)


@given(st.sampled_from(PLACES), JUNK)
def test_junk_anywhere_is_noticed(path: tuple[Any, ...], junk: object) -> None:
    def put(inner: Any, key: Any) -> None:
        inner[key] = junk

    assert read_or_bad(changed(GOOD, path, put)) in (None, read(GOOD))


@given(st.sampled_from(PLACES), st.sampled_from(["delete", "double"]))
def test_parts_lost_or_doubled_are_noticed(path: tuple[Any, ...], how: str) -> None:
    def change(inner: Any, key: Any) -> None:
        if how == "double" and isinstance(inner, list):
            inner.insert(key, copy.deepcopy(inner[key]))
        else:
            del inner[key]

    assert read_or_bad(changed(GOOD, path, change)) in (None, read(GOOD))


def test_no_truncation_is_an_answer() -> None:
    text = json.dumps(GOOD).encode()
    for length in range(len(text)):
        with pytest.raises(BadAnswer, match=r"is not JSON \("):
            read_completion(text[:length], params=PARAMS, where=WHERE)
        with pytest.raises(BadAnswer, match="is not JSON") if length else nullcontext():
            parse(text[:length], WHERE)


@given(st.binary(max_size=30))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_completion(body, params=PARAMS, where=WHERE)
    with suppress(BadAnswer):
        parse(body, WHERE)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b"9" * 10_000, b"\xff{}", b'{"error": "\xff"}'],
    ids=["deep", "long", "no JSON", "no UTF-8"],
)
def test_hostile_json(body: bytes) -> None:
    with pytest.raises(BadAnswer, match=r"is not JSON|out of range"):
        parse(body, WHERE)
    with pytest.raises(BadAnswer):
        read_completion(body, params=PARAMS, where=WHERE)


def test_an_error_of_any_depth() -> None:
    """Also where it can just be decoded, and not be shown."""
    for depth in range(2000):
        body = b'{"error": ' + b"[" * depth + b"0" + b"]" * depth + b"}"
        with pytest.raises(BadAnswer, match=r"is an error|is not JSON"):
            read_completion(body, params=PARAMS, where=WHERE)


def test_prompt_log_probs() -> None:
    entries = [None, {"5": {"logprob": -6.5, "rank": 2}, "9": {"logprob": -0.1}}, {"7": {"logprob": -1}}]
    good = {"model": "policy", "prompt_logprobs": entries, "choices": []}
    assert read_prompt_log_probs(json.dumps(good).encode(), [10, 5, 7], WHERE) == [-6.5, -1.0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, r"got `null` - at `\$\.prompt_logprobs`"),
        ([None, {"5": {"logprob": -1}}], "2 prompt log-probs for 3 tokens"),
        ([None, {"6": {"logprob": -1}}, {"7": {"logprob": -1}}], "position 1 has no log-prob of token 5"),
        ([None, None, {"7": {"logprob": -1}}], "position 1 has no log-prob of token 5"),
        ([None, {"5": {"logprob": float("nan")}}, {"7": {"logprob": -1}}], "is not JSON"),
        ([None, {"5": {"logprob": -1}}, {"7": {"logprob": -9999.0}}], r"prompt position 2 is -9999\.0"),
        ([None, {"5": {}}, {"7": {"logprob": -1}}], "missing required field `logprob`"),
    ],
)
def test_bad_prompt_log_probs(entries: object, message: str) -> None:
    with pytest.raises(BadAnswer, match=f"{WHERE}: .*{message}"):
        answer = json.dumps({"model": "policy", "prompt_logprobs": entries}).encode()
        read_prompt_log_probs(answer, [10, 5, 7], WHERE)
