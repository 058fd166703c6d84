"""Read how a ``config.json`` rotates queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fspo.weights.architecture import Yarn
from megatron_fspo.weights.config_file import ConfigFile

# Megatron's scaled RoPE supports only these values, which Llama 3.1, 3.2 and 3.3 use.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PARTIAL = {"glm4": 0.5, "glm4_moe": 0.5, "phi3": 1.0}
"""Family that may rotate a share of a head → the share without the key."""


def _rope(config: ConfigFile) -> tuple[str, dict[str, Any]]:
    """Return ``rope_parameters`` (transformers 5) and ``rope_scaling`` (4) as one, and the last key given."""
    rope: dict[str, Any] = {}
    where = "rope_parameters"
    for key in ("rope_parameters", "rope_scaling"):
        given = config.optional(key) or {}
        if not isinstance(given, Mapping):
            raise config.error(key, f"is {given!r}; it must be an object")
        where = key if given else where
        for name, value in given.items():
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise config.error(key, f"has {name} {value!r:.50}, and elsewhere it is {rope[name]!r:.50}")
    return where, {"rope_type": "default"} | rope


def rope_theta(config: ConfigFile) -> float:
    thetas = [config.optional("rope_theta"), _rope(config)[1].get("rope_theta")]
    given = [config.positive("rope_theta", theta) for theta in thetas if theta is not None]
    if not given:
        raise config.error("rope_theta", "is missing at the top level and in rope_parameters")
    if len(set(given)) > 1:
        raise config.error("rope_theta", f"is {given[0]!r}, but rope_parameters has {given[1]!r}")
    if given[0] != int(given[0]):
        raise config.error("rope_theta", f"is {given[0]!r}; Megatron supports whole numbers only")
    return given[0]


def rope_factor(config: ConfigFile, family: str) -> float | None:
    """Read the factor of Llama 3's scaled RoPE, None without; refuse kinds that the family may not have."""
    key, rope = _rope(config)
    legal = ("default", "yarn" if family == "deepseek_v3" else "llama3")
    if rope["rope_type"] not in legal:
        raise config.error(
            key, f"has rope_type {rope['rope_type']!r}; {family} may have {' or '.join(legal)}"
        )
    if rope["rope_type"] != "llama3":
        return None
    for name, value in _LLAMA3_ROPE.items():
        if rope.get(name) != value:
            raise config.error(key, f"has {name} {rope.get(name)!r}; only {value} is supported")
    return config.positive(f"{key}.factor", rope.get("factor"))


def yarn(config: ConfigFile) -> Yarn | None:
    key, rope = _rope(config)
    if rope["rope_type"] != "yarn":
        return None
    if rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise config.error(key, "has attention_factor or truncate, which is not supported")
    longest = "original_max_position_embeddings"
    names = (longest, "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    values = {name: config.positive(f"{key}.{name}", rope.get(name)) for name in names}
    numbers = {longest: int(values.pop(longest)), "rotary_scaling_factor": values.pop("factor")}
    return Yarn(**numbers, **values)  # type: ignore[arg-type]


def rotary_share(config: ConfigFile, family: str) -> float:
    """Read partial_rotary_factor (transformers 4 at the top level, 5 in ``rope_parameters``)."""
    key = "partial_rotary_factor"
    shares = [config.optional(key), _rope(config)[1].get(key)]
    given = [config.positive(key, share) for share in shares if share is not None]
    if len({*given}) > 1 or any(share > 1 for share in given):
        raise config.error(key, f"is {given}; it must be one number up to 1")
    share = given[0] if given else _PARTIAL.get(family, 1.0)
    if share < 1 and family not in _PARTIAL:
        raise config.error(key, f"is {share}; {family} models rotate whole heads")
    return share
