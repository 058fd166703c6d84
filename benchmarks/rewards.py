"""How fast verdicts come: without algebra, from the worker processes, and from a reward that sleeps.

    python benchmarks/rewards.py

1. Tier 1 of ``math``: extraction, normalisation and comparison, per second of CPU time. The aim is 20,000.
2. Tier 2: the pool on answers that need algebra, as a share of what as many processes do side by side that
   call math-verify and nothing else. The aim is .8. Round by round; the median of the rounds' ratios counts.
3. A function that sleeps, on 1,024 responses: as a multiple of one sleep. The aim is 1.

Rates are printed. What is kept are ratios, since a rate is one machine's.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future, wait
from contextlib import closing
from pathlib import Path
from typing import Any

from machine import ROOT, machine, markdown, options_of
from megatron_fspo.config import Reward
from megatron_fspo.rewards import Grader
from megatron_fspo.rewards.extract import extract, reference
from megatron_fspo.rewards.math import TIER2
from megatron_fspo.rewards.normalise import canonical, compare, form
from megatron_fspo.rewards.pool import KillablePool
from megatron_fspo.types import Completion, Prompt

AIM = 20_000
STOPPED = Completion(token_ids=(1,), log_probs=(-0.1,), finish_reason="stop", weight_version=0)


def sleeper(prompt: Prompt, completion: Completion, response: str) -> float:
    """The reward of part 3."""
    time.sleep(float(response))
    return 1.0


def numbers(count: int) -> list[tuple[str, str]]:
    """(reference, response): what most tasks ask for, in the dress that models give it."""
    random_ = random.Random(1)
    dresses = ("{}", "${}$", "\\text{{{}}}", "{}.", "\\boxed{{{}}}")
    found = []
    for _ in range(count):
        n, d = random_.randrange(1, 1000), random_.randrange(2, 20)
        gold = random_.choice((str(n), f"{n}/{d}", f"{n / 100}"))
        near = random_.choice((gold, str(n + 1), f"\\frac{{{n}}}{{{d}}}", f"{n / 100}0"))
        text = "Let us see: $\\frac{a}{b}$ is what we look for. " * 40
        answer = random_.choice(dresses).format(near)
        found.append((gold, f"{text}So the answer is \\boxed{{{answer}}}."))
    return found


def algebra(count: int) -> list[tuple[str, str]]:
    """(reference, answer), all different, that tier 1 is not sure of."""
    random_ = random.Random(2)
    found = []
    while len(found) < count:
        a, b, c = (random_.randrange(2, 40) for _ in range(3))
        found += [
            (f"\\frac{{\\sqrt{{{a}}}}}{{{b}}}", f"\\sqrt{{{a}}}/{b}"),
            (f"(x+{a})(x-{b})", f"x^2+{a - b}x-{a * b}".replace("+-", "-")),
            (f"{a}\\pi+{c}", f"{c}+{a}\\pi"),
            (f"[{a},{a + b}]", f"[{a},{a + c}]"),
            (f"\\{{{a},{b + 40},{c + 80}\\}}", f"{c + 80},{a},{b + 40}"),
            (f"{a}^{{{b}}}", f"{a}^{{{b}}}+{c}"),
        ]
    random_.shuffle(found)  # so that any part of them is as hard as another
    return found[:count]


def tier1(count: int) -> float:
    """Verdicts per second of CPU time, with extraction and the key of a majority vote."""
    tasks = numbers(count)
    began = time.process_time()
    for gold, response in tasks:
        found = extract(response, "auto")
        assert found is not None
        written = form(found)
        canonical(written)
        if compare(form(reference(gold)), written) is None:
            raise AssertionError(f"{gold} and {found} are for tier 2")
    return count / (time.process_time() - began)


def through_grader(grader: Grader, count: int) -> float:
    """The same, through all that a run calls."""
    tasks = [
        (Prompt(index=0, token_ids=(1,), text="?", answer=gold), response)
        for gold, response in numbers(count)
    ]
    began = time.process_time()
    futures = [grader.submit(prompt, STOPPED, response) for prompt, response in tasks]
    assert all(future.done() for future in futures)
    return count / (time.process_time() - began)


def pool_against_alone(workers: int, count: int, rounds: int) -> list[tuple[float, float]]:
    """(verdicts per second of the pool, of as many processes without one), round by round."""
    command = [sys.executable, str(Path(__file__).with_name("rewards_alone.py"))]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(workers)]
    tasks = algebra(count * (rounds + 1))
    rates = []
    with closing(KillablePool(TIER2, workers=workers, seconds=60.0, memory_gb=1.0)) as pool:
        for number in range(rounds + 1):
            part = tasks[number * count : (number + 1) * count]
            began = time.perf_counter()
            futures: list[Future[Any]] = [pool.submit(gold, answer) for gold, answer in part]
            wait(futures)
            pooled = count / (time.perf_counter() - began)
            assert all(future.exception() is None for future in futures)
            for number, process in enumerate(processes):
                print(json.dumps(part[number::workers]), file=process.stdin, flush=True)
            alone = [float(process.stdout.readline()) for process in processes if process.stdout is not None]
            rates.append((pooled, sum(alone)))
    for process in processes:
        process.communicate()
    return rates[1:]  # the first one warms up


def sleeping(responses: int, seconds: float) -> float:
    """Time for all, as a multiple of one sleep."""
    prompt = Prompt(index=0, token_ids=(1,), text="?", answer="")
    with Grader(Reward(name="rewards:sleeper"), max_response_tokens=10) as grader:
        wait([grader.submit(prompt, STOPPED, "0")])  # its process has started
        began = time.perf_counter()
        futures = [grader.submit(prompt, STOPPED, str(seconds)) for _ in range(responses)]
        wait(futures)
        return (time.perf_counter() - began) / seconds


def measure(workers: int, count: int, repeats: int, seconds: float) -> dict[str, Any]:
    rate = max(tier1(count) for _ in range(repeats))
    with Grader(Reward(name="math", workers=1), max_response_tokens=10) as grader:
        whole = max(through_grader(grader, count) for _ in range(repeats))
    rounds = pool_against_alone(workers, max(6, count // 40), repeats)
    print(f"tier 1: {rate:,.0f}/s; through the grader: {whole:,.0f}/s")
    for pool, without in rounds:
        print(f"tier 2: {pool:,.0f}/s from {workers} workers; from as many processes alone: {without:,.0f}/s")
    return {
        "workers": workers,
        "tier1_of_aim": rate / AIM,
        "grader_of_aim": whole / AIM,
        "pool_of_workers_alone": statistics.median(pool / without for pool, without in rounds),
        "responses": 1024,
        "sleep_of_longest": min(sleeping(1024, seconds) for _ in range(repeats)),
    }


def table(report: dict[str, Any]) -> str:
    """As in docs/rewards.md."""
    rows = [
        ("tier 1, of 20,000 verdicts per second of CPU time", report["tier1_of_aim"]),
        ("the same through `Grader.submit`", report["grader_of_aim"]),
        (
            f"tier 2 from {report['workers']} workers, of {report['workers']} × math-verify alone",
            report["pool_of_workers_alone"],
        ),
        (
            f"{report['responses']:,} responses to a reward that sleeps, of one sleep",
            report["sleep_of_longest"],
        ),
    ]
    return markdown(["", "measured"], [[name, f"{value:.2f}"] for name, value in rows])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--workers", type=int, default=2, help="no more than there are cores")
    parser.add_argument("--count", type=int, default=20_000, help="verdicts of tier 1; of tier 2 a fortieth")
    parser.add_argument(
        "--repeats", type=int, default=5, help="of each; the fastest counts, of tier 2 the median"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="that the reward sleeps")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rewards.json")
    options = parser.parse_args()
    if min(options.count, options.repeats, options.workers) < 1 or options.seconds <= 0:
        parser.error("--count, --repeats, --workers: 1 or more; --seconds: more than 0")
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: no such folder")
    report = {
        "command": "python benchmarks/rewards.py",
        **machine(),
        **measure(options.workers, options.count, options.repeats, options.seconds),
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
