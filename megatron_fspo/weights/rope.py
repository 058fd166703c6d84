"""Read how a ``config.json`` rotates queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_fspo.weights.architecture import Yarn
from megatron_fspo.weights.config_file import ConfigFile

# Megatron's scaled RoPE supports only these values, which Llama 3.1, 3.2 and 3.3 use.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
"""What transformers takes for a key without a value, which latent attention must have."""
_SCALED = {"deepseek_v3": "yarn", "olmo2": "llama3", "olmo3": "yarn", "gemma3_text": "linear"}
"""Family → the scaled RoPE that it may have; the others may have Llama 3's and, of whole heads, YaRN."""
_THETAS = {"gemma3_text": (1e6, 1e4), "olmo3": (5e5, 5e5)}
"""Family whose layers with a window have a RoPE of their own → base of the other layers, and of these,
without a key."""
_PARTIAL = {
    "glm4": 0.5, "glm4_moe": 0.5, "phi3": 1.0, "qwen3_next": 0.25, "qwen3_5_text": 0.25,
    "qwen3_5_moe_text": 0.25,
}  # fmt: skip
"""Family that may rotate a share of a head → the share without the key."""


def read_rope(config: ConfigFile, family: str) -> dict[str, Any]:
    """Return the fields of :class:`.Architecture` for RoPE; refuse kinds that the family may not have:
    Megatron's YaRN rotates whole heads."""
    key, rope = _rope(config, family)
    kind = rope["rope_type"]
    scaled = [_SCALED[family]] if family in _SCALED else ["llama3", "yarn"][: 1 if family in _PARTIAL else 2]
    if kind not in (legal := ["default", *scaled]):
        raise config.error(key, f"has rope_type {kind!r}; {family} may have {' or '.join(legal)}")
    theta = _theta(config, family, rope)
    found: dict[str, Any] = {"rope_theta": theta, "rotary_share": _share(config, family, rope)}
    found["window_rope_theta"] = _window_theta(config, family, theta, kind)
    if kind == "default":
        return found
    for name, value in _LLAMA3_ROPE.items() if kind == "llama3" else ():
        if rope.get(name) != value:
            raise config.error(key, f"has {name} {rope.get(name)!r}; only {value} is supported")
    factor = config.positive(f"{key}.factor", rope.get("factor"))
    if kind == "yarn":
        return found | {"yarn": _yarn(config, family == "deepseek_v3", key, rope, factor)}
    return found | {"rope_factor" if kind == "llama3" else "rope_divisor": factor}


def _rope(config: ConfigFile, family: str) -> tuple[str, dict[str, Any]]:
    """Return ``rope_parameters`` (transformers 5) and ``rope_scaling`` (4) as one, and the last key given."""
    rope: dict[str, Any] = {}
    where = "rope_parameters"
    for key in ("rope_parameters", "rope_scaling"):
        given = config.optional(key) or {}
        if not isinstance(given, Mapping):
            raise config.error(key, f"is {given!r}; it must be an object")
        if key == "rope_parameters" and family in _THETAS:
            given = _of_layers(config, given, "full_attention")
        where = key if given else where
        for name, value in given.items():
            name = "rope_type" if name == "type" else name
            if rope.setdefault(name, value) != value:
                raise config.error(key, f"has {name} {value!r:.50}, and elsewhere it is {rope[name]!r:.50}")
    return where, {"rope_type": "default"} | rope


def _of_layers(config: ConfigFile, given: Mapping[str, Any], layers: str) -> Mapping[str, Any]:
    """Return the part of ``rope_parameters`` for these layers."""
    parts = {name: given.get(name) or {} for name in ("full_attention", "sliding_attention")}
    if given.keys() - parts or not all(isinstance(part, Mapping) for part in parts.values()):
        raise config.error("rope_parameters", f"must have an object for each of {', '.join(parts)}")
    return parts[layers]


def _theta(config: ConfigFile, family: str, rope: Mapping[str, Any]) -> float:
    thetas = [config.optional("rope_theta"), rope.get("rope_theta")]
    given = [config.positive("rope_theta", theta) for theta in thetas if theta is not None]
    if not given and family not in _THETAS:
        raise config.error("rope_theta", "is missing at the top level and in rope_parameters")
    if len(set(given)) > 1:
        raise config.error("rope_theta", f"is {given[0]!r}, but rope_parameters has {given[1]!r}")
    theta = given[0] if given else _THETAS[family][0]
    if theta != int(theta):
        raise config.error("rope_theta", f"is {theta!r}; Megatron supports whole numbers only")
    return theta


def _window_theta(config: ConfigFile, family: str, whole: float, kind: str) -> float | None:
    """Read the base of RoPE in layers with a window; None if their RoPE is that of the others."""
    if family not in _THETAS:
        return None
    key = "rope_parameters"
    own = dict(_of_layers(config, config.optional(key) or {}, "sliding_attention"))
    theta = own.pop("rope_theta", None)
    if own.pop("rope_type", "default") != "default" or own:
        raise config.error(key, f"scales RoPE in layers with a window: {own!r:.50}")
    if theta is None and family == "gemma3_text":
        theta = config.optional("rope_local_base_freq")
    elif theta is None and config.optional("rope_theta") not in (None, _THETAS[family][1]):
        # Releases of transformers differ.
        raise config.error("rope_theta", f"may be that of layers with a window or not; give it in {key}")
    found = _THETAS[family][1] if theta is None else config.positive(key, theta)
    return None if found == whole and kind == "default" else found


def _yarn(config: ConfigFile, latent: bool, key: str, rope: Mapping[str, Any], factor: float) -> Yarn:
    longest = "original_max_position_embeddings"
    names = [name for name in _YARN if latent or rope.get(name)]
    numbers = _YARN | {name: config.positive(f"{key}.{name}", rope.get(name)) for name in names}
    if not {"mscale", "mscale_all_dim"} <= {*names}:  # one without the other has no effect
        numbers |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    one, other = (0.1 * numbers[name] * math.log(max(factor, 1)) + 1 for name in ("mscale", "mscale_all_dim"))
    usual, truncate = None if latent else one / other, rope.get("truncate", True)
    if rope.get("attention_factor") not in (None, usual) or truncate not in (True, latent):
        raise config.error(key, "has attention_factor or truncate, which is not supported")
    return Yarn(
        rotary_scaling_factor=factor,
        original_max_position_embeddings=int(config.positive(f"{key}.{longest}", rope.get(longest))),
        correction_range_round_to_int=bool(truncate),
        **numbers,
    )


def _share(config: ConfigFile, family: str, rope: Mapping[str, Any]) -> float:
    """Read partial_rotary_factor (transformers 4 at the top level, 5 in ``rope_parameters``)."""
    key = "partial_rotary_factor"
    given = [
        config.positive(key, share) for share in (config.optional(key), rope.get(key)) if share is not None
    ]
    if len({*given}) > 1 or any(share > 1 for share in given):
        raise config.error(key, f"is {given}; it must be one number up to 1")
    share = given[0] if given else _PARTIAL.get(family, 1.0)
    if share < 1 and family not in _PARTIAL:
        raise config.error(key, f"is {share}; {family} models rotate whole heads")
    return share
