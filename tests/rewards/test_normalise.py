"""Tier 1: what is certain without any algebra."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from answers import code, hostile, pairs
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.rewards.normalise import LONGEST, Sameness, canonical, compare, form, too_much

EQUAL, DIFFERENT, UNSURE = Sameness


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 42),
        ("-42", -42),
        ("− 42", -42),
        ("+42", 42),
        ("007", 7),
        ("1,234,567", 1234567),
        ("1{,}234", 1234),
        ("1\\,234", 1234),
        ("0.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("1.2e5", 120000),
        ("5E-3", Fraction(1, 200)),
        ("1.2\\times 10^{5}", 120000),
        ("-3 \\cdot 10^2", -300),
        ("10^{6}", 10**6),
        ("3/4", Fraction(3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("\\frac{-3}{4}", Fraction(-3, 4)),
        ("\\dfrac34", Fraction(3, 4)),
        ("2\\frac{1}{2}", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        ("$$\\boxed{\\text{42}}$$", 42),
        ("**42.**", 42),
        ("50\\%", 50),
    ],
)
def test_what_is_plainly_a_number(answer: str, value: int | Fraction) -> None:
    number = form(answer).number
    assert number is not None and number.value == value


NOT_NUMBERS = (
    "$|x|5x|5 cm|1 2|1,23|12,34|1/0|2 3/2|2\\frac{-1}{2}|1/2/3|--5|5!|2^{10}|\\sqrt{4}|\\frac{x}{2}|1e999"
)
NOT_NUMBERS += "|٣|²|５|inf|nan|1_000|0x10|12_2|10_1|(5|5)|$5$, $6$|\\text{5}+\\text{6}"


@pytest.mark.parametrize("answer", ["", " ", "9" * 301, *NOT_NUMBERS.split("|")])
def test_what_is_not(answer: str) -> None:
    assert form(answer).number is None


@pytest.mark.parametrize(
    ("gold", "answer", "sameness"),
    [
        ("1/2", "0.5", EQUAL),
        ("1/2", "0.51", DIFFERENT),
        ("1/3", "0.33", DIFFERENT),
        ("1/3", "0.333333", UNSURE),  # rounded, or wrong
        ("3", "3.00001", UNSURE),
        ("1000000007", "1000000008", DIFFERENT),  # close, but nothing is rounded
        ("0", "1e-9", DIFFERENT),
        ("50\\%", "50%", EQUAL),
        ("50%", "40%", DIFFERENT),
        ("50%", "0.5", UNSURE),
        ("50%", "3", UNSURE),
        ("1011_2", "1011_{2}", EQUAL),
        ("1011_2", "1011_3", DIFFERENT),
        ("1011_2", "1011", UNSURE),
        ("x^2", "x ^ 2", EQUAL),
        ("x^2", "x^3", UNSURE),
        ("12", "1 2", UNSURE),
        ("1 2", "12", UNSURE),
        ("(1, 2)", "\\left(1,2\\right)", EQUAL),
        ("Friday", "\\text{friday}.", EQUAL),
        ("Friday", "Monday", UNSURE),
        ("x", "X", UNSURE),
        ("(A)", "\\textbf{A}", EQUAL),
        ("A", "B", UNSURE),
        ("5", "five", UNSURE),
        ("", "", UNSURE),
        ("$", "$", EQUAL),
        ("9" * 20_000, "9" * 20_000, EQUAL),
        ("9" * 20_000, "9" * 20_001, UNSURE),
    ],
)
def test_sameness(gold: str, answer: str, sameness: Sameness) -> None:
    assert compare(gold, answer) is sameness


def test_what_is_certain_is_right() -> None:
    compared = [(gold, answer, compare(gold, answer), right) for gold, answer, right in pairs()]
    # References that are worked solutions are not for tier 1 alone.
    assert [one for one in compared if one[2] is (DIFFERENT if one[3] else EQUAL)] == []
    assert sum(one[2] is not UNSURE for one in compared) > 150


numbers = st.integers(-(10**12), 10**12) | st.fractions(max_denominator=10**6)


@given(numbers, numbers)
def test_fractions_in_any_dress(one: Fraction, other: Fraction) -> None:
    dressed = f"$\\dfrac{{{one.numerator}}}{{{one.denominator}}}$"
    assert compare(str(one), dressed) is EQUAL
    assert compare(dressed, str(other)) is (EQUAL if one == other else DIFFERENT)


pieces = "1 2 0 . , / - % \\% \\frac { } ( ) x A $ \\text{ e ^ \\times 10 _ yes = \\left( \\right)".split()
texts = st.text() | st.lists(st.sampled_from([" ", *pieces]), max_size=12).map("".join)


@given(texts, texts)
def test_equal_answers_share_a_vote(one: str, other: str) -> None:
    if compare(one, other) is EQUAL:
        assert canonical(one) == canonical(other)
    assert compare(one, other) is compare(other, one)
    assert canonical(canonical(one)) == canonical(one) or len(one) > LONGEST


def test_votes() -> None:
    halves = ("1/2", "0.5", "$\\frac12$", "x = 0.50", "\\boxed{.5}")
    assert set(map(canonical, halves)) == {"1/2"}
    assert canonical("Yes.") == canonical("\\text{yes}") == "yes"
    assert canonical("50\\%") == "50%" != canonical("50")
    assert len(canonical("x" * 1_000_000)) < 100


@pytest.mark.parametrize(
    "answer",
    [
        *("e^{x^2}", "2^{2^3}", "x^2+y^2+z^2+w^2", "a^1b^2c^3d^4", "x**2+y**2+z**2+w**2", "10^{100}", "99!"),
        *("\\frac{1}{2}" * 30, "((((1))))", "2^{1000}", "e^{e^{x}}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ],
)
def test_caps_leave_ordinary_answers_alone(answer: str) -> None:
    assert too_much(answer) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("x" * 1001, "more than 1000 characters"),
        ("(" * 33 + ")" * 33, "brackets"),
        ("9" * 301, "digits"),
        ("x^{10000}", "power"),
        ("1e99999", "power"),
        ("10^{10^{10}}", "tower"),
        ("9**9**9**9", "tower"),
        ("x^{y^{z^{w^{2}}}}", "tower"),
        ("99999!", "factorial"),
        ("((9!)!)", "factorial"),
        ("5\x00", "control"),
    ],
)
def test_caps(answer: str, reason: str) -> None:
    assert reason in (too_much(answer) or "")


def test_no_text_takes_long(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("none") / "file"
    nested = [
        "\\text{" * 150 + "}" * 150,
        "$" * 900,
        "1" + ",111" * 200,
        "\\," * 400,
        " " * 999 + "x",
        "^{1" * 300,
    ]
    for answer in [*hostile(file), *code(file), *nested]:
        started = time.process_time()
        compare("5", answer), canonical(answer), too_much(answer)
        assert time.process_time() - started < 0.1, answer[:50]
