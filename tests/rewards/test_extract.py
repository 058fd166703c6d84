"""Where the answer stands."""

from __future__ import annotations

import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.config.reward import Extract
from megatron_fspo.rewards.extract import LONGEST, after_thinking, extract, reference

RULES = get_args(Extract)
MARKS = ["\\boxed{", "}", "{", "\\", "Answer:", "answer", "####", "\n", "7", ",", ".", "-", " ", "x", "*"]


@pytest.mark.parametrize(
    ("rule", "response", "found"),
    [
        ("boxed", "so \\boxed{4} then \\boxed{5}", "5"),
        ("boxed", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("boxed", "\\boxed {7}", "7"),
        ("boxed", "\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("boxed", "\\boxed{\\left\\{1,2\\right.}", "\\left\\{1,2\\right."),
        ("boxed", "\\boxed{a\\\\{b}}", "a\\\\{b}"),
        ("boxed", "\\boxed{\\boxed{5}}", "5"),
        ("boxed", "\\boxed{\\frac{1}{2}} and cut \\boxed{3", "\\frac{1}{2}"),
        ("boxed", "\\boxed{}", None),
        ("boxed", "\\boxed 5.", "5"),
        ("boxed", "Answer: 5", None),
        ("answer_line", "Answer: 5", "5"),
        ("answer_line", "Answer: 4\nno\nAnswer: $5$ \n", "$5$"),
        ("answer_line", "**Final Answer:** 42.", "42."),
        ("answer_line", "**Answer**: **42**", "42"),
        ("answer_line", "ANSWER: 7", "7"),
        ("answer_line", "the answer : 7", "7"),
        ("answer_line", "Answer：7", "7"),
        ("answer_line", "Answer:\n\n  9\nthanks", "9"),
        ("answer_line", "my danswer: 9", None),
        ("answer_line", "the answer is 9", None),
        ("hashes", "3 + 4\n#### 7\n", "7"),
        ("hashes", "#### 7\n#### 8", "8"),
        ("hashes", "### 7", None),
        ("last_number", "it is 3, 4 and 1 2", "2"),
        ("last_number", "so 5 - 3", "3"),
        ("last_number", "so (2)-5", "5"),
        ("last_number", "so x = -5.", "-5"),
        ("last_number", "1,234,567.5 dollars", "1,234,567.5"),
        ("last_number", "about 1.5e-3 or 3/4.", "3/4"),
        ("last_number", "x2 has no number of its own", None),
        ("last_number", "7" + " and no more" * 1000, "7"),
        ("whole", " 5 apples\n", "5 apples"),
        ("whole", " \n", None),
        ("auto", "Answer: 4, #### 5, \\boxed{6}", "6"),
        ("auto", "#### 5\nAnswer: 4", "4"),
        ("auto", "\\boxed{} #### 5", "5"),
        ("boxed", "\\boxed{2} and $\\fbox{3}$.", "2, 3"),
        ("boxed", "\\boxed{2}, so \\boxed{3}", "3"),
        ("boxed", "\\boxed{3}, \\boxed{3}", "3"),
        ("auto", "it is 7", None),
        *((rule, "", None) for rule in RULES),
    ],
)
def test_a_rule_finds_the_last_answer_of_its_kind(rule: str, response: str, found: str | None) -> None:
    assert extract(response, rule) == found


@given(
    rule=st.sampled_from(RULES),
    response=st.text() | st.lists(st.sampled_from(MARKS), max_size=30).map("".join),
)
def test_any_text_will_do_and_what_is_found_stands_there(rule: str, response: str) -> None:
    found = extract(response, rule)
    assert found is None or (found and found == found.strip())
    assert found is None or found in response or all(part in response for part in found.split(", "))


@pytest.mark.parametrize(
    ("prompt", "response", "final"),
    [
        ("", "5", "5"),
        ("", "<think>5</think> 6", " 6"),
        ("", "<think>5</think> 6 </think> 7", " 7"),
        ("", "<think>5", ""),
        ("<think>a</think>", "5", "5"),
        ("<|assistant|><think>\n", "5", ""),
        ("<|assistant|><think>\n", "5</think>6", "6"),
        ("<|assistant|><think>\n\n</think>", "5", "5"),
    ],
)
def test_the_answer_stands_after_thinking(prompt: str, response: str, final: str) -> None:
    assert after_thinking(prompt, response, "</think>") == final
    assert after_thinking(prompt, response, "") == response
    other = after_thinking(prompt, response.replace("think>", "THINK>"), "</think>")
    assert other == ("" if prompt.endswith("<think>\n") else response.replace("think>", "THINK>"))


@pytest.mark.parametrize(
    "text", ["\\boxed{", "{", "}", "Answer:", "nswer", "#### ", "9", "1,", "1 ", "-", "\\", "9,999"]
)
def test_a_megabyte_takes_no_time(text: str) -> None:
    for start in ("", "\\boxed{", "Answer:"):
        response = start + text * (1_000_000 // len(text))
        for rule in RULES:
            started = time.process_time()
            found = extract(response, rule)
            assert time.process_time() - started < 0.5
            assert found is None or rule == "whole" or len(found) <= LONGEST


@pytest.mark.parametrize(
    ("rule", "opening"), [("boxed", "\\boxed{"), ("answer_line", "Answer: "), ("hashes", "####")]
)
def test_the_longest_answer(rule: str, opening: str) -> None:
    assert extract(opening + "7" * LONGEST + "}", rule) is None or rule == "boxed"
    assert extract(opening + "7" * (LONGEST - 1) + "}", rule) is not None
    assert extract(opening + "7" * (LONGEST + 1) + "}", rule) is None


def test_all_boxes_together_and_those_without_braces_have_the_same_limit() -> None:
    several = [f"\\boxed{{{digit * (LONGEST // 3)}}}" for digit in "1234"]
    assert len(extract(", ".join(several[:2]), "boxed") or "") == 2 * (LONGEST // 3) + 2
    assert extract(", ".join(several), "boxed") is None
    assert extract("\\boxed " + "7" * LONGEST, "boxed") == "7" * LONGEST
    assert extract("\\boxed " + "7" * (LONGEST + 1), "boxed") is None


def test_the_reference_may_be_a_worked_solution() -> None:
    answers = [" 5\n", "so\n#### 12", "thus $\\boxed{\\frac79}$.", "Answer: 5"]
    assert list(map(reference, answers)) == ["5", "12", "\\frac79", "Answer: 5"]
