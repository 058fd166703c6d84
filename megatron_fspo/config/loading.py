"""A TOML file and ``--section.key value`` overrides become a :class:`~megatron_fspo.config.Config`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megatron_fspo.config.data import DataSet
from megatron_fspo.config.schema import Config
from megatron_fspo.errors import InputError, InputErrors


def load_config(files: Path | Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a run.

    Args:
        files: a TOML file; or several, of which a later one changes keys of those before. It replaces lists
            and tables of a key as a whole, and all of ``[loss]`` or ``[correction]`` where it names another.
        overrides: command-line words, ``--loss.c-high 0.04`` or ``--loss.c-high=0.04``; values are read
            as TOML, and as plain strings where that fails or the key takes text (``--run.name 2026-10-17``).
            Dashes and underscores are the same.

    Raises:
        InputErrors: per wrong key a line that names the file, the key, the value and what is legal.
        InputError: a file cannot be read.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    paths = [files] if isinstance(files, Path) else list(files)
    for path in paths:
        try:
            layer = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not TOML: {error}") from None
        _lay_over(tree, layer)
        origins |= {f"{section}.{key}": str(path) for section, keys in layer.items()
                    for key in (keys if isinstance(keys, dict) else ())}  # fmt: skip
        origins |= dict.fromkeys(layer, str(path))
    return make_config(tree, overrides, source=" + ".join(map(str, paths)), origins=origins)


def make_config(
    tree: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str,
    origins: Mapping[str, str] | None = None,
) -> Config:
    """Check a configuration that is read already.

    Args:
        tree: by section the keys and values; is changed.
        overrides: as :func:`load_config` has them.
        source: where it is from, for messages.
        origins: by key, where that one is from.
    """
    origin_of = dict(origins or {})
    for key, value in _parse_overrides(overrides):
        _set(tree, key, value)
        origin_of[key] = f"--{key}"
    for section in _UNIONS:
        if isinstance(tree.setdefault(section, {}), dict):
            tree[section].setdefault("name", _variants(section)[0])
    wrong = _take_words(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # An unknown key before a missing one: it may be the missing one, misspelt.
        details = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        wrong |= {key: line for key, line in dict(map(_line, details)).items() if key not in wrong}
    if wrong:
        both = f"{source} + command line" if overrides else source
        lines = []
        for key, line in wrong.items():  # with its file, or with the flag in place of the key
            origin = origin_of.get(key.partition("[")[0], source if "." in key else both)
            flag = origin.startswith("--") and line.startswith(key)
            lines.append(f"--{line}" if flag else f"{origin}: {line}")
        raise InputErrors(lines)
    return config


def _lay_over(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Change ``tree`` by the sections of a further file."""
    for section, keys in layer.items():
        below = tree.get(section)
        if not (isinstance(keys, dict) and isinstance(below, dict)):
            tree[section] = keys
            continue
        named = below.get("name", _variants(section)[0]) if section in _UNIONS else None
        # Another loss has other keys. A file that names none changes the one that is there.
        other = named is not None and keys.get("name", named) != named
        tree[section] = keys if other else below | keys


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as TOML that :func:`load_config` reads back to the same."""
    import tomli_w  # not there in other trainers' environments, where `explain` and `doctor` run

    tree = config.model_dump(mode="json", exclude_none=True)
    for key, field, _ in legal_keys():
        section, _, name = key.partition(".")
        if Path in _kinds(field.annotation) and tree[section].get(name) == "none":
            tree[section][name] = "./none"  # a file of that name: the word alone says that there is none
    # A program killed half-way leaves the old file.
    partial = path.with_suffix(".partial")
    partial.write_text(tomli_w.dumps(tree), encoding="utf-8")
    partial.rename(path)


def config_changes(config: Config) -> list[str]:
    """Compare with the ``config.toml`` of the run, if it has one; returns ``key: old -> new`` lines.

    Raises:
        InputError: the file there is not a configuration.
    """
    path = config.run_folder / "config.toml"
    if not path.exists():
        return []
    before, after = load_config(path).model_dump(mode="json"), config.model_dump(mode="json")
    return [
        f"{section}.{key}: {before[section].get(key)} -> {keys.get(key)}"
        for section, keys in after.items()
        for key in sorted(keys.keys() | before[section].keys())
        if before[section].get(key) != keys.get(key)
    ]


def legal_keys() -> Iterator[tuple[str, FieldInfo, str]]:
    """Every key as (``section.key``, its field, the variant that has it or ""), in the order of the file."""
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


def describe_keys() -> str:
    """The reference of all keys, one line each, for ``--help``."""
    lines = []
    for key, field, variant in legal_keys():
        word = str(field.default)
        word = "none" if field.default is None else word.lower() if isinstance(field.default, bool) else word
        default = "required" if field.is_required() else f"default {word}"
        text = field.description or ""
        section, _, name = key.partition(".")
        if name == "name" and section in _UNIONS:
            *first, last = _variants(section)
            text = f"{', '.join(first)} or {last}"
        owner = f" [{variant}]" if variant else ""
        lines.append(f"  --{key.replace('_', '-'):<32} {text}{owner} ({default})")
    return "\n".join(lines)


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    """The section's model, or the variants of a union."""
    annotation = field.annotation
    if isinstance(annotation, type):
        return [annotation]
    return list(get_args(annotation))


_UNIONS = tuple(section for section, field in Config.model_fields.items() if len(_models(field)) > 1)
"""Sections that are one of several, by ``name``; the first is the default."""


def _variants(section: str) -> list[str]:
    return [str(model.model_fields["name"].default) for model in _models(Config.model_fields[section])]


def _parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or "." not in word:
            raise InputError(f"unexpected argument {word!r}: overrides look like --section.key value")
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
        return None  # without quotes; with them it is text, as in a file
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    if isinstance(value, str) or (isinstance(value, list) and tuple in kinds):
        return value
    # A number, a date or a boolean in a name of a file is text.
    return text if kinds & {str, Path} else value


def _kinds(annotation: Any) -> set[Any]:
    """The types that a key takes, of containers without their contents."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {get_origin(annotation) or annotation}


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    section, _, key = dotted.partition(".")
    branch = tree.setdefault(section, {})
    # --reward.also.my_package.module:f 0.1: the rest is one key of a table.
    table, inner, entry = key.partition(".")
    tables = {key for key, field, _ in legal_keys() if get_origin(field.annotation) is Mapping}
    if inner and isinstance(branch, dict) and f"{section}.{table}" in tables:
        section, branch, key = f"{section}.{table}", branch.setdefault(table, {}), entry
    if not isinstance(branch, dict):
        raise InputError(f"{section} is a section, not a value")
    branch[key] = value


def _take_words(tree: dict[str, Any]) -> dict[str, str]:
    """``"none"`` becomes None where that is legal and text is not, since TOML has no word for it; by key,
    what is wrong with true and false, which pydantic takes for 1 and 0."""
    annotations: dict[str, Any] = {key: field.annotation for key, field, _ in legal_keys()}
    wrong: dict[str, str] = {}
    for section, keys in tree.items():
        for name, value in list(keys.items()) if isinstance(keys, dict) else []:
            key = f"{section}.{name}"
            kinds = _kinds(annotations.get(key, bool))
            if value == "none" and NoneType in kinds and str not in kinds:
                keys[name] = None
            wrong |= _wrong_bool(key, value, kinds)
            for number, table in enumerate(value if section == "data" and isinstance(value, list) else []):
                for inner, entry in table.items() if isinstance(table, dict) else ():
                    if inner in DataSet.model_fields:
                        kinds = _kinds(DataSet.model_fields[inner].annotation)
                        wrong |= _wrong_bool(f"{key}[{number}].{inner}", entry, kinds)
    return wrong


def _wrong_bool(key: str, value: Any, kinds: set[Any]) -> dict[str, str]:
    if not isinstance(value, bool) or bool in kinds:
        return {}
    return {key: f"{key} = {str(value).lower()}: this key takes neither true nor false"}


def _line(details: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's complaints: its key, and a line in the words of the file."""
    path = [str(part) for part in details["loc"]]
    kind, value, key, variant = details["type"], details["input"], ".".join(path), ""
    message: str = details["msg"].removeprefix("Value error, ")
    if path[:1] == ["data"] and len(path) > 2:  # data.<files>.<form>, a number and a key of that table
        key = ".".join([".".join(path[:2]) + "".join(f"[{number}]" for number in path[3:4]), *path[4:5]])
        if kind == "extra_forbidden":
            close = difflib.get_close_matches(path[-1], DataSet.model_fields, n=1, cutoff=0.5)
            return key, f"unknown key {key}{f'; did you mean {close[0]}?' if close else ''}"
    elif len(path) == 3 and path[0] in _UNIONS:
        # A union's location carries the variant's tag (loss.fspo.c_low): the file does not.
        key, variant = f"{path[0]}.{path[2]}", path[1]
    if kind == "extra_forbidden":
        return key, f"unknown key {key}{_nearest(key, variant)}"
    if kind == "missing":
        return key, f"{key} is missing"
    if kind.startswith("union_tag") and key:
        name = value.get("name") if isinstance(value, dict) else value
        return key, f"{key}.name = {name!r}: must be one of {', '.join(_variants(path[0]))}"
    return key, f"{key} = {value!r}: {message[0].lower()}{message[1:]}" if key else message


def _nearest(key: str, variant: str) -> str:
    owners = [owner for name, _, owner in legal_keys() if name == key]
    if owners:
        section = key.partition(".")[0]
        return f": with {section}.name = {variant} there is none, it belongs to {', '.join(owners)}"
    legal = [name for name, _, owner in legal_keys() if owner in ("", variant)]
    legal += list(Config.model_fields) if "." not in key else []
    section, _, name = key.rpartition(".")
    short = f"{section}.{''.join(word[:1] for word in name.split('_'))}"  # learning_rate: lr
    close = [short] if short in legal else difflib.get_close_matches(key, legal, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
