"""Answers: the good one is read, and nothing else is."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import pytest
from fake_server import PARAMS, good_answer, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.rollout.client.answers import (
    UNFINISHED,
    BadAnswer,
    StoppedElsewhere,
    parse,
    read_completion,
    read_prompt_log_probs,
)
from megatron_fspo.types import Completion, VersionSpan

SEED = 3 + 50 * 5 + 50 * 50 * 8
TOKENS = (3, 5, 8)
STOPPING = replace(PARAMS, stop_token_ids=(8, 9))


def read(answer: object, params: Any = PARAMS) -> Completion:
    return read_completion(json.dumps(answer).encode(), params, 2)


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
    with pytest.raises(StoppedElsewhere, match="'stop' without a stop token: the last token is 8"):
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


# What msgspec refuses by its type is for the tests of junk below.
GARBAGE: dict[str, tuple[object, str]] = {
    "error with status 200": ({"error": {"message": "EngineCore"}}, "an error: {'message': 'Engi"),
    "error beside an answer": (good_answer(SEED) | {"error": "late"}, "the answer is an error: 'late'"),
    "other model": (good_answer(SEED) | {"model": "base"}, "from model 'base', not 'policy'"),
    "no choices": ({"model": "policy"}, "0 choices, expected 1"),
    "two choices": (good_answer(SEED) | {"choices": good_answer(SEED)["choices"] * 2}, "2 choices, "),
    "no tokens": (answer(token_ids=[]), "no tokens"),
    "a token of true": (answer(token_ids=[3, True, 8]), "`$.choices[0].token_ids[1]`"),
    "a negative token": (answer(token_ids=[3, -5, 8]), "`$.choices[0].token_ids[1]`"),
    "a log-prob too few": (answer(logprobs=content((3, -1), (5, -1))), "2 log-probs for 3 tokens"),
    "other token": (answer(logprobs=content((3, -1), (8, -1), (5, -1))), "1 is of token 8, but the token"),
    "log-prob of true": (answer(logprobs=content((3, False), (5, -1), (8, -1))), "got `bool`"),
    "NaN": (answer(logprobs=content((3, -1), (5, float("nan")), (8, -1))), "is not JSON"),
    "vLLM's -9999": (answer(logprobs=content((3, -1), (5, -9999.0), (8, -1))), "token 1 is -9999.0"),
    "positive": (answer(logprobs=content((3, -1), (5, -1), (8, 0.01))), "token 2 is 0.01"),
    "too large for a float": (answer(logprobs=content((3, -(10**400)), (5, -1), (8, -1))), "out of range"),
    **{
        f"end {reason}": (answer(finish_reason=reason), f"finish_reason {reason!r}: {said}")
        for reason, said in UNFINISHED.items()
    },
    "no log-probs": (answer(logprobs=None), "no log-probs"),
    "another end": (answer(finish_reason="other"), "an unknown finish_reason: 'other'"),
    "stop without one": (answer(finish_reason="stop"), "the last token is 8"),
    "empty versions": (answer(weight_versions=[]), "covers 0 of 3"),
    "versions too short": (answer(weight_versions=spans(("1", 0, 2))), "covers 2 of 3"),
    "versions too long": (answer(weight_versions=spans(("1", 0, 4))), "covers 4 of 3"),
    "a gap": (answer(weight_versions=spans(("1", 0, 1), ("2", 2, 3))), "2 to 3 is no span from 1 on"),
    "an overlap": (answer(weight_versions=spans(("1", 0, 2), ("2", 1, 3))), "1 to 3 is no span from 2"),
    "an empty span": (answer(weight_versions=spans(("1", 0, 0), ("2", 0, 3))), "0 to 0"),
    "version by name": (answer(weight_versions=spans(("v7", 0, 3))), "weight version 'v7'"),
    "version as number": (answer(weight_versions=spans((7, 0, 3))), "weight_versions[0].version`"),
    "negative version": (answer(weight_versions=spans(("-1", 0, 3))), "weight version '-1'"),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage(name: str) -> None:
    garbage, message = GARBAGE[name]
    with pytest.raises(BadAnswer) as raised:
        read(garbage)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("params", "finish_reason", "message"),
    [
        (replace(PARAMS, max_tokens=2), "length", "3 tokens, expected at most 2"),
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
    return [path, *(inner for key, child in children for inner in paths(child, (*path, key)))]


GOOD = good_answer(SEED)
PLACES = [path for path in paths(GOOD) if path]
# A number in place of a number could be a good answer to another question; these cannot.
JUNK = st.sampled_from(
    [None, True, "", "x", [], {}, [[]], {"a": 1}, 10**9, 10**400, 1.5, float("nan"), float("inf"), -(10**6)]
)


@given(st.sampled_from(PLACES), JUNK | st.sampled_from(["delete", "double"]))
def test_what_is_junk_lost_or_doubled_anywhere_is_noticed(path: tuple[Any, ...], junk: object) -> None:
    changed = copy.deepcopy(GOOD)
    *outer, key = path
    inner: Any = reduce(getitem, outer, changed)
    if junk == "double" and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(inner[key]))
    elif junk in ("delete", "double"):
        del inner[key]
    else:
        inner[key] = junk
    with suppress(BadAnswer):
        assert read(changed) == read(GOOD)


def test_no_truncation_is_an_answer() -> None:
    text = json.dumps(GOOD).encode()
    assert parse(b"") is None
    for length in range(1, len(text)):
        for reads in (parse, partial(read_completion, params=PARAMS, prompt_length=2)):
            with pytest.raises(BadAnswer, match="is not JSON"):
                reads(text[:length])


@given(st.binary(max_size=30))
def test_no_bytes_break_the_parser(body: bytes) -> None:
    with pytest.raises(BadAnswer):
        read_completion(body, PARAMS, 2)
    with suppress(BadAnswer):
        parse(body)


def test_hostile_json() -> None:
    for body in (b"[" * 100_000, b"9" * 10_000, b"\xff{}", b'{"error": "\xff"}'):
        with pytest.raises(BadAnswer, match=r"is not JSON|out of range"):
            parse(body)
        with pytest.raises(BadAnswer):
            read_completion(body, PARAMS, 2)


def test_an_error_of_any_depth() -> None:
    """Also where it can just be decoded, and not be shown."""
    for depth in range(2000):
        body = b'{"error": ' + b"[" * depth + b"0" + b"]" * depth + b"}"
        with pytest.raises(BadAnswer, match=r"is an error|is not JSON"):
            read_completion(body, PARAMS, 2)


def prompt_log_probs(*entries: object) -> list[float]:
    """Of tokens 10, 5 and 7, when a server answers so."""
    answer = {"model": "policy", "prompt_logprobs": [None, *entries], "choices": []}
    return read_prompt_log_probs(json.dumps(answer).encode(), [10, 5, 7])


def test_prompt_log_probs() -> None:
    entries = {"5": {"logprob": -6.5, "rank": 2}, "9": {"logprob": -0.1}}, {"7": {"logprob": -1}}
    assert prompt_log_probs(*entries) == [-6.5, -1.0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"5": {"logprob": -1}}], "2 prompt log-probs for 3 tokens"),
        ([{"6": {"logprob": -1}}, {"7": {"logprob": -1}}], "position 1 has no log-prob of token 5"),
        ([None, {"7": {"logprob": -1}}], "position 1 has no log-prob of token 5"),
        ([{"5": {"logprob": -1}}, {"7": {"logprob": -9999.0}}], r"prompt position 2 is -9999\.0"),
    ],
)
def test_bad_prompt_log_probs(entries: list[object], message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        prompt_log_probs(*entries)
