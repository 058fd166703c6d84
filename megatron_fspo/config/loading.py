"""Reads TOML files and ``--section.key value`` overrides into a :class:`~megatron_fspo.config.Config`."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_fspo.config.data import DataSet
from megatron_fspo.config.schema import Config
from megatron_fspo.errors import InputError, InputErrors

Layer = Path | Mapping[str, Any]


def load_config(files: Layer | Sequence[Layer], overrides: Sequence[str] = ()) -> Config:
    """Read and check the configuration of a run.

    Args:
        files: a TOML file, or a tree of sections, or several: later ones override keys of earlier ones.
            Lists and tables are replaced as a whole, and so is ``[loss]`` or ``[correction]`` if a file names
            another one.
        overrides: command-line words, ``--loss.c-high 0.04`` or ``--loss.c-high=0.04``. Values are parsed as
            TOML, or as plain strings if that fails or the key is text (``--run.name 2026-10-17``). Dashes and
            underscores are equivalent.

    Raises:
        InputErrors: one line per wrong key, with the file, the key, the value and what is legal.
        InputError: a file cannot be read.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [files] if isinstance(files, Path | Mapping) else list(files)
    paths = ["the program" if isinstance(layer, Mapping) else layer for layer in layers]
    for path, given in zip(paths, layers, strict=True):
        try:
            if isinstance(given, Mapping):
                layer = {section: dict(keys) for section, keys in given.items()}
            else:
                layer = tomllib.loads(given.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: {_not_toml(Path(path), error)}") from None
        _lay_over(tree, layer)
        origins |= {f"{section}.{key}": str(path) for section, keys in layer.items()
                    for key in (keys if isinstance(keys, dict) else ())}  # fmt: skip
        origins |= dict.fromkeys(layer, str(path))
    return make_config(tree, overrides, source=" + ".join(map(str, paths)), origins=origins)


def _not_toml(path: Path, error: Exception) -> str:
    """Return what is wrong with a file, with its line."""
    if path.suffix in (".yaml", ".yml"):
        return "YAML is not read; write the same keys as TOML, see examples/make_sum/run.toml"
    number = re.search(r"at line (\d+)", str(error))
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    line = lines[int(number[1]) - 1 :][:1] if number else []
    return f"not TOML: {error}{''.join(f': {text.strip()}' for text in line)}"


def make_config(
    tree: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str,
    origins: Mapping[str, str] | None = None,
) -> Config:
    """Check a configuration. ``tree`` is section → key → value, and is modified in place; ``source`` is its
    origin, and ``origins`` that of single keys, for messages. Raises as :func:`load_config`."""
    origin_of = dict(origins or {})
    for key, value in _parse_overrides(overrides):
        _set(tree, key, value)
        origin_of[key] = f"--{key}"
    for section in UNIONS:
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section].setdefault("name", variants_of(section)[0])
    wrong = _take_words(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # Unknown keys before missing ones, which they may be, misspelt.
        details = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        wrong |= {key: line for key, line in dict(map(_line, details)).items() if key not in wrong}
    if wrong:
        both = f"{source} + command line" if overrides else source
        lines = []
        for key, line in wrong.items():  # prefixed with its file, or with the flag instead of the key
            origin = origin_of.get(key.partition("[")[0], source if "." in key else both)
            flag = origin.startswith("--") and line.startswith(key)
            lines.append(f"--{line}" if flag else f"{origin}: {line}")
        raise InputErrors(lines)
    return config


def _lay_over(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Update ``tree`` in place with the sections of a later file."""
    for section, keys in layer.items():
        below = tree.get(section)
        if not (isinstance(keys, dict) and isinstance(below, dict)):
            tree[section] = keys
            continue
        named = below.get("name", variants_of(section)[0]) if section in UNIONS else None
        # Another loss has other keys. A file without a name changes the current loss.
        other = named is not None and keys.get("name", named) != named
        tree[section] = keys if other else below | keys


def save_config(config: Config, path: Path) -> None:
    """Write the configuration as TOML that :func:`load_config` reads back unchanged."""
    import tomli_w  # missing in other trainers' environments, where `explain` and `doctor` run

    tree = config.model_dump(mode="json", exclude_none=True)
    for key, field, _ in legal_keys():
        section, _, name = key.partition(".")
        if Path in _kinds(field.annotation) and tree[section].get(name) == "none":
            tree[section][name] = "./none"  # a file of that name; the bare word unsets the key
    # Atomic: a program killed meanwhile leaves the old file.
    partial = path.with_suffix(".partial")
    partial.write_text(tomli_w.dumps(tree), encoding="utf-8")
    partial.rename(path)


ON_RESUME: Mapping[str, str] = {
    **dict.fromkeys("run evaluation checkpoint log vllm".split(), ""),
    "parallel": " (the same numbers up to rounding)",
    **dict.fromkeys(
        "model lora fp8 moe data reward environment teacher rollout loss correction batch optimizer".split(),
        " (other numbers from here on)",
    ),
}
"""What a change of a section's keys does to a resumed run, unless it is refused."""


def config_changes(config: Config) -> dict[str, str]:
    """Return the differences from the run's ``config.toml``, ``key: old -> new``, and what each does to a
    resumed run. Raises ``InputError`` if that file is not a valid configuration."""
    path = config.run_folder / "config.toml"
    if not path.exists():
        return {}
    old = load_config(path)
    before, after = (one.model_dump(mode="json") for one in (old, config))
    first, last = (one.optimizer.over(one.optimizer_steps).lr_decay_steps for one in (old, config))
    falls = config.optimizer.lr_decay != "constant" and first != last
    decay = f"; the decay of lr ends at optimizer step {last}, not {first}" * falls
    return {
        f"{section}.{key}: {before[section].get(key)} -> {keys.get(key)}": ON_RESUME[section]
        + (decay if section in ("run", "batch", "optimizer") else "")
        for section, keys in after.items()
        for key in sorted(keys.keys() | before[section].keys())
        if before[section].get(key) != keys.get(key)
    }


def legal_keys() -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield all keys in order: ``section.key``, its field, and the variant that has it ("": all of them)."""
    for section, field in Config.model_fields.items():
        variants = _models(field)
        seen: set[str] = set()
        for model in variants:
            for key, leaf in model.model_fields.items():
                others = [other.model_fields.get(key) for other in variants]
                same = (leaf.default, leaf.description)
                shared = all(other and (other.default, other.description) == same for other in others)
                if (key == "name" and len(variants) > 1) or (shared and key in seen):
                    continue
                seen.add(key)
                yield f"{section}.{key}", leaf, "" if shared else str(model.model_fields["name"].default)
        if len(variants) > 1:
            yield f"{section}.name", variants[0].model_fields["name"], ""


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the section's model, or the variants of a union."""
    annotation = field.annotation
    if isinstance(annotation, type):
        return [annotation]
    return list(get_args(annotation))


UNIONS = tuple(section for section, field in Config.model_fields.items() if len(_models(field)) > 1)
"""Sections with variants, which ``name`` selects; the default is the first variant."""


def variants_of(section: str) -> list[str]:
    """Return the values of a section's ``name``."""
    return [str(model.model_fields["name"].default) for model in _models(Config.model_fields[section])]


def _parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word:
            raise InputError(f"unexpected argument {word!r}: overrides are --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"--{key} needs a value")
            text = rest.pop(0)
        key = key.replace("-", "_")
        yield key, _read_value(key, text)


def _read_value(key: str, text: str) -> Any:
    kinds = next((_kinds(field.annotation) for name, field, _ in legal_keys() if name == key), set())
    if text == "none" and {str, NoneType} <= kinds:
        return None  # the bare word; in quotes it is text, as in a file
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    if isinstance(value, str) or (isinstance(value, list) and tuple in kinds):
        return value
    # Names and paths that look like a number, date or boolean are text.
    return text if kinds & {str, Path} else value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types of a key, for containers without those of their items."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {get_origin(annotation) or annotation}


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    section, _, key = dotted.partition(".")
    branch = tree.setdefault(section, {})
    # --reward.also.my_package.module:f 0.1: all after the table's name is one key.
    table, inner, entry = key.partition(".")
    tables = {key for key, field, _ in legal_keys() if get_origin(field.annotation) is Mapping}
    if inner and isinstance(branch, dict) and f"{section}.{table}" in tables:
        section, branch, key = f"{section}.{table}", branch.setdefault(table, {}), entry
    if not isinstance(branch, dict):
        raise InputError(f"{section} is a section, not a value")
    branch[key] = value


def _take_words(tree: dict[str, Any]) -> dict[str, str]:
    """Replace ``"none"`` by None for keys that may be None but not text, as TOML has no null. Return, by key,
    errors of booleans for keys of other types, which pydantic would convert to 1 and 0."""
    annotations: dict[str, Any] = {key: field.annotation for key, field, _ in legal_keys()}
    wrong: dict[str, str] = {}
    for section, keys in tree.items():
        for name, value in list(keys.items()) if isinstance(keys, dict) else []:
            key = f"{section}.{name}"
            kinds = _kinds(annotations.get(key, bool))
            if value == "none" and NoneType in kinds and str not in kinds:
                keys[name] = None
            wrong |= _wrong_bool(key, value, annotations.get(key, bool))
            for number, table in enumerate(value if section == "data" and isinstance(value, list) else []):
                for inner, entry in table.items() if isinstance(table, dict) else ():
                    if inner in DataSet.model_fields:
                        annotation = DataSet.model_fields[inner].annotation
                        wrong |= _wrong_bool(f"{key}[{number}].{inner}", entry, annotation)
    return wrong


def _wrong_bool(key: str, value: Any, annotation: Any) -> dict[str, str]:
    if not isinstance(value, bool) or bool in _kinds(annotation):
        return {}
    literal = get_origin(annotation) is Literal
    legal = f"one of {', '.join(get_args(annotation))}" if literal else "neither true nor false"
    return {key: f"{key} = {str(value).lower()}: must be {legal}"}


def _line(details: Mapping[str, Any]) -> tuple[str, str]:
    """Convert one of pydantic's errors: return its key and a message in the terms of the file."""
    path = [str(part) for part in details["loc"]]
    kind, value, key, variant = details["type"], details["input"], ".".join(path), ""
    message: str = details["msg"].removeprefix("Value error, ")
    if path[:1] == ["data"] and len(path) > 2:  # data.<train or validation>.<tag>.<number>.<key>
        key = ".".join([".".join(path[:2]) + "".join(f"[{number}]" for number in path[3:4]), *path[4:5]])
        if kind == "extra_forbidden":
            close = difflib.get_close_matches(path[-1], DataSet.model_fields, n=1, cutoff=0.5)
            return key, f"unknown key {key}{f'; did you mean {close[0]}?' if close else ''}"
    elif len(path) == 3 and path[0] in UNIONS:
        # A union's location includes the variant's tag (loss.fspo.c_low), which the file has not.
        key, variant = f"{path[0]}.{path[2]}", path[1]
    if kind == "extra_forbidden":
        return key, f"unknown key {key}{_nearest(key, variant)}"
    if kind == "missing":
        return key, f"{key} is missing"
    if kind.startswith("union_tag") and key:
        name = value.get("name") if isinstance(value, dict) else value
        close = difflib.get_close_matches(str(name), variants_of(path[0]), n=1)
        meant = f"did you mean {close[0]}? It " if close else ""
        return key, f"{key}.name = {name!r}: {meant}must be one of {', '.join(variants_of(path[0]))}"
    if kind != "value_error":  # pydantic's own words
        message = message[0].lower() + message[1:]
    return key, f"{key} = {value!r}: {message}" if key else message


def _nearest(key: str, variant: str) -> str:
    owners = [owner for name, _, owner in legal_keys() if name == key]
    if owners:
        section = key.partition(".")[0]
        return f" for {section}.name = {variant}; it belongs to {', '.join(owners)}"
    legal = [name for name, _, owner in legal_keys() if owner in ("", variant)]
    legal += list(Config.model_fields) if "." not in key else []
    section, _, name = key.rpartition(".")
    short = f"{section}.{''.join(word[:1] for word in name.split('_'))}"  # learning_rate: lr
    close = [short] if short in legal else difflib.get_close_matches(key, legal, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
