"""From sums to figures, to a file, to a table and a page."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from calibrations import DRIFT, SIGMA, calibration, config, measured
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.calibrate.command import calibration_of, checks
from megatron_fspo.lab.calibrate.page import render, write_page
from megatron_fspo.lab.calibrate.passes import read_responses
from megatron_fspo.losses import GSPOLoss
from megatron_fspo.objective import FSPOBand
from megatron_fspo.trainer.noise import Calibration
from megatron_fspo.weights import read_architecture


@pytest.fixture(scope="module")
def many() -> Calibration:
    return calibration(sequences=1600)


def test_figures_are_those_of_what_was_put_in(many: Calibration) -> None:
    found = many
    assert (found.responses, found.prompts, found.longest) == (1599, 400, 399)
    by_kind = {(one.kind, one.precision): one for one in found.comparisons}
    (drift_seen,) = (one for one in found.comparisons if one.kind == "updates" and not one.emulated)
    assert drift_seen.crossover[0] == pytest.approx((SIGMA["updates"] / DRIFT["updates"]) ** 2, rel=0.5)
    for kind in ("sampler", "updates"):
        one = by_kind[kind, "bfloat16"]
        for (value, low, high), true in ((one.sigma, SIGMA[kind]), (one.drift, DRIFT[kind])):
            assert value == pytest.approx(true, rel=0.25)
            assert low is not None and high is not None and low < true < high
        assert one.noise().drift == one.drift[0]
        value, low, high = one.exponent
        assert value is not None and low is not None and high is not None
        assert value == pytest.approx(0.5, abs=0.12) and low < 0.5 < high and high - low < 0.4
    assert by_kind["repeat", "bfloat16"].sigma == (0, 0, 0)
    assert by_kind["repeat", "bfloat16"].exponent == (None, None, None)
    assert by_kind["repeat", "bfloat16"].crossover == (None, None, None)
    assert by_kind["updates", "blockwise"].emulated
    assert found.first_updates is not None and found.first_updates[0] == pytest.approx(0.1, rel=0.1)
    assert found.first_updates_exponent is not None
    assert found.first_updates_exponent[0] == pytest.approx(0.5, abs=0.12)
    lengths = [at.length for at in by_kind["updates", "bfloat16"].by_length]
    assert lengths == [16, 32, 64, 100]  # the last is the run's longest


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


def test_the_file_is_read_back_and_the_table_has_everything() -> None:
    found = calibration()
    assert Calibration.model_validate_json(found.model_dump_json()) == found
    text = render(found)
    for words in (
        "added to S by the updates",
        "blockwise (emulated)",
        "c_low = 0.03",
        "first off-policy",
    ):
        assert words in text
    assert "* longer" not in text
    sigma = found.comparisons[3].sigma[0]
    assert sigma is not None and f"{sigma:.2g} [" in text
    longer = render(calibration(config("--rollout.max-response-tokens", "900", "--batch.max-tokens", "2048")))
    assert "512 *" in longer and "* longer than any that was measured" in longer


def test_the_page_shows_the_same(tmp_path: Path) -> None:
    found = calibration()
    write_page(found, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and "blockwise (emulated)" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page), "everything is in the file"
    quiet = calibration(differences=measured().differences[:2])
    write_page(quiet, tmp_path / "quiet.html")
    assert "<svg" not in (tmp_path / "quiet.html").read_text(encoding="utf-8")


def test_without_a_drift_that_was_seen_there_is_no_length_at_which_it_takes_over() -> None:
    unsure = measured(sequences=40)
    sums = unsure.differences[3].sums
    sums[:] = 0.04 * unsure.lengths.sqrt() * torch.tensor([1.0, -1.0]).repeat(20)
    found = calibration_of(unsure, config(), device="cpu").comparisons[3]
    assert found.drift[1] < 0 < found.drift[2] and found.crossover == (None, None, None)  # type: ignore[operator]


def test_measurements_without_a_figure() -> None:
    found = calibration(first_updates=None)
    assert found.first_updates is None and "2 sigma-hat" not in render(found)
    broken = measured()
    broken.differences[0].sums.fill_(math.nan)
    with pytest.raises(TrainingError, match=r"repeat \(bfloat16\): no response"):
        calibration_of(broken, config(), device="cpu")
    with pytest.raises(InputError, match=r"loss\.name is gspo"):
        calibration_of(measured(), config().model_copy(update={"loss": GSPOLoss()}), device="cpu")


GOOD = '{"prompt_token_ids": [1, 2], "token_ids": [3], "reward": 1}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: needs an object with prompt_token_ids and token_ids"),
        ('{"token_ids": [3]}', "line 2: needs an object"),
        (
            '{"prompt_token_ids": [], "token_ids": [3]}',
            "line 2: prompt_token_ids and token_ids need token ids",
        ),
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
