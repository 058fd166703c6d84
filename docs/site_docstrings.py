"""An extension of griffe: docstrings, written for `help()`, as Markdown of the site."""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

_BLOCK = re.compile(r"^( *)(.*?)::\n\n((?:\1    .*\n?|\n)+)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Blocks after ``::`` become fences, roles code, and the letter L* keeps its asterisk."""

    def fence(found: re.Match[str]) -> str:
        indent, words, block = found[1], found[2], textwrap.dedent(found[3]).strip("\n")
        fenced = textwrap.indent(f"```{_language(block)}\n{block}\n```", indent)
        return f"{indent}{words}:\n\n{fenced}\n\n"

    text = re.sub(r":(?:func|class|mod|meth):`~?([^`]+)`", r"`\1`", _BLOCK.sub(fence, f"{text}\n"))
    return "".join(
        part if part.startswith("`") else re.sub(r"\bL\*(?!\*)", r"L\\*", part)
        for part in re.split(r"(```.*?```|`+[^`]+`+)", text.rstrip("\n"), flags=re.DOTALL)
    )


def _language(block: str) -> str:
    """Formulas are no Python."""
    if block.startswith(">>>"):
        return "pycon"
    try:
        ast.parse(block)
    except SyntaxError:
        return "text"
    return "python"


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
