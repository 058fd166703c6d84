"""A checkpoint's ``config.json``, with errors that name the file and the key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError

_LARGEST = 1e12
_COMMON = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that a multimodal model may have outside of its parts."""


class ConfigFile:
    """The keys of a ``config.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path} is missing; a Hugging Face checkpoint folder must have it")
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"{path} must be a JSON object")
        self.values: dict[str, Any] = values

    def part(self, key: str) -> ConfigFile:
        """Return one part of a multimodal model's config, with the common keys."""
        own, part = self.required(key, dict), copy.copy(self)
        common = {name: self.values[name] for name in _COMMON if self.optional(name) is not None}
        for name, value in common.items():
            if own.get(name) not in (None, value):
                raise self.error(name, f"is {value!r:.50}, but in {key} {own[name]!r:.50}")
        part.values = own | common
        return part

    def error(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.path}: {key} {problem}")

    def optional(self, key: str) -> Any:
        """Return the value, or None if the key is absent or null: transformers writes both for "unset"."""
        return self.values.get(key)

    def required(self, key: str, *types: type) -> Any:
        value = self.optional(key)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) not in types:  # not isinstance: true is an int
            raise self.error(key, f"is {value!r}; it must be {' or '.join(t.__name__ for t in types)}")
        return value

    def check(self, key: str, legal: Any) -> None:
        """Raise ``InputError`` if the key has another value than the only legal one."""
        if self.optional(key) not in (None, legal):
            raise self.error(key, f"is {self.values[key]!r:.50}; only {legal!r} is supported")

    def size(self, key: str, most: int = 2**24) -> int:
        value: int = self.required(key, int)
        if not 1 <= value <= most:
            raise self.error(key, f"is {value!r:.50}; it must be from 1 to {most}")
        return value

    def positive(self, key: str, value: Any) -> float:
        """Return ``value``, which a key has, as a finite number above 0."""
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise self.error(key, f"is {value!r:.50}; it must be a number above 0, at most {_LARGEST:g}")
        return float(value)

    def factor(self, key: str) -> float:
        """Return a factor that is 1 if the key is absent."""
        value = self.optional(key)
        return 1.0 if value is None else self.positive(key, value)
