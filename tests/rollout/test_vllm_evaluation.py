"""An evaluation by servers that answer like vLLM: all asked for at once, stopped, and gone on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import running
from fake_server import MAX_TOKENS, tokens_of

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import TrainingError
from megatron_fspo.evaluation.records import SAMPLES, EvaluationManifest, Problem, RecordFile, load
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import Pending
from megatron_fspo.rollout.sampling import stream_seed
from megatron_fspo.trainer.evaluate import _SEED_OFFSET, evaluate, portions, responses_of, sample_and_grade
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.types import Completion, Prompt

WORDS = "--rollout.engine vllm --evaluation.samples 3 --rollout.max-batch 6 --run.seed 4 --log.responses 7"
PROMPTS = 7

pytestmark = pytest.mark.usefixtures("one_rank", "short_waits")


def even(prompt: Prompt, completion: Completion, response: str) -> float:
    return float(completion.token_ids[0] % 2 == 0)


def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    return " ".join(map(str, ids))


ALIKE = "[{file = 'a'}, {file = 'b'}]"
OWN = "[{file = 'a', samples = 1}, {file = 'b', samples = 8}]"


def inputs(reward: str = "even", *, sets: str = ALIKE, more: str = "") -> Inputs:
    words = f"{WORDS} --rollout.max-response-tokens {MAX_TOKENS} --reward.extract whole"
    words += f" --reward.name {__name__}:{reward}"
    return Inputs(
        config=load_config(
            REPO / "examples/make_sum/run.toml",
            [*words.split(), *more.split(), "--data.validation", sets],
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


def groups() -> ParallelGroups:
    world = dist.group.WORLD
    assert world is not None
    return ParallelGroups(tp=world, pp=world, cp=world, dp=world, dp_cp=world, ep=world)


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


def test_all_is_asked_for_at_once_and_a_stopped_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grader: Grader
) -> None:
    one = inputs()
    assert [len(portion.prompts) for portion in portions(one, 1)] == [2, 2, 1, 2]
    with running(tmp_path / "weights") as (engine, fakes, _):
        engine.update_weights(0)
        submit, asked, written = engine.submit, [], []

        def counted(prompts: Sequence[Prompt], *more: Any) -> Pending:
            asked.append(len(prompts))
            return submit(prompts, *more)

        monkeypatch.setattr(engine, "submit", counted)
        file = opened(tmp_path / "whole", one, lambda done: written.append((done, sum(asked))))
        sample_and_grade(one, engine, groups(), grader, None, file)
        assert written == [
            (done, PROMPTS) for done in range(4)
        ]  # nothing was waited for before all was asked
        assert sum(len(fake.answered) for fake in fakes) == 3 * PROMPTS
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(0)
        with pytest.raises(TrainingError, match="the disk is full"):
            sample_and_grade(one, engine, groups(), grader, None, opened(tmp_path / "stopped", one, full))
    with running(tmp_path / "weights") as (engine, fakes, _):
        engine.update_weights(0)
        file = opened(tmp_path / "stopped", one)
        assert (file.done, file.left) == (2, 9)
        sample_and_grade(one, engine, groups(), grader, None, file)
        assert sum(len(fake.answered) for fake in fakes) == 9
    assert (tmp_path / "stopped" / SAMPLES).read_bytes() == (tmp_path / "whole" / SAMPLES).read_bytes()
    for record in load(tmp_path / "whole").records:
        tokens = tokens_of(stream_seed(4 + _SEED_OFFSET, record.index, record.sample))
        assert (record.response, record.tokens) == (decode(tokens), MAX_TOKENS)
        assert record.score == float(tokens[0] % 2 == 0) and record.answer == record.response
        assert record.dataset == ("b" if record.index > 4 else "a")


def test_in_a_run_it_gives_metrics_and_the_first_responses(tmp_path: Path, grader: Grader) -> None:
    one = inputs()
    done: list[int] = []
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(5)
        found = evaluate(one, engine, groups(), grader, done.append)
    assert sum(done) == 3 * PROMPTS
    # One response of each prompt first: seven prompts, seven responses.
    assert [row["prompt"] for row in found.responses] == [str(i) for i in range(PROMPTS)]
    assert {row["weight_version"] for row in found.responses} == {5}
    first = torch.tensor(
        [
            [tokens_of(stream_seed(4 + _SEED_OFFSET, i, n))[0] % 2 == 0 for n in range(3)]
            for i in range(PROMPTS)
        ]
    ).double()
    assert found.metrics["val/a/mean@3"] == pytest.approx(first[:5].mean().item())
    assert found.metrics["val/b/mean@3"] == pytest.approx(first[5:].mean().item())
    assert found.metrics["val/b/pass@3"] == pytest.approx(first[5:].any(1).double().mean().item())
    assert found.metrics["val/a/truncated"] == 1


def test_sets_with_samples_of_their_own(tmp_path: Path, grader: Grader) -> None:
    """The responses are those that any other k gives; the kept ones leave no gap where a set has no more."""
    one = inputs(sets=OWN, more="--log.responses 10")
    done: list[int] = []
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(0)
        found = evaluate(one, engine, groups(), grader, done.append)
    assert sum(done) == responses_of(one) == 5 * 1 + 2 * 8
    kept = [*((i, 0) for i in range(PROMPTS)), (5, 1), (6, 1), (5, 2)]
    assert [(row["prompt"], row["token_ids"]) for row in found.responses] == [
        (str(i), list(tokens_of(stream_seed(4 + _SEED_OFFSET, i, n)))) for i, n in kept
    ]
    assert {"val/a/mean@1", "val/a/maj@1", "val/b/mean@8", "val/b/pass@8", "val/b/maj@8"} < set(found.metrics)
    assert not {"val/a/pass@8", "val/b/mean@1", "val/b/maj@1"} & set(found.metrics)


def test_sets_with_samples_of_their_own_stopped_and_gone_on_with(tmp_path: Path, grader: Grader) -> None:
    one, out = inputs(sets=OWN), tmp_path / "out"
    assert [len(portion.prompts) for portion in portions(one, 1)] == [5, 1, 1]
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(0)
        with pytest.raises(TrainingError, match="the disk is full"):
            sample_and_grade(one, engine, groups(), grader, None, opened(out, one, full))
        file = opened(out, one)
        assert (file.done, file.left) == (2, 8)
        sample_and_grade(one, engine, groups(), grader, None, file)
    saved = load(out)
    assert saved.manifest.samples == {"a": 1, "b": 8}
    assert [record.key for record in saved.records] == [
        *(("a", i, 0) for i in range(5)),
        *(("b", i, n) for i in (5, 6) for n in range(8)),
    ]
    for record in saved.records:
        assert record.response == decode(
            tokens_of(stream_seed(4 + _SEED_OFFSET, record.index, record.sample))
        )


def slow(prompt: Prompt, completion: Completion, response: str) -> float:
    time.sleep(1.0)
    return 1.0


def test_a_slow_reward_is_waited_for_once(tmp_path: Path) -> None:
    """Each of the 21 responses takes it 1 s, all of them beside each other, and beside the sampling."""
    one = inputs("slow")
    with running(tmp_path / "weights") as (engine, _, _):
        engine.update_weights(0)
        with Grader(one.config.reward, max_response_tokens=MAX_TOKENS) as grader:
            began = time.monotonic()
            found = evaluate(one, engine, groups(), grader)
            took = time.monotonic() - began
    assert found.metrics["val/a/mean@3"] == 1.0
    assert 1 <= took < 10
