"""Answers for the tests: ordinary ones, right and wrong, and such as hang, eat memory or try to run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_fspo.rewards import Failure, Grade
from megatron_fspo.types import Completion, Prompt

STOPPED = Completion(token_ids=(12,), log_probs=(-0.1,), finish_reason="stop", weight_version=0)


def pairs() -> list[tuple[str, str, bool]]:
    """(reference, answer, whether it is right)."""
    text = Path(__file__).with_name("pairs.jsonl").read_text(encoding="utf-8")
    return [
        (row["gold"], answer, right)
        for row in map(json.loads, text.splitlines())
        for right in (True, False)
        for answer in row["right" if right else "wrong"]
    ]


def prompt(answer: str, index: int = 0, fields: Mapping[str, Any] | None = None) -> Prompt:
    return Prompt(index=index, token_ids=(10,), text="?", answer=answer, fields=fields or {})


def graded(future: Future[Grade | Failure]) -> Grade:
    found = future.result(timeout=120)
    assert isinstance(found, Grade), found
    return found


def boxed(answer: str) -> str:
    """A response that ends in an answer."""
    return f"Let us see. With $n = 3$, so the answer is \\boxed{{{answer}}}."


def code(file: Path) -> list[str]:
    """Texts that write the file where somebody evaluates them."""
    plain = f"__import__('os').system('touch {file}')"
    dressed = '{0}|\\text{{{0}}}|[{0}]|(1, {0})|1 + {0}|lambda: {0}|eval("{0}")|exec("{0}")'
    return [
        *dressed.format(plain).split("|"),
        f"open('{file}', 'w').write('x')",
        f"().__class__.__base__.__subclasses__()[-1].__init__.__globals__ or {plain}",
        f"__import__('pathlib').Path('{file}').touch()",
        f"__import__('subprocess').run(['touch', '{file}'])",
        f"\\immediate\\write18{{touch {file}}}",
        f"`touch {file}`",
        f"$(touch {file})",
        f"x; import os; os.system('touch {file}')",
    ]


POWERS = (
    "10^{10^{10}} 9^{9^{9^{9}}} 9**9**9**9 2^{2^{2^{2^{2^{2}}}}} 10^{1000000} x^{1000000} (x+1)^{99999} "
    "(x+y+z)^{999} 7^{123456789} \\left(10^{9999}\\right)^{9999}"
)
FACTORIALS = (
    "100000000! ((9!)!)! 9999!!! (10^{8})! \\binom{1000000000}{500000000} \\Gamma(10^{9}) "
    "\\prod_{i=1}^{10^9}(x+i) \\sum_{i=1}^{\\infty}\\frac{\\sin(i^i)}{i!} \\log_{2}(3^{9999^{9999}})"
)
ENDLESS = (
    "\\sum_{i=1}^{10^{12}} i!|\\sum_{k=1}^{9999999} \\frac{1}{k^k}|\\int_0^1 e^{e^{e^{x}}} \\, dx|"
    "\\int \\sin(\\sin(\\sin(x^{x}))) dx|\\lim_{n\\to\\infty} n^{n^{n}}"
)


def hostile(file: Path) -> list[str]:
    """60 answers, and a few more, that nobody should work with."""
    return [
        *(*POWERS.split(), *FACTORIALS.split(), *ENDLESS.split("|")),
        # nesting
        *("(" * 3000 + "1" + ")" * 3000, "{" * 5000, "\\frac{1}{" * 300 + "2" + "}" * 300, "\\sqrt{" * 500),
        *("[" * 2000 + "]" * 2000, "\\left(" * 200 + "1" + "\\right)" * 200, "1+(" * 30 + "1" + ")" * 30),
        *("\\frac{x}{" * 30 + "1" + "}" * 30, "|" * 200, "\\boxed{" * 100),
        # length
        *("9" * 20_000, "1+" * 5_000 + "1", "x" * 1_000_000, "\\frac{1}{2}" * 90, "a,b," * 240),
        *("0." + "3" * 20_000, "1e999999999", "12," * 300, "\\sqrt{2}+" * 99 + "1"),
        # what is no text
        *("\x00\x01\x02\x1b[31m", "\ud800\udfff", "\u202e5\u202c", "٣٤٥", "\r\n" * 100, "\\" * 999),
        *code(file),
    ]
