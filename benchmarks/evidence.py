"""What docs/evidence.md says, measured again: sweeps of the real trainer (`make evidence`).

    python benchmarks/evidence.py                    # all parts; some hours on two cores
    python benchmarks/evidence.py bands              # one of them, an hour at most
    python benchmarks/evidence.py bands --seeds 1 2 3 4    # half of its runs; then the others
    python benchmarks/evidence.py --short            # two runs of five small steps: the machinery only

A part is a sweep of ``benchmarks/evidence/``; its first run says how long the others will take, and a run
that is there is not made again. Figures go to ``benchmarks/results/evidence_<part>.json`` and the records of
``KEPT`` to a ``.npz`` (the others' are too large), from which docs/fairness.svg is drawn for the ledger; of
``COUNTED``, the records of the first seed and counts by step of all. `make docs` writes the page from these
files.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from machine import ROOT, cpu, options_of
from megatron_fspo.evaluation.intervals import t_half_width
from megatron_fspo.lab.report.history import History, Records
from megatron_fspo.lab.sweep.file import Sweep, planned, read_sweep
from megatron_fspo.lab.sweep.processes import make
from megatron_fspo.lab.sweep.summary import as_json, compared, mean_over_seeds, summarize
from megatron_fspo.objective.band import DEFAULT_C
from megatron_fspo.objective.fairness import length_bins

sys.path.append(str(ROOT / "docs"))
from dark import for_dark

PARTS = ("bands", "widths", "losses", "ledger", "ledger_growth", "words", "words_fresh", "words_bf16")
PARTS += ("filler_certain", "filler_uncertain")
KEPT = ("ledger", "ledger_growth")
COUNTED = ("filler_certain", "filler_uncertain")
PROGRAMS = {"random": ("benchmarks/ledger/random_clip.py", "sqrt")}
"""Arm → words after ``python``, of one that is no run of ``megatron-fspo train``."""
LOOKS = {
    "sqrt": ("√L (FSPO)", "#0072b2", "o"),
    "constant": ("constant (as RLOO)", "#d55e00", "s"),
    "linear": ("L (as GSPO)", "#009e73", "v"),
}
"""Arm → label, colour (Okabe and Ito's) and marker."""
SHORT = "--run.steps 5 --rollout.prompts 12 --evaluation.every 5 --evaluation.samples 4".split()


def shortened(sweep: Sweep, folder: Path) -> Sweep:
    """Two arms and one seed."""
    arms = {arm: keys for arm, keys in sweep.arms.items() if arm in ("sqrt", "constant")}
    words = (*SHORT, "--optimizer.warmup-steps", "0")
    return sweep.model_copy(update={"folder": folder, "seeds": (1,), "arms": arms, "words": words})


def measured(sweep: Sweep) -> dict[str, Any]:
    """The summary of its runs, and rates over lengths that all runs have in common."""
    found = summarize(sweep)
    runs = list(planned(sweep))
    for figures, run in zip(found["runs"], runs, strict=True):
        records = compared(sweep, run)
        quarters = np.array_split(np.unique(records.step), 4)
        first, last = (
            records.select(np.isin(records.step, steps) & (records.advantage != 0))
            for steps in (quarters[0], quarters[-1])
        )
        figures["clipped_more"] = float(last.clipped.mean() - first.clipped.mean())
    for arm, means in found["arms"].items():
        mine = [figures["clipped_more"] for figures in found["runs"] if figures["arm"] == arm]
        means["clipped_more"] = mean_over_seeds(mine)
    for column, name in (("out_of_band", "rates"), ("clipped", "clipped_rates")):
        found["lengths"], rates = rates_by_length([compared(sweep, run) for run in runs], column)
        for arm in sweep.arms:
            mine = [rate for run, rate in zip(runs, rates, strict=True) if run.arm == arm]
            found["arms"][arm][name] = [mean_over_seeds(one) for one in np.transpose(mine).tolist()]
    return found


def keep(sweep: Sweep, path: Path) -> None:
    """The records behind the figures of clipping, of every run: so that anybody can compute them again
    (recompute.py)."""
    runs = [(run, compared(sweep, run)) for run in planned(sweep)]
    kinds = {"step": "i2", "update": "i1", "prompt": "i2", "length": "i2", "log_ratio_sum": "f4"}
    kinds |= {"advantage": "f4", "clipped": "?", "out_of_band": "?"}
    columns = {
        name: np.concatenate([getattr(records, name) for _, records in runs]).astype(kind)
        for name, kind in kinds.items()
    }
    sizes = [len(records) for _, records in runs]
    np.savez_compressed(
        path,
        arm=np.repeat([run.arm for run, _ in runs], sizes),
        seed=np.repeat([run.seed for run, _ in runs], sizes).astype("i2"),
        **columns,
    )


COUNTS = ("length", "judged", "clipped", "spread", "c")


def keep_counts(sweep: Sweep, path: Path) -> None:
    """Of every run and step behind the figures of clipping, ``COUNTS``: mean length, how many records with
    A ≠ 0 there are, how many of them were clipped, the root mean square of S, and the c in use; and all
    records of the first seed (recompute.py)."""
    rows: list[list[float]] = []
    runs = list(planned(sweep))
    for number, run in enumerate(runs):
        records = compared(sweep, run)
        series = History(sweep.folder / run.name).series("fspo/c_high")
        width = {0: DEFAULT_C} | dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
        for step in np.unique(records.step).tolist():
            mine = records.select(records.step == step)
            judged = mine.select(mine.advantage != 0)
            spread = float(np.sqrt(np.mean(mine.log_ratio_sum**2)))
            counts = [mine.length.mean(), len(judged), judged.clipped.sum(), spread, width[step - 1]]
            rows.append([number, step, *counts])
    columns = dict(zip(("run", "step", *COUNTS), np.transpose(rows), strict=True))
    of_run = {name: column.astype("f8" if name in COUNTS else "i2") for name, column in columns.items()}
    first = sweep.model_copy(update={"seeds": sweep.seeds[:1]})
    keep(first, path)
    with np.load(path) as file:
        of_first = {f"first/{name}": file[name] for name in file.files}
    arms, seeds = ([getattr(run, name) for run in runs] for name in ("arm", "seed"))
    np.savez_compressed(path, arms=arms, seeds=seeds, **of_run, **of_first)


def rates_by_length(runs: Sequence[Records], column: str) -> tuple[list[float], list[list[float]]]:
    """Mean length of each of 8 length bins of all records with A ≠ 0 in which every run has some, and each
    run's rates of the column there."""
    runs = [run.select(run.advantage != 0) for run in runs]
    lengths = torch.cat([torch.from_numpy(run.length) for run in runs])
    bins = length_bins(lengths, 8).numpy()
    parts = np.split(bins, np.cumsum([len(run) for run in runs])[:-1])
    common = [number for number in np.unique(bins) if all((part == number).any() for part in parts)]
    means = [float(lengths.numpy()[bins == number].mean()) for number in common]
    rates = [
        [float(getattr(run, column)[part == number].mean()) for number in common]
        for part, run in zip(parts, runs, strict=True)
    ]
    return means, rates


def draw(records: Path, path: Path) -> None:
    """Share clipped against response length, for either sign of A, with its interval over seeds."""
    with np.load(records) as file:
        judged = file["advantage"] != 0
        column = {name: file[name][judged] for name in ("arm", "seed", "length", "advantage", "clipped")}
    bins = length_bins(torch.from_numpy(column["length"].astype("i8")), 8).numpy()
    lengths = [column["length"][bins == number].mean() for number in np.unique(bins)]
    with rc_context({"svg.hashsalt": "evidence", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8.2, 3.7), layout="constrained", facecolor="white")
        signs = {"A > 0": column["advantage"] > 0, "A < 0": column["advantage"] < 0}
        for axes, (title, of_sign) in zip(figure.subplots(1, 2, sharey=True), signs.items(), strict=True):
            for arm in (arm for arm in LOOKS if arm in column["arm"]):
                label, colour, marker = LOOKS[arm]
                own = of_sign & (column["arm"] == arm)
                rates = [
                    [
                        float(column["clipped"][own & (bins == number) & (column["seed"] == seed)].mean())
                        for seed in np.unique(column["seed"])
                    ]
                    for number in np.unique(bins)
                ]
                mean, reach = np.mean(rates, 1), np.array([t_half_width(row) for row in rates])
                axes.fill_between(lengths, mean - reach, mean + reach, color=colour, alpha=0.13, lw=0)
                axes.plot(lengths, mean, color=colour, marker=marker, ms=5, lw=2.2, label=label)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel="response length L (tokens)", title=title)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        figure.axes[0].set(ylabel="share clipped", ylim=(0, None))
        shown = figure.axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside upper center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None})
    path.write_text(for_dark(path.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Measure the parts that were asked for; write their files."""
    parser = options_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", help="make these runs only; figures are for all")
    parser.add_argument("--short", action="store_true", help="check the machinery; nothing is kept")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    os.chdir(ROOT)
    folders = (ROOT, ROOT / "benchmarks", ROOT / "benchmarks/ledger")  # rewards, and this package
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    facts = {"cpu": cpu()} | {name: version(name) for name in ("torch", "megatron-core")}
    results = Path(tempfile.mkdtemp()) if args.short else ROOT / "benchmarks/results"
    for part in args.parts or (PARTS[:1] if args.short else PARTS):
        sweep = read_sweep(ROOT / f"benchmarks/evidence/{part}.toml")
        if args.short:
            sweep = shortened(sweep, results / part)
        if args.seeds and not set(args.seeds) <= set(sweep.seeds):
            parser.error(f"--seeds: {part} has {', '.join(map(str, sweep.seeds))}")
        if args.seeds:
            sweep = sweep.model_copy(update={"seeds": tuple(args.seeds)})
        runs = list(planned(sweep))
        there = sum((sweep.folder / run.name / "report/index.html").exists() for run in runs)
        print(f"{part}: {len(runs)} runs, {sweep.jobs} at a time; {there} are there already", flush=True)
        make(sweep, lambda line: print(line, flush=True), PROGRAMS)
        if args.seeds:
            continue
        found = measured(sweep)
        command = f"python benchmarks/evidence.py {part}"
        content = {"command": command, "machine": facts, "sweep": sweep.model_dump(mode="json"), **found}
        path = results / f"evidence_{part}.json"
        path.write_text(as_json(content), encoding="utf-8")
        if part in KEPT or args.short:
            keep(sweep, path.with_suffix(".npz"))
        if part in COUNTED:
            keep_counts(sweep, path.with_suffix(".npz"))
        if part == KEPT[0] or args.short:
            picture = results / "fairness.svg" if args.short else ROOT / "docs/fairness.svg"
            draw(path.with_suffix(".npz"), picture)
        print(path)
    if args.short:
        shutil.rmtree(results)


if __name__ == "__main__":
    main()
