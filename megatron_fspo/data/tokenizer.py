"""The checkpoint's tokenizer, and what the rest of the run must know of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint_dir: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hugging Face checkpoint on disk: no download, no code out of the checkpoint.

    Raises ``InputError`` if the folder is not there or holds no tokenizer that transformers can read.
    """
    from transformers import AutoTokenizer  # takes seconds

    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give a Hugging Face checkpoint on disk")
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: holds no tokenizer (tokenizer_config.json is missing)")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file raises anything, down to a bare Exception of tokenizers
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{folder}: transformers cannot load the tokenizer: {reason}") from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ``InputError`` if the tokenizer has an id that the model has no row for.

    A model with more rows than the tokenizer has ids is normal: the rest is padding.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer's largest id is {largest} ({token!r}), the model's vocab_size {vocab_size}:"
            f" it must be at least {largest + 1}. Does the tokenizer belong to this checkpoint?"
        )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, checkpoint_dir: str | Path, further: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the ids that end a response, each once: the tokenizer's eos, those of ``generation_config.json``
    if the folder has one, and ``further`` ones that the user adds.

    Chat models list more than one there (Qwen3: ``<|im_end|>`` and ``<|endoftext|>``).

    Raises:
        InputError: there is none at all, the file holds something else than token ids, or ``further`` has
            some that the tokenizer does not know.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    unknown = [token for token in further if token >= len(tokenizer)]
    if unknown:
        raise InputError(
            f"rollout.stop_token_ids has {unknown}; the tokenizer's ids end at {len(tokenizer) - 1}"
        )
    path = Path(checkpoint_dir) / "generation_config.json"
    if path.is_file():
        try:
            config: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON: {error}") from error
        given = config.get("eos_token_id") if isinstance(config, dict) else config
        own = given if isinstance(given, list) else [] if given is None else [given]
        if not isinstance(config, dict) or not all(type(token) is int and token >= 0 for token in own):
            raise InputError(f"{path}: eos_token_id must be a token id or a list of them, found {given!r}")
        ids += own
    ids += further
    if not ids:
        raise InputError(
            f"{checkpoint_dir}: no stop token, neither an eos_token in tokenizer_config.json nor an"
            " eos_token_id in generation_config.json; no response could end"
        )
    return tuple(dict.fromkeys(ids))
