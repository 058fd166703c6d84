"""An evaluation by servers that answer like vLLM: all asked for at once, stopped, and gone on with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import running
from fake_server import MAX_TOKENS, tokens_of

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import TrainingError
from megatron_fspo.evaluation.records import SAMPLES, EvaluationManifest, Problem, RecordFile, load
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import Pending
from megatron_fspo.rollout.sampling import stream_seed
from megatron_fspo.trainer.evaluate import _SEED_OFFSET, evaluate, num_responses, portions, sample_and_grade
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.types import Completion, Prompt

WORDS = "--rollout.engine vllm --evaluation.samples 3 --rollout.max-batch 6 --run.seed 4 --log.responses 7"
PROMPTS = 7
RESPONSES = 5 * 1 + 2 * 8

pytestmark = pytest.mark.usefixtures("one_rank", "short_waits")


def even(prompt: Prompt, completion: Completion, response: str) -> float:
    return float(completion.token_ids[0] % 2 == 0)


THREE = threading.Barrier(3, timeout=60)


def in_threes(prompt: Prompt, completion: Completion, response: str) -> float:
    THREE.wait()  # for two other calls
    return even(prompt, completion, response)


def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return " ".join(map(str, ids))


SETS = "[{file = 'a', samples = 1}, {file = 'b', samples = 8}]"


def inputs(reward: str = "even", *, more: str = "") -> Inputs:
    words = f"{WORDS} --rollout.max-response-tokens {MAX_TOKENS} --reward.extract whole"
    words += f" --reward.name {__name__}:{reward}"
    return Inputs(
        config=load_config(
            REPO / "examples/make_sum/run.toml",
            [*words.split(), *more.split(), "--data.validation", SETS],
        ),
        backend=choose_backend("cpu", "local"),
        arch=None,  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(decode=decode),
        stop_token_ids=(),
        train=(),
        validation=tuple(
            Prompt(index=i, token_ids=(1, 2), text=str(i), answer="", dataset="b" if i > 4 else "a")
            for i in range(PROMPTS)
        ),
        noise=None,
    )


@pytest.fixture
def grader() -> Iterator[Grader]:
    with Grader(inputs().config.reward, max_response_tokens=MAX_TOKENS) as grader:
        yield grader


def opened(folder: Path, one: Inputs, before_write: Callable[[int], None] = lambda done: None) -> RecordFile:
    """Args: before_write: is called with the portions that are written."""
    folder.mkdir(exist_ok=True)
    file = RecordFile(
        folder,
        EvaluationManifest(model="m", samples=one.config.evaluation_samples, facts={}),
        [Problem.of(prompt, prompt.dataset) for prompt in one.validation],
        [portion.keys for portion in portions(one, 1)],
        check=lambda: before_write(file.done),
    )
    return file


def full(done: int) -> None:
    if done == 2:
        raise TrainingError("the disk is full")


def tokens(index: int, sample: int) -> tuple[int, ...]:
    """Of a response; the same for any k."""
    return tokens_of(stream_seed(4 + _SEED_OFFSET, index, sample))


def test_all_is_asked_for_at_once_and_a_stopped_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grader: Grader
) -> None:
    one = inputs()
    assert [len(portion.prompts) for portion in portions(one, 1)] == [5, 1, 1]
    with running(tmp_path / "weights") as (engine, fakes, _):
        engine.update_weights(0)
        submit, asked, written = engine.submit, [], []

        def counted(prompts: Sequence[Prompt], *more: Any) -> Pending:
            asked.append(len(prompts))
            return submit(prompts, *more)

        monkeypatch.setattr(engine, "submit", counted)
        file = opened(tmp_path / "whole", one, lambda done: written.append((done, sum(asked))))
        sample_and_grade(one, engine, engine.groups, grader, None, file)
        assert written == [(done, PROMPTS) for done in range(3)], "waited before all was asked"
        assert sum(len(fake.answered) for fake in fakes) == RESPONSES
    with running(tmp_path / "weights") as (engine, fakes, _):
        engine.update_weights(0)
        with pytest.raises(TrainingError, match="the disk is full"):
            sample_and_grade(
                one, engine, engine.groups, grader, None, opened(tmp_path / "stopped", one, full)
            )
        for fake in fakes:
            fake.answered.clear()
        file = opened(tmp_path / "stopped", one)
        assert (file.done, file.left) == (2, 8)
        sample_and_grade(one, engine, engine.groups, grader, None, file)
        assert sum(len(fake.answered) for fake in fakes) == 8
    assert (tmp_path / "stopped" / SAMPLES).read_bytes() == (tmp_path / "whole" / SAMPLES).read_bytes()
    records = load(tmp_path / "whole").records
    keys = [*(("a", i, 0) for i in range(5)), *(("b", i, n) for i in (5, 6) for n in range(8))]
    assert [record.key for record in records] == keys
    assert all(record.response == decode(tokens(record.index, record.sample)) for record in records)


def test_in_a_run_it_gives_metrics_and_the_first_responses(tmp_path: Path) -> None:
    """One of each prompt first; the kept ones leave no gap where a set has no more. Rewards are
    computed at the same time."""
    one = inputs("in_threes", more="--log.responses 10")
    done: list[int] = []
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(5)
        with Grader(one.config.reward, max_response_tokens=MAX_TOKENS) as grader:
            result = evaluate(one, engine, engine.groups, grader, done.append)
    assert sum(done) == num_responses(one) == RESPONSES
    kept = [*((i, 0) for i in range(PROMPTS)), (5, 1), (6, 1), (5, 2)]
    assert [(row["prompt"], row["token_ids"], row["weight_version"]) for row in result.responses] == [
        (str(i), list(tokens(i, n)), 5) for i, n in kept
    ]
    right = {i: [tokens(i, n)[0] % 2 == 0 for n in range(1 if i < 5 else 8)] for i in range(PROMPTS)}
    assert result.metrics["val/a/mean@1"] == pytest.approx(sum(right[i][0] for i in range(5)) / 5)
    assert result.metrics["val/b/mean@8"] == pytest.approx(sum(right[5] + right[6]) / 16)
    assert result.metrics["val/b/pass@8"] == (any(right[5]) + any(right[6])) / 2
    assert result.metrics["val/a/truncated"] == 1
    assert {"val/a/maj@1", "val/b/maj@8"} < set(result.metrics)
    assert not {"val/a/pass@8", "val/b/mean@1", "val/b/maj@1"} & set(result.metrics)
