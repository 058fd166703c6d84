import json
import math
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.options import save_config
from megatron_fspo.trainer import pictures
from megatron_fspo.trainer.history import (
    History,
    Records,
    clip_rates,
    overall_rates,
    pooled_lre,
    read_records,
    wilson_interval,
)
from megatron_fspo.trainer.log import RunLog
from megatron_fspo.trainer.records import SequenceRecord, clip_metrics
from megatron_fspo.trainer.report import write_report

LEARNING = {"Reward", "Response length"}
RATES = {"Clip rate", "Length Reweighting Error"}
BY_SEQUENCE = {"Clip rate by length", "S against √L"}
HEALTH = {"Noise σ̂ and width c", "KL to the rollout policy", "Entropy", "Gradient norm"}


def make_config(folder: Path, **sections: Mapping[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "known", "folder": folder, "steps": 20},
        "model": {"checkpoint": "some/model"},
        "parallel": {"tensor": 2, "sequence": True},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
        "reward": {"name": "make_sum"},
        "rollout": {"prompts": 8, "samples": 4, "max_response_tokens": 100},
        "loss": {"name": "fspo"},
    }
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return Config.model_validate(tree)


def make_records(step: int, count: int = 64) -> list[SequenceRecord]:
    """S ~ Normal(0, (.02)²·L), judged by the band ±.03·√L."""
    random = np.random.default_rng(step)
    lengths = random.integers(4, 100, count)
    sums = 0.02 * np.sqrt(lengths) * random.standard_normal(count)
    records = []
    for sample, (length, s) in enumerate(zip(lengths.tolist(), sums.tolist(), strict=True)):
        advantage = float(sample % 3 - 1)
        low, high = s < -0.03 * length**0.5, s > 0.03 * length**0.5
        records.append(
            SequenceRecord(
                sample=sample,
                rank=0,
                length=length,
                log_ratio_sum=s,
                advantage=advantage,
                clipped_low=float(low and advantage < 0),
                clipped_high=float(high and advantage > 0),
                dual_clipped=0.0,
                out_of_band=low or high,
                nonfinite=False,
            )
        )
    return records


def on_policy_metrics(step: int) -> dict[str, float]:
    """Every figure is a known function of the step."""
    return {
        "critic/rewards/mean": step / 100,
        "response_length/mean": 40.0 + step,
        "response_length/min": 4.0,
        "response_length/max": 100.0,
        "response_length/clip_ratio": 0.01,
        "actor/entropy": 1.0 / step,
        "actor/grad_norm": 2.0,
        "actor/grad_norm/max": 3.0,
        "fspo/kl_k3": 0.001,
        "fspo/nonfinite": 1.0,
        "perf/throughput": 1000.0 * step,
        "timing_s/step": 60.0,
    }


def write_run(
    config: Config,
    *,
    steps: int,
    off_policy: bool = True,
    evaluations: Mapping[int, float] | None = None,
    extra: Mapping[str, float] | None = None,
) -> Path:
    """A run's folder, written by the log of the trainer itself."""
    config.run_folder.mkdir(parents=True)
    save_config(config, config.run_folder / "config.toml")
    log = RunLog(config, writer=True, resume_step=None)
    for step in range(steps + 1):
        metrics: dict[str, float] = {}
        if step:
            metrics |= on_policy_metrics(step)
            if off_policy:
                records = make_records(step)
                log.sequences(step, records)
                metrics |= clip_metrics(records, seed=1)
                metrics |= {"fspo/out_of_band": step / 200, "fspo/lre_mean": step / 10, "fspo/lre_null": 0.05}
            if off_policy and config.loss.name == "fspo":
                metrics |= {"fspo/c_low": 0.03, "fspo/c_high": 0.04, "fspo/drift": 0.0}
            metrics |= extra or {}
        if step in (evaluations or {}):
            metrics |= {"val/held_out/mean@4": (evaluations or {})[step], "val/held_out/pass@4": 0.9}
        if metrics:
            log.step(step, metrics)
    return config.run_folder


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def pictures(self) -> set[str | None]:
        """Titles of the pictures, each of which must hold a drawing."""
        titles = {attrs["aria-label"] for _, attrs in self.tags if attrs.get("role") == "img"}
        assert len(titles) == sum(tag == "svg" for tag, _ in self.tags)
        return titles


def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def table(path: Path) -> dict[str, tuple[str, str, str]]:
    """The headline table: name → (first, last, note)."""
    row = r'<th scope="row">(.*?)</th><td class="number">(.*?)</td><td class="number last">(.*?)</td>'
    found = re.findall(row + r'<td class="note">(.*?)</td>', path.read_text(encoding="utf-8"))
    return {name: (first, last, note) for name, first, last, note in found}


def records_from(
    lengths: Sequence[int],
    out_of_band: Sequence[bool],
    clipped: Sequence[bool],
    advantages: Sequence[float],
    sums: Sequence[float] | None = None,
) -> Records:
    return Records(
        step=np.ones(len(lengths), np.int64),
        length=np.array(lengths),
        log_ratio_sum=np.array(sums or [0.0] * len(lengths)),
        advantage=np.array(advantages),
        clipped=np.array(clipped),
        out_of_band=np.array(out_of_band),
    )


def test_the_page_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=20, evaluations={0: 0.25, 10: 0.5, 20: 0.75})
    path = write_report(run)
    assert path == run / "report" / "index.html"

    rows = table(path)
    assert rows["Reward"][:2] == ("0.030", "0.180")  # means of .01 … .05 and of .16 … .20
    assert rows["Evaluation"] == ("0.250", "0.750", "held_out/mean@4, at step 0 and step 20")
    assert rows["Response length"][:2] == ("43.0", "58.0")
    assert rows["Outside the band"][:2] == ("1.5%", "9.0%")
    assert rows["LRE (mean)"][:2] == ("0.300", "1.800")
    assert rows["LRE by chance"][:2] == ("0.050", "0.050")
    assert rows["Dropped sequences"][1] == "20"
    assert rows["Throughput"][:2] == ("3,000", "18,000")
    assert rows["Steps"] == ("", "20 of 20", "20 min 00 s, without evaluations and checkpoints")

    pool = pooled_lre(read_records(run))
    assert rows["LRE pooled"][1] == f"{pool.mean:.3f}"
    low, high = pool.mean_interval
    assert rows["LRE pooled"][2] == (
        f"95% interval {low:.3f} to {high:.3f}; null floor {pool.null_mean:.3f}; "
        "1,280 records, evenly over all steps"
    )

    text = read_page(path).text
    assert "Means over steps 1–5 and steps 16–20" in text
    assert "c = 0.03 (low), 0.04 (high)" in text
    assert "some/model, float32" in text
    assert "tensor = 2, sequence = true" in text
    assert "320 records of steps 16 to 20" in text
    assert "Step 20, 64 records" in text
    assert "is our reconstruction" in text


def test_the_page_has_every_picture_and_loads_nothing(tmp_path: Path) -> None:
    path = write_report(write_run(make_config(tmp_path), steps=20, evaluations={0: 0.5}))
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed"}
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), attributes
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))
    assert [item.name for item in path.parent.iterdir()] == ["index.html"]


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=3)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_what_the_user_named_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{"
    config = make_config(
        tmp_path, model={"checkpoint": attack}, reward={"name": attack}, data={"train": f"{attack}.jsonl"}
    )
    run = write_run(config, steps=2)
    row = {"step": 2, f"val/{attack.replace('/', '')}/mean@4": 0.5}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    page = read_page(write_report(run))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert f"{attack}, float32" in page.text
    assert table(run / "report" / "index.html")["Evaluation"][1] == "0.500"


def test_a_hostile_run_name_is_refused(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=1)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('"known"', '"<script>"'))
    with pytest.raises(InputError, match=r"run\.name = '<script>'"):
        write_report(run)


def test_a_run_of_one_step(tmp_path: Path) -> None:
    path = write_report(write_run(make_config(tmp_path), steps=1))
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert "Means over step 1 and step 1" in page.text
    assert "running mean" not in page.text
    rows = table(path)
    assert rows["Reward"][:2] == ("0.010", "0.010")
    assert rows["Steps"][1] == "1 of 20"
    assert "Evaluation" not in rows


def test_a_run_that_ended_before_its_first_step(tmp_path: Path) -> None:
    path = write_report(write_run(make_config(tmp_path), steps=0, evaluations={0: 0.25}))
    assert read_page(path).pictures == {"Reward"}
    rows = table(path)
    assert rows["Evaluation"][:2] == ("0.250", "0.250")
    assert rows["Reward"][:2] == ("–", "–")
    assert rows["Steps"][1] == "0 of 20"


@pytest.mark.parametrize("loss", ["rloo", "gspo", "grpo", "dapo"])
def test_other_losses(tmp_path: Path, loss: str) -> None:
    page = read_page(write_report(write_run(make_config(tmp_path, loss={"name": loss}), steps=6)))
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert f"{loss}: advantage" in page.text and "at the end c" not in page.text
    token_level = loss in ("grpo", "dapo")
    assert ("Every token has a band of its own" in page.text) == token_level
    assert ("shares of tokens" in page.text) == token_level


def test_an_on_policy_run_has_nothing_to_clip(tmp_path: Path) -> None:
    config = make_config(tmp_path, batch={"mini_batches": 1})
    path = write_report(write_run(config, steps=6, off_policy=False))
    page = read_page(path)
    assert page.pictures == LEARNING | HEALTH - {"Noise σ̂ and width c"}
    assert "one optimizer step per rollout" in page.text
    assert not {"Clip rate", "LRE (mean)", "LRE pooled"} & table(path).keys()


def test_a_run_that_kept_no_sequences(tmp_path: Path) -> None:
    path = write_report(write_run(make_config(tmp_path, log={"sequences": 0}), steps=6))
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | HEALTH
    assert "log.sequences = 0" in page.text
    assert "LRE pooled" not in table(path)


def test_null_in_the_files(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=12, extra={"actor/entropy": math.nan})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["actor/entropy"] is None
    for name in ("critic/rewards/mean", "fspo/lre_mean", "actor/grad_norm", "response_length/max"):
        rows[10][name] = None
    rows[11] |= {"fspo/c_low": None, "fspo/sigma_hat": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_report(run)
    assert read_page(path).pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH - {"Entropy"}
    assert table(path)["Reward"][1] == "0.098"  # mean of .08, .09, .10 and .12
    assert "nan" not in read_page(path).text.lower()


def test_records_that_count_in_no_rate_are_left_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = write_run(config, steps=1)
    row = {
        "step": 1,
        "length": [5, 0, 7],
        "log_ratio_sum": [None, 0.0, 0.25],
        "advantage": [1.0, 1.0, -1.0],
        "clipped": [False, False, True],
        "out_of_band": [False, False, True],
    }
    (run / "sequences.jsonl").write_text(json.dumps(row) + "\n")
    records = read_records(run)
    assert records.length.tolist() == [7]
    assert records.log_ratio_sum.tolist() == [0.25]
    assert records.clipped.tolist() == records.out_of_band.tolist() == [True]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    steps, each = 300, 1024
    config = make_config(tmp_path, run={"steps": 2000})
    run = write_run(config, steps=0, evaluations={0: 0.5})
    random = np.random.default_rng(0)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 2001):
            noisy = {name: value * (1 + random.random()) for name, value in on_policy_metrics(step).items()}
            noisy |= {f"fspo/{key}": random.random() for key in ("out_of_band", "clip_low", "clip_high")}
            noisy |= {f"fspo/{key}": random.random() for key in ("lre_mean", "lre_max", "lre_null")}
            noisy |= {"fspo/sigma_hat": random.random(), "fspo/c_low": 0.03, "fspo/c_high": 0.03}
            noisy |= {"fspo/drift": 0.0, "fspo/dual_clip_frac": 0.01, "val/held_out/mean@4": random.random()}
            file.write(json.dumps({"step": step, **noisy}) + "\n")
    with (run / "sequences.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            lengths = random.integers(1, 4096, each)
            sums = 0.02 * np.sqrt(lengths) * random.standard_normal(each)
            outside = (np.abs(sums) > 0.03 * np.sqrt(lengths)).tolist()
            columns = {"length": lengths.tolist(), "log_ratio_sum": sums.tolist(), "advantage": [1.0] * each}
            file.write(
                json.dumps({"step": step, **columns, "clipped": outside, "out_of_band": outside}) + "\n"
            )
    path = write_report(run)
    assert read_page(path).pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert "100,000 records, evenly over all steps" in table(path)["LRE pooled"][2]
    assert path.stat().st_size < 1_000_000
    assert "data:image/png;base64" in path.read_text(encoding="utf-8")  # the scatter is pixels


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val')  # killed while it wrote its first row
    with pytest.raises(InputError, match="holds no step"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_clip_rates_by_length_by_hand() -> None:
    # Two bins of four: L 1–3 and 10–12. Outside: 1/4 and 3/4. With A ≠ 0: 2 of 4 and 4 of 4.
    records = records_from(
        lengths=[1, 10, 2, 11, 2, 12, 3, 12],
        out_of_band=[True, True, False, True, False, True, False, False],
        clipped=[True, True, False, False, False, False, False, False],
        advantages=[1.0, -1.0, 0.0, 1.0, 0.0, 1.0, -1.0, 1.0],
    )
    short, long = clip_rates(records, num_bins=2)
    assert (short.low, short.high, short.records, short.judged) == (1, 3, 4, 2)
    assert (short.out_of_band, short.clipped) == (0.25, 0.5)
    assert (long.low, long.high, long.records, long.judged) == (10, 12, 4, 4)
    assert (long.out_of_band, long.clipped) == (0.75, 0.25)
    whole = overall_rates(records)
    assert (whole.low, whole.high, whole.out_of_band, whole.clipped) == (1, 12, 0.5, 2 / 6)


def test_clip_rate_of_a_bin_that_nothing_can_be_clipped_in() -> None:
    records = records_from([3, 3], [True, False], [False, False], [0.0, 0.0])
    (only,) = clip_rates(records)
    assert (only.out_of_band, only.judged) == (0.5, 0)
    assert math.isnan(only.clipped)
    svg = pictures.rates_by_length([only], overall_rates(records))
    assert "outside" in svg and "clipped" not in svg


def test_pooled_lre_by_hand() -> None:
    # Accepted: all of L = 5, half of L = 50; ā = 3/4, so Σ ½·|1/(3/4) − 1| + ½·|½/(3/4) − 1| = 1/3.
    outside = [False] * 40 + [True, False] * 20
    records = records_from([5] * 40 + [50] * 40, outside, [False] * 80, [1.0] * 80)
    found = pooled_lre(records)
    assert found.mean == pytest.approx(1 / 3)
    assert found.max == pytest.approx(1 / 3)
    assert found.null_mean < 0.15 < found.mean_interval[0]


def test_the_tail_of_the_records_is_the_last_steps() -> None:
    records = records_from([1] * 40, [False] * 40, [False] * 40, [1.0] * 40)
    records = Records(**{**vars(records), "step": np.repeat(np.arange(1, 21), 2)})
    assert np.unique(records.tail(0.25, 2).step).tolist() == [16, 17, 18, 19, 20]
    assert np.unique(records.tail(0.25, 8).step).tolist() == [*range(13, 21)]
    assert np.unique(records.tail(0.0, 1).step).tolist() == [20]
    thinned = records.thinned(5).step.tolist()
    assert len(thinned) == 5 and (thinned[0], thinned[-1]) == (1, 20)


def test_what_lies_beyond_the_scatter_is_counted() -> None:
    sums = [0.01] * 97 + [5.0, -7.0, 0.02]
    records = records_from([4] * 100, [False] * 100, [False] * 100, [1.0] * 100, sums)
    assert np.flatnonzero(pictures.beyond(records, band=None)).tolist() == [97, 98, 99]


def test_the_scatter_shows_all_of_the_band(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=1)
    text = read_page(write_report(run)).text
    records = read_records(run)
    assert np.abs(records.log_ratio_sum).max() < 1.4 * 0.04 * records.length.max() ** 0.5
    assert "beyond the picture" not in text


def test_wilson_interval_by_hand() -> None:
    z2 = 1.96**2
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, z2 / (10 + z2)))
    low, high = wilson_interval(0.5, 100)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - 0.5 == pytest.approx(1.96 * math.sqrt(0.25 / (100 + z2)))


def test_running_mean_leaves_out_what_is_missing() -> None:
    values = np.array([1.0, 2.0, 3.0, math.nan, 5.0, 60.0])
    expected = [1.5, 2.0, 2.5, 4.0, 32.5, 32.5]
    assert pictures.running_mean(values, 3).tolist() == pytest.approx(expected)
    assert np.isnan(pictures.running_mean(np.array([math.nan] * 4), 3)).all()


def test_thinning_keeps_spikes() -> None:
    values = np.zeros(2000)
    values[1234], values[777] = 100.0, -100.0
    values[1235] = values[778] = math.nan
    kept = pictures.thin(values, most=100)
    assert len(kept) <= 100 and {1234, 777} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert pictures.thin(values[:100], most=100).tolist() == [*range(100)]


def test_series_of_a_metric_that_only_some_steps_log(tmp_path: Path) -> None:
    history = History(write_run(make_config(tmp_path), steps=4, evaluations={0: 0.25, 4: 0.75}))
    name = history.evaluation()
    assert name == "val/held_out/mean@4"
    scores = history.series(name)
    assert scores.steps.tolist() == [0, 4] and scores.values.tolist() == [0.25, 0.75]
    assert not history.series("no/such/metric")
    assert math.isnan(history.series("no/such/metric").last())
