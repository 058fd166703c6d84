"""What a run does with ``loss.noise``: it picks the noise that is in its S, or does not start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from calibrations import DRIFT, calibration, config
from megatron_fspo.errors import InputError
from megatron_fspo.objective import FSPOBand, LengthFairDualClip
from megatron_fspo.objective.surrogate import SequenceLevel
from megatron_fspo.trainer.noise import noise_of_run

SAMPLED = ["--rollout.old-log-probs", "sampled"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "calibration.json"
    path.write_text(calibration().model_dump_json())
    return str(path)


def wide(file: str, *more: str) -> list[str]:
    return ["--loss.noise", file, "--loss.c-low", "0.2", "--loss.c-high", "0.2", *more]


def test_the_noise_is_that_of_the_passes_behind_s(file: str) -> None:
    assert noise_of_run(config()) is None
    by_kind = {one.kind: one.noise() for one in calibration().comparisons if not one.emulated}
    for words, kind in (([], "updates"), (SAMPLED, "sampler")):
        found = noise_of_run(config(*wide(file, *words)))
        assert found is not None and found.drift == by_kind[kind].drift
        assert torch.equal(found.residuals, by_kind[kind].residuals)


def test_without_updates_it_is_not_known(file: str) -> None:
    """Unless in float32, where there is no finer precision to compare with."""
    found = calibration()
    rest = tuple(one for one in found.comparisons if one.kind != "updates")
    Path(file).write_text(found.model_copy(update={"comparisons": rest}).model_dump_json())
    with pytest.raises(InputError, match=r"it has repeat \(bfloat16\), .* is updates \(bfloat16\)"):
        noise_of_run(config(*wide(file)))
    exact = tuple(one.model_copy(update={"precision": "float32"}) for one in rest)
    Path(file).write_text(found.model_copy(update={"comparisons": exact}).model_dump_json())
    noise = noise_of_run(config("--loss.noise", file, "--model.dtype", "float32"))
    assert noise is not None and noise.sigma == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.dtype", "float32"], r"the noise in S of this run is repeat \(float32\)"),
        (["--rollout.temperature", "0.7"], "rollout.temperature = 1.0, but this run has 0.7"),
        ([*SAMPLED, "--rollout.engine", "vllm"], "measured with rollout.engine = embedded"),
    ],
)
def test_noise_of_another_run_is_refused(file: str, words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        noise_of_run(config(*wide(file, *words)))


def test_a_file_that_is_none_is_refused(tmp_path: Path, file: str) -> None:
    with pytest.raises(InputError, match="No such file"):
        noise_of_run(config("--loss.noise", str(tmp_path / "none")))
    Path(file).write_text('{"format": 1}')
    with pytest.raises(InputError, match="is not a file of `megatron-fspo calibrate`: version: Field req"):
        noise_of_run(config("--loss.noise", file))


def test_a_band_inside_the_noise_is_refused_unless_the_key_allows_it(file: str) -> None:
    narrow = ["--loss.noise", file, "--loss.c-low", "0.03", "--loss.c-high", "0.03"]
    with pytest.raises(InputError, match=r"band lies inside .* updates \(bfloat16\).*max_noise_clip_rate"):
        noise_of_run(config(*narrow))
    assert noise_of_run(config(*narrow, "--loss.max-noise-clip-rate", "1")) is not None
    # The sampler's noise is a quarter of it.
    assert noise_of_run(config(*narrow, *SAMPLED, "--loss.max-noise-clip-rate", "0.1")) is not None


def test_the_drift_of_the_sampler_is_the_centre_of_the_band_where_s_starts_from_it(file: str) -> None:
    run = config(*wide(file, *SAMPLED))
    noise = noise_of_run(run)
    assert noise is not None and noise.drift == pytest.approx(DRIFT["sampler"], rel=0.7)
    state = run.loss.start(noise, longest=10_000)
    assert state.objective() == SequenceLevel(
        band=FSPOBand(c_low=0.2, c_high=0.2, drift=noise.drift),
        dual_clip=LengthFairDualClip(c=0.4, drift=noise.drift),
    )
    assert run.loss.start(noise, longest=30).objective().band.drift == 0  # type: ignore[attr-defined]
    lengths = torch.tensor([10_000.0]).repeat(64)
    spread = torch.linspace(-1, 1, 64) * lengths.sqrt()
    for _ in range(2):
        state.observe(0.01 * noise.spread * spread, lengths, update=1, warm=True)
    assert state.metrics()["fspo/drift"] == noise.drift  # updates have added nothing
    own = run.loss.start(noise_of_run(config(*wide(file))), longest=10_000)
    assert own.metrics()["fspo/drift"] == 0  # the trainer's own log-probs: S of noise has no such mean


def test_todays_clips_are_compared_with_those_of_noise(file: str) -> None:
    run = config(*wide(file, "--loss.max-noise-clip-rate", "1", "--loss.c-low", "0.04"))
    noise = noise_of_run(run)
    assert noise is not None
    state = run.loss.start(noise, longest=1000)
    lengths = torch.tensor([20, 20, 20, 300])
    want = noise.clip_rates(lengths, FSPOBand(c_low=0.04, c_high=0.2)).mean().item()
    assert 0.05 < want < 0.25
    by_noise = {"fspo/noise_clip_rate": want, "fspo/noise_clip_share": want / 0.25}
    assert state.noise_metrics(lengths, 0.25) == pytest.approx(by_noise)
    assert state.noise_metrics(lengths, 0.01)["fspo/noise_clip_share"] == 1
    assert math.isnan(state.noise_metrics(lengths, 0.0)["fspo/noise_clip_share"])
    assert state.noise_metrics(lengths[:0], math.nan) == {}
    assert run.loss.start(longest=1000).noise_metrics(lengths, 0.25) == {}
