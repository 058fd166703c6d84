"""The make-sum example: the task, its data files, and the checkpoint that is shipped."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from megatron_fspo.data.prompts import load_set
from megatron_fspo.data.tasks import Source
from megatron_fspo.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from megatron_fspo.rewards import get_reward
from megatron_fspo.types import Completion, Prompt

FOLDER = Path(__file__).parents[2] / "examples" / "make_sum"
CHECKPOINT = FOLDER / "checkpoint"
sys.path.insert(0, str(FOLDER))

import make_checkpoint  # noqa: E402
import make_sum  # noqa: E402


@given(number=st.sampled_from(make_sum.NUMBERS), seed=st.integers(0, 2**32))
def test_demonstrations_are_right(number: int, seed: int) -> None:
    response = make_sum.demonstration(number, random.Random(seed))
    assert 4 <= len(response) <= make_sum.MAX_RESPONSE_TOKENS
    assert set(response[:-1]) <= set("0123456789")
    left = number
    for start in range(0, len(response) - 1, 3):
        left -= int(response[start])
        assert response[start + 1 : start + 3] == f"{left:02d}", "each remainder is what is left"
    prompt = Prompt(index=0, token_ids=(10,), text=make_sum.prompt_text(number), answer=str(number))
    completion = Completion(token_ids=(12,), log_probs=(0.0,), finish_reason="stop", weight_version=0)
    assert get_reward("make_sum")(prompt, completion, response.removesuffix(make_sum.STOP)) == 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders that two short runs of the script wrote, the second after other random numbers were drawn."""
    folders = [tmp_path_factory.mktemp("made") for _ in range(2)]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        random.seed(seed)
        make_checkpoint.main(["--steps", "2", "--seed", "5", "--out", str(folder)])
    return folders


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_script_is_deterministic(made: list[Path]) -> None:
    first, second = map(contents, made)
    assert set(first) == {"train.jsonl", "validation.jsonl"} | {
        f"checkpoint/{name}"
        for name in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    }
    assert first == second


@pytest.mark.slow
def test_shipped_files_are_what_the_script_writes(made: list[Path]) -> None:
    shipped, short = contents(FOLDER), contents(made[0])
    weights = "checkpoint/model.safetensors"
    for name in short.keys() - {weights}:
        assert shipped[name] == short[name], name
    trained, fresh = load_file(FOLDER / weights), load_file(made[0] / weights)
    assert {k: (v.shape, v.dtype) for k, v in trained.items()} == {
        k: (v.shape, v.dtype) for k, v in fresh.items()
    }
    assert all(weight.dtype == torch.float32 for weight in trained.values())
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 1_200_000


def test_shipped_prompts_read_as_prompts() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    check_vocabulary(tokenizer, json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"])
    assert stop_token_ids(tokenizer, CHECKPOINT) == (12,)
    splits = [
        load_set(Source(file=FOLDER / f"{name}.jsonl", name=name), tokenizer, max_prompt_tokens=4).prompts
        for name in ("train", "validation")
    ]
    for prompt in (prompt for split in splits for prompt in split):
        assert prompt.token_ids == (10, *divmod(int(prompt.answer), 10), 11)
        assert tokenizer.decode(prompt.token_ids) == prompt.text
    train, validation = ({int(prompt.answer) for prompt in split} for split in splits)
    assert not train & validation
    assert sorted(train | validation) == list(make_sum.NUMBERS)


def test_shipped_model_is_right_about_two_times_in_three() -> None:
    model, loading = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.dtype == torch.float32
    for numbers in (make_sum.TRAIN, make_sum.HELD_OUT):
        asked = numbers * (600 // len(numbers))
        responses = make_checkpoint.sample(model, asked, seed=1)
        assert 0.60 <= make_checkpoint.accuracy(asked, responses) <= 0.75
        lengths = [len(response) for response in responses]
        assert min(lengths) < 15
        assert max(lengths) > 85
