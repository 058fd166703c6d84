"""Writes docs/config.md from the configuration's own code: ``make docs``."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_fspo.config import Config

TARGET = Path(__file__).with_name("config.md")
HEAD = """\
# Configuration

A run is one TOML file; `--section.key value` on the command line changes a key of it. A key that is not
here is refused. Made by `make docs` from `megatron_fspo/config/`.

`--config` may be given several times, for what differs from run to run in small files of its own:

```
megatron-fspo train --config examples/qwen3_8b/run.toml --config examples/qwen3_8b/rloo.toml
```

A later file changes the keys that it has, and the command line changes both. A key with a list or a table
is replaced as a whole, so `[[data.validation]]` tables replace all of those before. A file that names another
loss or correction (`[loss] name = ...`) replaces that section. `config.toml` in the run's folder has the
result.

`none` unsets a key that may be none: `--log.group none`. In a file, where TOML has no word for it, `"none"`
does, but not for a key that takes text: `system_prompt = "none"` is that word, and so is
`--data.system_prompt '"none"'`.
"""
LIMITS = {"Gt": ("gt", ">"), "Ge": ("ge", "≥"), "Lt": ("lt", "<"), "Le": ("le", "≤")}


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, field in Config.model_fields.items():
        models = _models(field)
        parts.append(f"\n## [{section}]\n")
        for model in models:
            if len(models) > 1:
                parts.append(f'\n### {section}.name = "{model.model_fields["name"].default}"\n')
            parts.append(f"\n{(model.__doc__ or '').strip()}\n{_table(model, skip_name=len(models) > 1)}")
            keys = {key: _tables_in(leaf.annotation) for key, leaf in model.model_fields.items()}
            for table in dict.fromkeys(table for tables in keys.values() for table in tables):
                names = [f"[[{section}.{key}]]" for key, tables in keys.items() if table in tables]
                parts.append(f"\n### {', '.join(names)}\n")
                parts.append(f"\n{(table.__doc__ or '').strip()}\n{_table(table, skip_name=False)}")
    return "".join(parts)


def _table(model: type[BaseModel], *, skip_name: bool) -> str:
    head = ["", "| key | legal | default | |", "|---|---|---|---|"]
    lines = []
    for key, field in model.model_fields.items():
        if key == "name" and skip_name:
            continue
        default = "required" if field.is_required() else _default(field.default)
        lines.append(f"| `{key}` | {_legal(field)} | {default} | {field.description or ''} |")
    return "\n".join([*head, *lines]) + "\n" if lines else ""


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Models of the tables that a key may be a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _tables_in(part)]


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    annotation = field.annotation
    return [annotation] if isinstance(annotation, type) else list(get_args(annotation))


def _default(value: object) -> str:
    return "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _legal(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(limit, name):g}"
        for limit in [*field.metadata, *_annotated(field.annotation)]
        for name, sign in [LIMITS.get(type(limit).__name__, ("", ""))]
        if name
    ]
    return " ".join([_type(field.annotation), *([", ".join(limits)] if limits else [])])


def _annotated(annotation: Any) -> list[Any]:
    """Limits that stand inside ``Annotated[float, ...] | None``."""
    found = []
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            found += [limit for info in part.__metadata__ for limit in getattr(info, "metadata", [info])]
    return found


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return f"list of {_type(get_args(annotation)[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "tables"
    if get_origin(annotation) is Mapping:
        return "table of numbers"
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is not None:
        return " or ".join(_type(part) for part in get_args(annotation))
    names = {str: "text", int: "integer", float: "number", bool: "`true` `false`", type(None): "none"}
    return names.get(annotation, "path")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
