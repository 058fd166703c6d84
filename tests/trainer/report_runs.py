"""Synthetic run folders, made by the real log, and a reader of the page."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import configs
from megatron_fspo.config import Config
from megatron_fspo.config.loading import save_config
from megatron_fspo.lab.report.history import Records
from megatron_fspo.record.log import RunLog
from megatron_fspo.record.records import SequenceRecord, clip_metrics
from mismatch_cases import record

LEARNING = {"Reward", "Response length"}
RATES = {"Clip rate", "Length Reweighting Error"}
BY_SEQUENCE = {"Clip rate by length", "S against √L"}
HEALTH = {"Exponent of S", "Noise σ̂ and width c", "KL to the rollout policy", "Entropy", "Gradient norm"}
HEALTH |= {"Responses cut at the limit", "Throughput"}


def make_config(folder: Path, **sections: Mapping[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "known", "folder": folder, "steps": 20},
        "model": {"checkpoint": "some/model"},
        "parallel": {"tensor": 2, "sequence": True},
        "data": {"train": "train.jsonl"},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return configs.make_config(folder, **tree)


def make_records(step: int, count: int) -> list[SequenceRecord]:
    """S ~ Normal(0, (.02)²·L), judged by the band ±.03·√L."""
    random = np.random.default_rng(step)
    lengths = random.integers(4, 100, count)
    sums = 0.02 * np.sqrt(lengths) * random.standard_normal(count)
    records = []
    for sample, (length, s) in enumerate(zip(lengths.tolist(), sums.tolist(), strict=True)):
        advantage, outside = float(sample % 3 - 1), abs(s) > 0.03 * length**0.5
        clipped = outside and advantage * s > 0
        flags = {"clipped_low": float(clipped and s < 0), "clipped_high": float(clipped and s > 0)}
        ratio = 0.0 if clipped else math.exp(s)
        records.append(record(length, s, advantage, sample=sample, out_of_band=outside, ratio=ratio, **flags))
    return records


def on_policy_metrics(step: int) -> dict[str, float]:
    """Every figure is a known function of the step."""
    return {
        "critic/rewards/mean": step / 100,
        "critic/rewards/mean/low": step / 100 - 0.05,
        "critic/rewards/mean/high": step / 100 + 0.05,
        "response_length/mean": 40.0 + step,
        "response_length/min": 4.0,
        "response_length/max": 100.0,
        "response_length/clip_ratio": 0.01,
        "actor/entropy": 1.0 / step,
        "actor/grad_norm": 2.0,
        "actor/grad_norm/max": 3.0,
        "fspo/kl_k3": math.nan,
        "fspo/kl_k3/on_policy": 0.0,
        "fspo/nonfinite": 1.0,
        "perf/throughput": 1000.0 * step,
        "timing_s/step": 60.0,
    }


def write_run(
    config: Config,
    *,
    steps: int,
    off_policy: bool = True,
    count: int = 64,
    evaluations: Mapping[int, float] | None = None,
    extra: Mapping[str, float] | None = None,
    turns: Sequence[int] | None = None,
) -> Path:
    """A run's folder, written by the log of the trainer itself."""
    config.run_folder.mkdir(parents=True)
    save_config(config, config.run_folder / "config.toml")
    log = RunLog(config, writer=True, resume_step=None)
    for step in range(steps + 1):
        metrics: dict[str, float] = on_policy_metrics(step) if step else {}
        if step and off_policy:
            records = make_records(step, count)
            log.sequences(step, records, turns)
            if turns is not None:
                metrics |= {"environment/turns/mean": 2.0, "environment/turns/max": 3.0}
            metrics |= clip_metrics(records, samples=1, seed=1) | {"fspo/kl_k3": 0.001}
            metrics |= {"fspo/out_of_band": step / 200, "fspo/lre_mean": step / 10, "fspo/lre_null": 0.05}
            if config.loss.name == "fspo":
                metrics |= {"fspo/c_low": 0.03, "fspo/c_high": 0.04, "fspo/drift": 0.0, "fspo/exponent": 0.5}
        metrics |= (extra or {}) if step else {}
        if step in (evaluations or {}):
            metrics |= {"val/held_out/mean@4/low": 0.1, "val/held_out/mean@4": (evaluations or {})[step]}
            metrics["val/held_out/pass@4"] = 0.9
        if metrics:
            log.step(step, metrics)
    return config.run_folder


def job(step: int, **changes: Any) -> dict[str, Any]:
    """A row of ``jobs.jsonl``."""
    versions = {"Python": "3.12", "torch": "2.9"}
    machine = {"processes": 2, "device": "CPU", "cpu": "Model X", "cores": 8, "layers": "local"}
    return {"step": step, **machine, "versions": versions, **changes}


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.styles = " ".join(re.findall(r"<style>.*?</style>", text, re.S))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        (self.scripts if self.cdata_elem == "script" else self.words).append(data)

    @property
    def loads_nothing(self) -> bool:
        """It has only targets in the page itself, and the browser is told to ask no other host."""
        links = [attrs.get(name) or "#" for _, attrs in self.tags for name in ("src", "href", "xlink:href")]
        links += re.findall(r"url\(['\"]?([^)]*)", self.styles)
        (policy,) = [attrs["content"] or "" for _, attrs in self.tags if "http-equiv" in attrs]
        return (
            not {tag for tag, _ in self.tags} & {"iframe", "img", "object", "embed"}
            and all(link.startswith(("data:", "#")) for link in links)
            and "@import" not in self.styles
            and policy.startswith("default-src 'none';")
            and "http" not in policy
        )

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def figures(self) -> dict[str, Any]:
        """Title → specification of each figure: the page has a place for every one."""
        places = {attrs["id"]: attrs["aria-label"] for _, attrs in self.tags if attrs.get("role") == "img"}
        data = [script for script in self.scripts if script.startswith("{")]
        figures = json.loads(data[0]) if data else {}
        assert places.keys() == figures.keys()
        return {str(places[name]): figure for name, figure in figures.items()}

    @property
    def pictures(self) -> set[str]:
        """Titles of the figures, each of which must have data."""
        for figure in self.figures.values():
            assert all(layer["values"] for layer in _data(figure))
        return set(self.figures)


def _data(figure: dict[str, Any]) -> list[dict[str, Any]]:
    return [one["data"] for one in (figure, *figure.get("layer", ())) if "data" in one]


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def table(path: Path) -> dict[str, tuple[str, str, str]]:
    """The headline table: name → (first, last, note)."""
    row = r'<th scope="row">(.*?)</th><td class="number">(.*?)</td><td class="number last">(.*?)</td>'
    found = re.findall(row + r'<td class="note">(.*?)</td>', path.read_text(encoding="utf-8"))
    return {name: (first, last, note) for name, first, last, note in found}


def records_from(lengths: Any, out_of_band: Any, clipped: Any, advantages: Any, sums: Any = None) -> Records:
    """Records of one step, a sequence or an array for each figure."""
    return Records(
        step=np.ones(len(lengths), np.int64),
        update=np.ones(len(lengths), np.int64),
        prompt=np.arange(len(lengths)),
        length=np.array(lengths),
        log_ratio_sum=np.zeros(len(lengths)) if sums is None else np.array(sums),
        advantage=np.array(advantages),
        clipped=np.array(clipped),
        out_of_band=np.array(out_of_band),
        # Weights of 1, where no clip acts.
        ratio=1.0 - np.array(clipped, dtype=np.float64),
        turns=np.ones(len(lengths), np.int64),
    )
