"""From sums to figures, to a file, to a table and a page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import noise_check
from calibrations import DRIFT, SIGMA, calibration, config, measured
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.calibrate.command import checks, make_calibration
from megatron_fspo.lab.calibrate.page import render, write_page
from megatron_fspo.lab.calibrate.passes import read_responses
from megatron_fspo.losses import GSPOLoss
from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.noise import Noise, measure_noise
from megatron_fspo.trainer.noise import Calibration
from megatron_fspo.weights import read_architecture
from report_runs import read_page


@pytest.fixture(scope="module")
def many() -> Calibration:
    return make_calibration(measured(sequences=1600), config(), device="cpu")


def test_figures_are_those_of_what_was_put_in(many: Calibration) -> None:
    found = many
    assert (found.responses, found.prompts, found.longest) == (1599, 400, 399)
    by_kind = {(one.kind, one.precision): one for one in found.comparisons}
    drift_length = by_kind["updates", "bfloat16"].drift_length[0]
    assert drift_length == pytest.approx((SIGMA["updates"] / DRIFT["updates"]) ** 2, rel=0.5)
    for kind in ("sampler", "updates"):
        one = by_kind[kind, "bfloat16"]
        for (value, low, high), true in ((one.sigma, SIGMA[kind]), (one.drift, DRIFT[kind])):
            assert value == pytest.approx(true, rel=0.25)
            assert low is not None and high is not None and low < true < high
        assert one.noise().drift == one.drift[0]
        value, low, high = one.exponent
        assert value is not None and low is not None and high is not None
        assert value == pytest.approx(0.5, abs=0.12) and low < 0.5 < high and high - low < 0.4
    same = by_kind["repeat", "bfloat16"]
    assert same.sigma == (0, 0, 0) and same.exponent == same.drift_length == (None, None, None)
    assert by_kind["updates", "blockwise"].emulated
    assert found.first_updates is not None and found.first_updates[0] == pytest.approx(0.1, rel=0.1)
    assert found.first_updates_exponent is not None
    assert found.first_updates_exponent[0] == pytest.approx(0.5, abs=0.12)
    lengths = [at.length for at in by_kind["updates", "bfloat16"].by_length]
    assert lengths == [16, 32, 64, 100]  # the last is the run's longest


def test_sigma_without_the_flipped_tokens(tmp_path: Path) -> None:
    """A tenth of the tokens, each with a jump that is as large as the noise of 50 others."""
    given, random = measured(sequences=1600), torch.Generator().manual_seed(2)
    updates, jump = given.differences[3], SIGMA["updates"] * 50**0.5
    flipped = (given.lengths * 0.1).round().double()
    part = jump * flipped.sqrt() * torch.randn(1600, generator=random, dtype=torch.float64)
    with_flips = replace(updates, sums=updates.sums + part, flips=torch.stack([flipped, part]))
    calm, one = make_calibration(
        replace(given, differences=[updates, with_flips]), config(), device="cpu"
    ).comparisons
    assert calm.flips is None and one.flips is not None
    assert one.flips.tokens == pytest.approx((flipped.sum() / given.lengths.sum()).item())
    assert one.flips.sigma_without == pytest.approx(calm.sigma)
    assert one.sigma[0] == pytest.approx((1 + 0.1 * 50) ** 0.5 * SIGMA["updates"], rel=0.1)
    found = calibration().model_copy(update={"comparisons": (calm, one)})
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    assert ["flips" in json.loads(record.model_dump_json()) for record in (calm, one)] == [False, True]
    write_page(found, tmp_path / "flips.html")
    write_page(calibration(), tmp_path / "calm.html")
    share = f"{one.flips.tokens:.1%}"
    assert share in render(found) and share in (tmp_path / "flips.html").read_text(encoding="utf-8")
    calm_page = (tmp_path / "calm.html").read_text(encoding="utf-8")
    assert "lipped" not in render(calibration()) and "lipped" not in calm_page


def test_the_noise_of_one_half_of_the_prompts_predicts_the_other(many: Calibration) -> None:
    for one in many.comparisons:
        assert sum(check.responses for check in one.checks) == 1599
        for check in one.checks:
            _, low, high = check.measured
            assert low is not None and high is not None
            assert low - 0.01 <= check.predicted <= high + 0.01, (one.kind, check)


def test_a_prediction_does_not_know_what_it_is_compared_with() -> None:
    """Noise that only the even prompts have is predicted for the odd ones, and the other way round."""
    lengths, groups = torch.full((200,), 100), torch.arange(200)
    sums = torch.where(groups % 2 == 0, 5.0, 0.0) * torch.where(groups % 4 == 0, 1.0, -1.0)
    (check,) = checks(sums.double(), lengths, groups, FSPOBand(c_low=0.03, c_high=0.03))
    assert check.predicted == 0.5 == check.measured[0]
    lengths[groups % 2 == 0] = 50
    short, long = checks(sums.double(), lengths, groups, FSPOBand(c_low=0.03, c_high=0.03))
    assert (short.measured[0], long.measured[0]) == (1, 0)
    assert (short.predicted, long.predicted) == (0, 1)
    assert checks(sums.double(), lengths, groups * 0, FSPOBand(c_low=0.03, c_high=0.03)) == []


def test_the_file_is_read_back_and_table_and_page_have_everything(tmp_path: Path) -> None:
    found = calibration()
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    text, sigma = render(found), found.comparisons[3].sigma[0]
    assert all(words in text for words in ("blockwise (emulated)", "c_low = 0.03", f"{sigma:.2g} ["))
    assert "* longer" not in text
    limits = config("--rollout.max-response-tokens", "900", "--batch.max-tokens", "2048")
    longer = render(make_calibration(measured(differences=measured().differences[3:4]), limits, device="cpu"))
    assert "512 *" in longer and "* longer than any that was measured" in longer
    write_page(found, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count('role="img"') == 2 and "blockwise (emulated)" in page
    assert read_page(tmp_path / "index.html").loads_nothing
    nothing = measured(differences=measured().differences[:2], first_updates=None)
    quiet = make_calibration(nothing, config(), device="cpu")
    write_page(quiet, tmp_path / "quiet.html")
    assert "<svg" not in (tmp_path / "quiet.html").read_text(encoding="utf-8")
    assert quiet.first_updates is None and "2 sigma-hat" not in render(quiet)


def test_measurements_without_a_figure() -> None:
    # Without a drift that is seen there is no length at which it takes over.
    (updates,) = measured(sequences=40).differences[3:4]
    unsure = measured(sequences=40, differences=[updates])
    updates.sums[:] = 0.04 * unsure.lengths.sqrt() * torch.tensor([1.0, -1.0]).repeat(20)
    (found,) = make_calibration(unsure, config(), device="cpu").comparisons
    assert found.drift[1] < 0 < found.drift[2] and found.drift_length == (None, None, None)  # type: ignore[operator]
    broken = measured(first_updates=None)
    broken.differences[0].sums.fill_(math.nan)
    with pytest.raises(TrainingError, match=r"repeat \(bfloat16\): no response"):
        make_calibration(broken, config(), device="cpu")
    with pytest.raises(InputError, match=r"loss\.name is gspo"):
        make_calibration(measured(), config().model_copy(update={"loss": GSPOLoss()}), device="cpu")


def noise_behind_updates(seed: int) -> Noise:
    responses = measured(seed=seed, sequences=400)
    keep = responses.lengths > 0
    return measure_noise(responses.differences[3].sums[keep], responses.lengths[keep])


def test_one_calibration_predicts_the_same_noise_and_no_other() -> None:
    first, second = noise_behind_updates(0), noise_behind_updates(1)
    found = list(noise_check.rows(first, second, []))
    assert len(found) == 3 * 4 and {row.behind for row in found} == {99}
    assert sum(row.consistent for row in found) >= 11
    wider = Noise(drift=second.drift, lengths=second.lengths, residuals=3 * second.residuals)
    assert sum(row.consistent for row in noise_check.rows(first, wider, [])) <= 1
    given = list(noise_check.rows(first, second, [0.03]))
    assert [row.c for row in given] == [0.03] * 4 and sum(row.responses for row in given) == 399


GOOD = '{"prompt_token_ids": [1, 2], "token_ids": [3], "reward": 1}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":2: not JSON"),
        ('{"token_ids": [3]}', ":2: needs an object with prompt_token_ids and token_ids"),
        ('{"prompt_token_ids": [], "token_ids": [3]}', ":2: prompt_token_ids and token_ids need token ids"),
        ('{"prompt_token_ids": [1], "token_ids": [14]}', "need token ids from 0 to 13"),
        ('{"prompt_token_ids": [1], "token_ids": [true]}', "need token ids from 0 to 13"),
        ('{"prompt_token_ids": [1], "token_ids": [%s1]}' % ("1, " * 5000), "more than batch.max_tokens"),
    ],
)
def test_responses_that_cannot_be_scored_are_named(tmp_path: Path, line: str, said: str) -> None:
    run = config()
    arch = read_architecture(run.model.checkpoint)
    assert arch.vocab_size == 14
    path = tmp_path / "responses.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(InputError, match=re.escape(said)):
        read_responses(path, run, arch)
    path.write_text("\n")
    with pytest.raises(InputError, match="has no responses"):
        read_responses(path, run, arch)
    with pytest.raises(InputError, match="No such file"):
        read_responses(tmp_path / "none", run, arch)
    path.write_text(f"{GOOD}\n\n{GOOD}\n")
    assert read_responses(path, run, arch) == [((1, 2), (3,))] * 2
