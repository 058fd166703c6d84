"""Make the data of examples/qwen3_8b from public files, without unusable or overlapping prompts.

    python examples/qwen3_8b/prepare.py --train dapo-math-17k.parquet --math500 test.jsonl \\
        --amc23 amc23.parquet --aime24 aime24.parquet --aime25 aime25.jsonl --out data

README.md lists the data sets and how to get them. Writes train.jsonl and a file per evaluation set, with
``prompt`` (the question without instructions, which the run's template adds), ``answer`` and ``id``; and
left_out.jsonl, with the removed training prompts and the reasons. Uses no network.

A training prompt overlaps an evaluation prompt if they share 30 consecutive words and numbers (or all, if one
is shorter), ignoring spacing, LaTeX commands and punctuation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fspo.cli.console import exit_status
from megatron_fspo.config.data import TEMPLATES, Data, DataSet, PresetName
from megatron_fspo.data.check import examine
from megatron_fspo.data.rows import read_rows
from megatron_fspo.data.tasks import Source, Task, gradable, make_source, read_task
from megatron_fspo.errors import InputError
from megatron_fspo.rewards.extract import extract, reference
from megatron_fspo.rewards.normalise import compare, form

RUN = 30
"""Consecutive words and numbers that different problems do not share. The usual closing sentence of a
competition problem ("... where m and n are relatively prime positive integers. Find m + n") has 20."""


@dataclass(frozen=True)
class Wanted:
    """Expected contents of a public file."""

    preset: PresetName
    counts: tuple[int, int]
    """Smallest and largest number of different prompts."""


WANTED = {
    "train": Wanted("dapo", (17_000, 18_000)),  # each about a hundred times: 1.79 million rows
    "math500": Wanted("math500", (500, 500)),
    "amc23": Wanted("amc", (40, 40)),
    "aime24": Wanted("aime", (30, 30)),
    "aime25": Wanted("aime", (30, 30)),
}


@dataclass(kw_only=True)
class Prepared:
    rows: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    """Removed prompts, with ``why``; excludes rows that only repeat an earlier one."""
    repeated: int = 0

    def leave_out(self, row: dict[str, Any], why: str) -> None:
        self.left_out.append({"why": why, **row})


def prepare(name: str, file: Path, *, any_count: bool = False) -> Prepared:
    """Read a public file; keep one copy of each prompt that can be graded and has a single answer. Raises
    ``InputError`` if fields, instruction or number of prompts are not as expected."""
    wanted = WANTED[name]
    data = Data(train=file, preset=wanted.preset, chat_template=False)
    source = make_source(data, DataSet(file=file, prompt_key=_question_key(file, wanted.preset)))
    found = Prepared()
    firsts: dict[str, tuple[Task, list[str]]] = {}
    for row in read_rows(file, (source.prompt_key, source.answer_key)):
        found.rows += 1
        task = read_task(row, source)
        _, answers = firsts.setdefault(question(task, source), (task, []))
        if task.answer in answers:
            found.repeated += 1
        else:
            answers.append(task.answer)
    for text, (task, answers) in firsts.items():
        one = {"prompt": text, "answer": task.answer, "id": _identity(task, name)}
        if len(answers) > 1:
            found.leave_out(one, f"has the answers {', '.join(map(repr, answers))}")
        elif not can_be_right(task.answer):
            found.leave_out(one, f"has the answer {task.answer[:40]!r}: no response can be graded as right")
        else:
            found.kept.append(one)
    least, most = wanted.counts
    if not any_count and not least <= len(firsts) <= most:
        expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        raise InputError(
            f"{file}: {len(firsts):,} different prompts in {found.rows:,} rows, but {name} has {expected}: "
            "a wrong or truncated file? --any-count accepts it"
        )
    return found


def _question_key(file: Path, preset: PresetName) -> str | None:
    """Return the key of the question in the first row, if it is not the preset's."""
    if preset == "dapo":
        return None
    first = next(read_rows(file), None)
    tree = first.tree() if first else {}
    return "question" if "problem" not in tree and "question" in tree else None


def question(task: Task, source: Source) -> str:
    """Return the question without DAPO's instruction, which all prompts of its file have."""
    text = str(task.messages[-1]["content"])
    if source.prompt_key != "prompt":
        return text.strip()
    before, _, after = (part.strip() for part in TEMPLATES["dapo"].partition("{prompt}"))
    bare = text.strip().removeprefix(before).removesuffix(after).strip()
    if len(bare) + len(before) + len(after) > len(text.strip()) or not bare:
        task.row.fail(f"{source.prompt_key!r} has no question between DAPO's instructions")
    return bare


def _identity(task: Task, name: str) -> str:
    extra = task.fields.get("extra_info")
    given = extra.get("index") if isinstance(extra, dict) else task.fields.get("id")
    return str(given if given is not None else task.fields.get("unique_id", f"{name}/{task.question.hex()}"))


def can_be_right(answer: str) -> bool:
    """Return True if the reward ``math`` can read the answer and accepts a response that ends with it."""
    given = extract(f"So it follows.\nAnswer: {answer}", "auto")
    if given is None or not gradable(answer):
        return False
    return compare(form(reference(answer)), form(given)) is not False


def words(text: str) -> tuple[str, ...]:
    """Return words and numbers of a problem, without LaTeX commands, spacing and punctuation."""
    bare = re.sub(r"\\(?:left|right|text|mathrm|displaystyle|dfrac|tfrac|frac|[,;!:> ])", " ", text)
    return tuple(re.findall(r"[^\W\d_]+|\d+", bare.lower()))


def without_overlap(train: Prepared, held_out: dict[str, Prepared]) -> Counter[str]:
    """Move training prompts that overlap an evaluation set to ``left_out``; return their number by set."""
    owners: dict[tuple[str, ...], str] = {}
    for name, one in held_out.items():
        for row in one.kept:
            for run in _runs(words(row["prompt"]), RUN):
                owners.setdefault(run, f"{name} {row['id']}")
    sizes = sorted({len(run) for run in owners})
    counts: Counter[str] = Counter()
    staying = []
    for row in train.kept:
        mine = words(row["prompt"])
        own = {run for size in sizes if size >= 8 for run in _runs(mine, size)} | {mine}
        shared = next((owners[run] for run in own if run in owners), None)
        if shared is None:
            staying.append(row)
            continue
        counts[shared.partition(" ")[0]] += 1
        train.leave_out(row, f"is in {shared}")
    train.kept = staying
    return counts


def _runs(tokens: tuple[str, ...], size: int) -> set[tuple[str, ...]]:
    """Return all runs of ``size`` consecutive tokens, or of all tokens if there are fewer."""
    return {tokens[start : start + size] for start in range(max(len(tokens) - size, 0) + 1)}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def run(args: argparse.Namespace) -> int:
    """Prepare all files, print how many rows were left out, and check the results as a run would."""
    found = {name: prepare(name, getattr(args, name), any_count=args.any_count) for name in WANTED}
    held_out = {name: one for name, one in found.items() if name != "train"}
    for name, one in held_out.items():
        if one.left_out:
            first = one.left_out[0]
            raise InputError(
                f"{getattr(args, name)}: {len(one.left_out)} problems cannot be evaluated; "
                f"{first['id']} {first['why']}"
            )
    overlap = without_overlap(found["train"], held_out)
    if not found["train"].kept:
        raise InputError(f"{args.train}: no prompt is left")
    args.out.mkdir(parents=True, exist_ok=True)
    for name, one in found.items():
        path = args.out / f"{name}.jsonl"
        write(path, one.kept)
        checked = examine(make_source(Data(train=path), DataSet(file=path)), None, 1)
        if not checked.fine:
            raise InputError(f"{path}: {', '.join(checked.conflicts[:1] or ['a run would refuse it'])}")
        print(
            f"{name:<8} {one.rows:>9,} rows  {one.repeated:>9,} repeated  {len(one.left_out):>5,} left out  "
            f"{len(one.kept):>6,} prompts  {path}"
        )
    write(args.out / "left_out.jsonl", found["train"].left_out)
    told = ", ".join(f"{overlap[name]} of {name}" for name in held_out)
    print(f"left out of training because an evaluation set has them: {told}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status 2, with a one-line message, if a file is not as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in WANTED:
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--out", type=Path, default=Path("data"), metavar="DIR", help="output folder (default: %(default)s)"
    )
    parser.add_argument("--any-count", action="store_true", help="accept files with other numbers of prompts")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args), "prepare.py")


if __name__ == "__main__":
    sys.exit(main())
