"""Tier 1: what is certain without any algebra."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from answers import code, hostile
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.rewards.normalise import LONGEST, canonical, compare, form, too_much

EQUAL, DIFFERENT, UNSURE = True, False, None


def same(gold: str, answer: str) -> bool | None:
    return compare(form(gold), form(answer))


def vote(answer: str) -> str:
    return canonical(form(answer))


NUMBERS = {
    42: "42|+42|$$\\boxed{\\text{42}}$$|**42.**|042",
    -42: "-42|− 42",
    1234567: "1,234,567|1{,}234{,}567|1\\,234\\,567|1 234 567|1\\ 234\\ 567|12,34,567"
    "|1\u202f234\u00a0567|1.234.567,00",
    Fraction(1, 3): "0.\\overline{3}|0.\\bar 3|.\\dot{3}|0.333...|0.333333\\ldots|0.(3)|0.\\overline{33}",
    Fraction(-4, 11): "-0.\\overline{36}|-0.3636…",
    Fraction(1, 7): "0.\\dot{1}4285\\dot{7}|0.(142857)|0.142857142857...",
    Fraction(1, 6): "0.1\\overline{6}|0.1\\overline{66}|0.1666\\dots",
    18: "18 dollars|18 miles per hour|18 km/h|18\\text{ people}|18 (units)|18\\mathrm{ cm}^2|18.0 m/s",
    Fraction(16, 10**20): "1.6\\times10^{-19}\\text{ C}|1.6 × 10^{-19} C|1.6*10^-19",
    Fraction(1, 2): "0.50|.5|1/2|\\frac{1}{2}|\\dfrac12|5\\times10^{-1}|5E-1",
    Fraction(-3, 4): "-\\frac{3}{4}|\\frac{-3}{4}|-3/4",
    Fraction(5, 2): "2\\frac{1}{2}|2 1/2",
    Fraction(-5, 2): "-2 1/2",
    5: "5.",
    120000: "1.2e5|1.2\\times 10^{5}",
    -300: "-3 \\cdot 10^2",
    10**6: "10^{6}",
    50: "50\\%",
}


@pytest.mark.parametrize(("value", "answers"), NUMBERS.items())
def test_what_is_plainly_a_number(value: int | Fraction, answers: str) -> None:
    for answer in answers.split("|"):
        number = form(answer).number
        assert number is not None and number.value == value, answer


NOT_NUMBERS = (
    "$|x|5x|5xy|5 xy|5 or 6|5 million|5 is wrong|5\\text{ is wrong}"
    "|1 2|1,23|12,34|1/0|2 3/2|2\\frac{-1}{2}|1/2/3|--5|5!|2^{10}|\\sqrt{4}|\\frac{x}{2}|1e999"
)
NOT_NUMBERS += "|٣|²|５|inf|nan|1_000|0x10|12_2|10_1|(5|5)|$5$, $6$|\\text{5}+\\text{6}"


@pytest.mark.parametrize("answer", ["", " ", "9" * 301, *NOT_NUMBERS.split("|")])
def test_what_is_not(answer: str) -> None:
    assert form(answer).number is None


PAIRS = {
    EQUAL: "1/2 & 0.5|50\\% & 50%|1011_2 & 1011_{2}|x^2 & x ^ 2|(1, 2) & \\left(1,2\\right)|$ & $"
    "|Friday & \\text{friday}.|(A) & \\textbf{A}|ABD & A, B and D|5 cm & 5.0",
    # 1000000008 is close, but nothing is rounded
    DIFFERENT: "1/2 & 0.51|1/3 & 0.33|3 & 3.00001|1/3 & 0.333334|1.602176634e-19 & 1.602176635e-19"
    "|2019-05-04 & 2010|AB & A, C|1000000007 & 1000000008|0 & 1e-9|50% & 40%|1011_2 & 1011_3",
    # 0.333333 is rounded, or wrong
    UNSURE: "1/3 & 0.333333|1.60218e-19 & 1.602176634e-19|0.3 & 0.30000000000000004"
    "|50% & 0.5|50% & 3|1011_2 & 1011|x^2 & x^3|12 & 1 2|1 2 & 12"
    "|Friday & Monday|x & X|A & B|5 & five| & ",
}


@pytest.mark.parametrize(("sameness", "pairs"), PAIRS.items())
def test_same(sameness: bool | None, pairs: str) -> None:
    for gold, answer in (pair.split(" & ") for pair in pairs.split("|")):
        assert same(gold, answer) is sameness, (gold, answer)
    assert same("9" * 20_000, "9" * 20_000) is EQUAL and same("9" * 20_000, "9" * 20_001) is UNSURE


numbers = st.integers(-(10**12), 10**12) | st.fractions(max_denominator=10**6)


@given(numbers, numbers)
def test_fractions_in_any_dress(one: Fraction, other: Fraction) -> None:
    dressed = f"$\\dfrac{{{one.numerator}}}{{{one.denominator}}}$"
    assert same(str(one), dressed) is EQUAL
    assert same(dressed, str(other)) is (EQUAL if one == other else DIFFERENT)


pieces = "1 2 0 . , / - % \\% \\frac { } ( ) x A $ \\text{ e ^ \\times 10 _ yes = \\left( \\right)".split()
texts = st.text() | st.lists(st.sampled_from([" ", *pieces]), max_size=12).map("".join)


@given(texts, texts)
def test_equal_answers_share_a_vote(one: str, other: str) -> None:
    if same(one, other) is EQUAL:
        assert vote(one) == vote(other)
    assert same(one, other) is same(other, one)
    assert vote(vote(one)) == vote(one) or len(one) > LONGEST


def test_votes() -> None:
    halves = ("1/2", "0.5", "$\\frac12$", "x = 0.50", "\\boxed{.5}")
    assert set(map(vote, halves)) == {"1/2"}
    assert vote("Yes.") == vote("\\text{yes}") == "yes"
    assert vote("50\\%") == "50%" != vote("50")
    assert len(vote("x" * 1_000_000)) < 100


ORDINARY = "e^{x^2}|2^{2^3}|x^2+y^2+z^2+w^2|a^1b^2c^3d^4|x**2+y**2+z**2+w**2|10^{100}|99!|((((1))))|2^{1000}"
HOSTILE = "x^{10000}|1e99999|10^{10^{10}}|9**9**9**9|x^{y^{z^{w^{2}}}}|99999!|((9!)!)|5\x00"


@pytest.mark.parametrize("answer", [*ORDINARY.split("|"), "e^{e^{x}}", "\\frac{1}{2}" * 30])
def test_ordinary_answers_are_not_too_much(answer: str) -> None:
    assert not too_much(answer)


@pytest.mark.parametrize("answer", [*HOSTILE.split("|"), "x" * 1001, "(" * 33 + ")" * 33, "9" * 301])
def test_what_is_too_much_for_algebra(answer: str) -> None:
    assert too_much(answer)


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
        same("5", answer), vote(answer), too_much(answer)
        assert time.process_time() - started < 0.1, answer[:50]
