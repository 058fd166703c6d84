"""Pairs of a reference and an answer, equal or different by construction, and how many are graded right.

    python benchmarks/math_pairs.py                                       # `math`, and math-verify alone
    .venv-trl/bin/python benchmarks/math_pairs.py --grader trl        # after its `pip install math-verify`
    .venv-verl/bin/python benchmarks/math_pairs.py --grader verl

A pair is two of fourteen ways to write a number, over 40 orders of magnitude.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction


def integer(value: Fraction) -> str | None:
    """``1234``."""
    return str(value) if value.denominator == 1 else None


def fraction(value: Fraction) -> str:
    r"""``-\frac{3}{4}``."""
    return rf"{'-' * (value < 0)}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def slash(value: Fraction) -> str:
    """``3/4``."""
    return f"{value.numerator}/{value.denominator}"


def decimal(value: Fraction) -> str | None:
    """``0.0075``, if it ends."""
    bottom, places = value.denominator, 0
    while bottom > 1 and places < 30:
        places += 1
        bottom = (value * 10**places).denominator
    if bottom > 1 or places == 0:
        return None
    digits = str(abs(value) * 10**places).rjust(places + 1, "0")
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"


def scientific(value: Fraction) -> str | None:
    r"""``7.5\times 10^{-3}``."""
    exponent, scaled = 0, abs(value)
    while scaled >= 10:
        scaled, exponent = scaled / 10, exponent + 1
    while 0 < scaled < 1:
        scaled, exponent = scaled * 10, exponent - 1
    digits = decimal(scaled) or integer(scaled)
    return None if digits is None else rf"{'-' * (value < 0)}{digits}\times 10^{{{exponent}}}"


def mixed(value: Fraction) -> str | None:
    r"""``2\frac{1}{2}``."""
    whole, rest = divmod(abs(value), 1)
    return (
        rf"{'-' * (value < 0)}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}"
        if whole and rest
        else None
    )


def grouped(separator: str) -> Callable[[Fraction], str | None]:
    """``1,234,567`` with a separator."""
    return lambda value: (
        f"{value.numerator:,}".replace(",", separator)
        if value.denominator == 1 and abs(value) >= 1000
        else None
    )


def repeating(value: Fraction) -> str | None:
    r"""``0.1\overline{6}``."""
    whole, rest = divmod(abs(value), 1)
    digits, seen = "", {}
    while rest and rest not in seen and len(digits) < 12:
        seen[rest] = len(digits)
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    if rest not in seen:
        return None
    return rf"{'-' * (value < 0)}{whole}.{digits[: seen[rest]]}\overline{{{digits[seen[rest] :]}}}"


def with_unit(value: Fraction) -> str | None:
    r"""``5\text{ cm}``, ``5 people``."""
    text = decimal(value) or integer(value) or fraction(value)
    return text + random.Random(str(value)).choice(
        [r"\text{ cm}", " people", r" \text{ m/s}", " dollars", " km/h"]
    )


def power(value: Fraction) -> str | None:
    r"""``\frac{3}{2^{40}}``, ``3 \cdot 2^{40}``."""
    top, bottom, twos = abs(value.numerator), value.denominator, 0
    while bottom % 2 == 0:
        bottom, twos = bottom // 2, twos - 1
    while top and top % 2 == 0:
        top, twos = top // 2, twos + 1
    if abs(twos) < 2 or bottom != 1:
        return None
    sign = "-" * (value < 0)
    return sign + (rf"\frac{{{top}}}{{2^{{{-twos}}}}}" if twos < 0 else rf"{top} \cdot 2^{{{twos}}}")


def root(value: Fraction) -> str:
    r"""``\sqrt{\frac{9}{16}}``."""
    square = value * value
    return rf"{'-' * (value < 0)}\sqrt{{\frac{{{square.numerator}}}{{{square.denominator}}}}}"


def total(value: Fraction) -> str:
    """A sum of two fractions."""
    part = value / 3
    return f"{fraction(part)}+{fraction(value - part)}".replace("+-", "-")


def named(value: Fraction) -> str:
    """``x = 3/4``."""
    return f"x = {decimal(value) or integer(value) or fraction(value)}"


FORMS: list[Callable[[Fraction], str | None]] = [
    *(integer, fraction, slash, decimal, scientific, mixed, grouped(","), grouped(" "), repeating, with_unit),
    *(power, root, total, named),
]
PLAIN = FORMS[:10]
"""Ways to write a reference."""


def pairs(number: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Yield (reference, answer, whether they are equal); half of them are."""
    chance = random.Random(seed)
    for i in range(number):
        equal, value = bool(i % 2), _value(chance)
        other = value if equal else _another(value, chance)
        yield _written(value, PLAIN, chance), _written(other, FORMS, chance), equal


def _value(chance: random.Random) -> Fraction:
    kind = chance.randrange(4)
    sign = chance.choice([1, 1, 1, -1])
    if kind == 0:  # small numbers
        return sign * Fraction(chance.randint(1, 2000), chance.choice([1, 1, 2, 3, 4, 6, 7, 8, 9, 11, 25]))
    if kind == 1:  # powers of ten
        return sign * Fraction(chance.randint(1000, 9_999_999)) * Fraction(10) ** chance.randint(-26, 14)
    if kind == 2:  # powers of two
        return sign * Fraction(2 * chance.randint(0, 50) + 1) * Fraction(2) ** chance.randint(-66, 60)
    return sign * Fraction(chance.randint(1, 10**9), chance.randint(1, 10**6))


def _another(value: Fraction, chance: random.Random) -> Fraction:
    """Another number: a digit, sign, factor, power of ten or side of the fraction is not the same."""
    step = Fraction(1, value.denominator)
    changed = [
        value + step * chance.choice([-1, 1]), -value, 1 / value, value * 2, value / 2, value * 10,
        value / 10, value + 1, value * Fraction(1001, 1000), value * Fraction(99999, 100000), value * value,
        Fraction(value.numerator, value.denominator + 1),
    ]  # fmt: skip
    chance.shuffle(changed)
    # Percentages and what rounds to the same six digits may count as equal.
    return next(
        other for other in changed if other != 0 and other not in (value * 100, value / 100)
        and abs(other - value) > abs(value) / 200_000
    )  # fmt: skip


def _written(value: Fraction, forms: list[Callable[[Fraction], str | None]], chance: random.Random) -> str:
    texts = [text for form in forms if (text := form(value)) is not None and len(text) < 120]
    return chance.choice(texts or [fraction(value)])


def main() -> None:
    """Print the error rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--grader", nargs="*", choices=GRADERS, default=["math", "math-verify"])
    parser.add_argument("--number", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    made = list(pairs(options.number, options.seed))
    for name in options.grader:
        began = time.monotonic()
        verdicts = GRADERS[name](made)
        seconds = time.monotonic() - began
        ones = sum(got and not equal for got, (*_, equal) in zip(verdicts, made, strict=True))
        zeros = sum(not got and equal for got, (*_, equal) in zip(verdicts, made, strict=True))
        shares = (100 * count / (len(made) / 2) for count in (ones, zeros))
        print(
            "{:<12} wrong answers rewarded {:6.2f}%   right ones not {:6.2f}%".format(name, *shares), end=""
        )
        print(f"   {seconds:.0f} s", flush=True)


def ours(made: list[tuple[str, str, bool]]) -> list[bool]:
    """Grade with the reward ``math``."""
    from megatron_fspo.config import Reward
    from megatron_fspo.rewards import Grade, Grader
    from megatron_fspo.types import Completion, Prompt

    done = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", weight_version=0)
    with Grader(Reward(name="math", workers=2, seconds=20.0), max_response_tokens=100) as grader:
        prompts = [Prompt(index=i, token_ids=(1,), text="", answer=gold) for i, (gold, *_) in enumerate(made)]
        asked = [
            grader.submit(prompt, done, rf"\boxed{{{answer}}}")
            for prompt, (_, answer, _) in zip(prompts, made, strict=True)
        ]
        grades = [one.result(600) for one in asked]
    return [isinstance(grade, Grade) and grade.score == 1 for grade in grades]


def math_verify(made: list[tuple[str, str, bool]]) -> list[bool]:
    """Grade with math-verify alone."""
    import math_verify as library

    return [
        bool(library.verify(*(library.parse(rf"\boxed{{{text}}}") for text in (gold, answer))))
        for gold, answer, _ in made
    ]


def trl(made: list[tuple[str, str, bool]]) -> list[bool]:
    """Grade with TRL's ``accuracy_reward``."""
    from trl.rewards import accuracy_reward

    talks = [[{"role": "assistant", "content": rf"\boxed{{{answer}}}"}] for _, answer, _ in made]
    return [bool(one) for one in accuracy_reward(talks, [f"${gold}$" for gold, *_ in made])]


def verl(made: list[tuple[str, str, bool]]) -> list[bool]:
    """Grade with verl's ``math_reward``."""
    from verl.utils.reward_score.math_reward import compute_score

    return [compute_score(rf"\boxed{{{answer}}}", gold) == 1 for gold, answer, _ in made]


GRADERS = {"math": ours, "math-verify": math_verify, "trl": trl, "verl": verl}

if __name__ == "__main__":
    main()
