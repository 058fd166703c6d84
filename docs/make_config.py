"""Writes docs/config.md from the configuration's own code: ``make docs``."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_fspo.config import Config

TARGET = Path(__file__).with_name("config.md")
HEAD = """\
# Configuration

Read this if you write or change a run's configuration: it lists every key, what it accepts and its default.

A run is one TOML file. `--section.key value` on the command line overrides a key. Unknown keys are refused.
Several files can be layered:

```
megatron-fspo train --config examples/qwen3_8b/run.toml --config examples/qwen3_8b/rloo.toml
pip install argcomplete     # once, for commands and keys with Tab; in ~/.bashrc:
# eval "$(register-python-argcomplete megatron-fspo)"
```

- A later file overrides the keys that it sets; the command line overrides all files.
- Lists and tables are replaced as a whole: `[[data.validation]]` tables replace all earlier ones.
- A file that names another loss or correction replaces that section.
- `config.toml` in the run's folder holds the result.

`none` unsets a key whose default is none: `--log.group none`. In a file, write `"none"`, except for keys that
take text: there it is text, as in `--data.system_prompt '"none"'`.
"""
DETAILED = {"fspo"}
"""Variants with a table of their own; the others of a section share one."""
INTRO = {
    "loss": """\
A is the advantage of a response, L its length in tokens, and S the sum of its log-ratios log pi - log pi_old.
Formulas: [the objective](algorithm.md#baselines).
""",
    "correction": """\
What to do where sampler and trainer differ: delta_t is log pi_trainer - log pi_sampler of a token. See
[rollout correction](algorithm.md#rollout-correction).
""",
}
SHARED = {
    "loss": """\
`eps_low` and `eps_high` limit a ratio to [1 - eps_low, 1 + eps_high]; `dual_clip_ratio` limits it for A < 0.
`megatron-fspo train --help` describes all keys.
""",
}
"""Above the table of a section's other variants."""
NEXT = """
**Next**: [metrics](metrics.md), or [choosing c](choosing_c.md), the width of FSPO's band.
"""
LIMITS = {"Gt": ("gt", ">"), "Ge": ("ge", "≥"), "Lt": ("lt", "<"), "Le": ("le", "≤")}


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, field in Config.model_fields.items():
        models = _models(field)
        parts.append(f"\n## [{section}]\n")
        if len(models) > 1:
            parts.append(_variants(section, models))
        else:
            parts.append(_section(section, models[0]))
    return "".join([*parts, NEXT])


def _section(section: str, model: type[BaseModel]) -> str:
    """The keys of a section, and those of the tables that some of them take."""
    parts = [f"\n{cleandoc(model.__doc__ or '')}\n", _table(model.model_fields)]
    keys = {key: _tables_in(leaf.annotation) for key, leaf in model.model_fields.items()}
    for table in dict.fromkeys(table for tables in keys.values() for table in tables):
        names = [f"[[{section}.{key}]]" for key, tables in keys.items() if table in tables]
        more = {key: leaf for key, leaf in table.model_fields.items() if key not in model.model_fields}
        parts.append(f"\n### {', '.join(names)}\n\n{cleandoc(table.__doc__ or '')}\n{_table(more)}")
    return "".join(parts)


def _variants(section: str, models: list[type[BaseModel]]) -> str:
    """A section that is one of several: common keys, then the keys of each variant."""
    variants = {str(model.model_fields["name"].default): model for model in models}
    first, *rest = (model.model_fields for model in models)
    common = {
        key: leaf
        for key, leaf in first.items()
        if all(key in other and _row(key, other[key]) == _row(key, leaf) for other in rest)
    }
    names = f"| `name` | see below | `{next(iter(variants))}` | |"
    parts = [f"\n{INTRO[section]}", _table(common, names)]
    lines = []
    for name, model in variants.items():
        own = {key: leaf for key, leaf in model.model_fields.items() if key not in {*common, "name"}}
        text = cleandoc(model.__doc__ or "")
        if name in DETAILED:
            parts.append(f'\n### {section}.name = "{name}"\n\n{text}\n{_table(own)}')
            continue
        keys = ", ".join(f"`{key} = {_default(leaf.default).strip('`')}`" for key, leaf in own.items())
        summary = " ".join(text.partition("\n\n")[0].split())
        lines.append(f"| `{name}` | {summary} | {keys} |")
    parts.append(f"\n### Other values of {section}.name\n" if DETAILED & {*variants} else "")
    parts.append(f"\n{SHARED[section]}" if section in SHARED else "")
    return "\n".join(["".join(parts), "| | | keys and defaults |", "|---|---|---|", *lines, ""])


def _table(fields: Mapping[str, FieldInfo], *first: str) -> str:
    head = ["", "| | legal | default | |", "|---|---|---|---|", *first]
    lines = [_row(key, field) for key, field in fields.items()]
    return "\n".join([*head, *lines]) + "\n"


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field.default)
    return f"| `{key}` | {_legal(field)} | {default} | {field.description or ''} |"


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Models of the tables that a key may be a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _tables_in(part)]


def _models(field: FieldInfo) -> list[type[BaseModel]]:
    annotation = field.annotation
    return [annotation] if isinstance(annotation, type) else list(get_args(annotation))


def _default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{json.dumps(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _legal(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(limit, name):.12g}"
        for limit in [*field.metadata, *_annotated(field.annotation)]
        for name, sign in [LIMITS.get(type(limit).__name__, ("", ""))]
        if name
    ]
    words = _type(field.annotation)
    words = words.removesuffix(" or none") if field.default is None else words
    if not limits:
        return words
    kind = words.split(" or ")[0]
    return words.replace(kind, f"{kind} {', '.join(limits)}", 1).replace("number ", "", 1)


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
    names = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "none"}
    return names.get(annotation, "path")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
