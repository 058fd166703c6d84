"""Responses from a file, such as the ``samples.jsonl`` that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.trainer.rollout import Rollout, describe, rollout_of
from megatron_fspo.types import Completion, Prompt
from megatron_fspo.weights import Architecture

KEYS = ("prompt_token_ids", "token_ids")
Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its response."""


def read_responses(path: Path, config: Config, arch: Architecture) -> list[Row]:
    """The responses of a file of JSON lines with ``prompt_token_ids`` and ``token_ids``, and other keys.

    Raises:
        InputError: the file, the line, and what is wrong with it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not text in UTF-8") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            row = tuple(found[KEYS[0]]), tuple(found[KEYS[1]])
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}, line {number}: needs an object with {' and '.join(KEYS)}") from None
        ids = row[0] + row[1]
        if not row[0] or not row[1] or not all(type(i) is int and 0 <= i < arch.vocab_size for i in ids):
            raise InputError(
                f"{path}, line {number}: {' and '.join(KEYS)} need token ids from 0 to {arch.vocab_size - 1}"
            )
        if len(ids) > config.batch.max_tokens:
            raise InputError(
                f"{path}, line {number}: {len(ids)} tokens, more than batch.max_tokens = "
                f"{config.batch.max_tokens}"
            )
        rows.append(row)
    if not rows:
        raise InputError(f"{path} has no responses")
    return rows


def as_rollout(rows: list[Row], groups: ParallelGroups) -> Rollout:
    """Given responses as a run holds its own, one to a prompt; without rewards or log-probs."""
    size, rank = groups.dp.size(), groups.dp.rank()
    prompts = [Prompt(index=i, token_ids=prompt, text="", answer="") for i, (prompt, _) in enumerate(rows)]
    completions = [
        Completion(token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop", weight_version=0)
        for _, ids in rows
    ]
    table = torch.tensor(
        [(*describe(completion, i % size), 0.0, 0.0) for i, completion in enumerate(completions)]
    )
    held = {i: one for i, one in enumerate(completions) if i % size == rank} if groups.first_of_copy else {}
    return rollout_of(prompts, 1, table.double(), held)


def groups_of(prompts: list[tuple[int, ...]]) -> torch.Tensor:
    """[n] the same number for the same prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts])
