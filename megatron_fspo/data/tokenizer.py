"""The checkpoint's tokenizer, its vocabulary and its stop tokens."""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")
_TEMPLATE_SECONDS, _TEMPLATE_BYTES = 10.0, 2**31


def load_tokenizer(checkpoint_dir: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local Hugging Face checkpoint, without downloads or code from the checkpoint.
    Raises ``InputError`` if the folder is missing or has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer  # takes seconds

    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; must be a Hugging Face checkpoint on disk")
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(f"{folder}: holds no tokenizer (tokenizer_config.json is missing)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file may raise anything, even a bare Exception from tokenizers
        reason = str(error).strip().partition("\n")[0]
        files = [name for name in _FILES if (folder / name).is_file()]
        if not files:
            raise InputError(f"{folder}: holds no tokenizer ({_FILES[0]} is missing)") from None
        raise InputError(f"{folder / files[0]}: transformers cannot load the tokenizer: {reason}") from error
    if tokenizer.chat_template:
        _try_template(tokenizer, folder)
    return tokenizer


class _Expired(BaseException): ...


def _try_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Render two conversations with limits on memory and, in the main thread, time; ``InputError`` if the
    template exceeds one. Later conversations have no limits."""

    def expire(*_: Any) -> None:
        raise _Expired

    talk = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, expire) if in_main else None
    try:
        if limits[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (taken + _TEMPLATE_BYTES, limits[1]))
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, _TEMPLATE_SECONDS)
        for messages in (talk[:1], talk):
            try:
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:
                if isinstance(error, MemoryError):
                    raise
    except (_Expired, MemoryError):
        most = f"{_TEMPLATE_SECONDS:g} s or {_TEMPLATE_BYTES >> 30} GiB"
        raise InputError(f"{folder}: the chat template needs more than {most} for two messages") from None
    finally:
        if in_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ``InputError`` if the tokenizer has an id beyond the model's vocabulary. A model may have more
    rows than the tokenizer has ids; the others are padding."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise InputError(
            f"the tokenizer's largest id is {largest} ({token!r}), the model's vocab_size {vocab_size},"
            f" which must be at least {largest + 1}. Does the tokenizer belong to this checkpoint?"
        )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, checkpoint_dir: str | Path, further: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the ids that end a response, each once: the tokenizer's eos, those in ``generation_config.json``
    (Qwen3 lists ``<|im_end|>`` and ``<|endoftext|>``) or else ``config.json``, and ``further`` ones from the
    user.

    Raises:
        InputError: there are none, the file has invalid ids, or the tokenizer does not know some of
            ``further``.
    """
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    unknown = [token for token in further if token >= len(tokenizer)]
    if unknown:
        raise InputError(
            f"rollout.stop_token_ids has {unknown}, but the tokenizer's ids end at {len(tokenizer) - 1}"
        )
    for name in ("generation_config.json", "config.json"):  # the second counts if the first has none
        path = Path(checkpoint_dir) / name
        if not path.is_file():
            continue
        try:
            config: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON: {error}") from error
        given = config.get("eos_token_id") if isinstance(config, dict) else config
        own = given if isinstance(given, list) else [] if given is None else [given]
        if not isinstance(config, dict) or not all(type(token) is int and token >= 0 for token in own):
            raise InputError(f"{path}: eos_token_id must be a token id or a list of them, got {given!r}")
        ids += own
        if own:
            break
    ids += further
    if not ids:
        raise InputError(
            f"{checkpoint_dir}: no stop token: tokenizer_config.json has no eos_token, and"
            " generation_config.json and config.json no eos_token_id. Responses could not end; set"
            " rollout.stop_token_ids"
        )
    return tuple(dict.fromkeys(ids))
