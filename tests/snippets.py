"""Fenced blocks of the pages, and the commands in them as a shell would read them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch import REPO

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(REPO.glob("docs/*.md"))]
PAGES += sorted(REPO.glob("examples/*/README.md"))

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_PROGRAMS = r"(?:\w+=\S+ )*(?:megatron-fspo|python|pytest|make|torchrun|bash|pip|sha256sum|touch)"
_INLINE = re.compile(rf"`({_PROGRAMS} [^`\n]+)`")
_SPLIT = {";", "&", "&&", "|", "||", "do", "done"}

ELIDED = "…"
"""Stands in a command for words that the page leaves out; also ``...`` and ``<what you have>``."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    """Path in the repository."""
    line: int
    language: str
    """After the fence: none for commands, ``console`` for commands after ``$`` with what they print, ``text``
    for what is printed or drawn."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One simple command, without redirections and comments, its variables put in."""

    where: str
    words: tuple[str, ...]
    variables: dict[str, str] = field(hash=False)
    """Assignments before the program."""
    inline: bool = False
    """True in running text, where it may be no more than a name."""

    @property
    def text(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables.items()), *self.words])

    @property
    def elided(self) -> bool:
        return ELIDED in self.words or self.inline

    @property
    def given(self) -> list[str]:
        """Program and arguments, without what is left out."""
        return [word for word in self.words if word != ELIDED]


def assign_blocks(page: Path) -> list[Block]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(REPO))
    return [
        Block(name, text[: found.start()].count("\n") + 1, found[2], textwrap.dedent(found[3]))
        for found in _FENCED.finditer(text)
    ]


def commands_of(page: Path) -> list[Command]:
    """Commands in blocks, then those in text. A variable that a block sets holds to the end of the page."""
    found: list[Command] = []
    variables: dict[str, str] = {}
    for block in assign_blocks(page):
        if block.language in ("", "sh"):
            found += _commands(block.text, block.where, variables)
        elif block.language == "console":
            typed = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
            assert typed, f"{block.where}: nothing is typed after a $"
            found += _commands("\n".join(typed), block.where, variables)
    text, name = _FENCED.sub("", page.read_text(encoding="utf-8")), str(page.relative_to(REPO))
    for match in _INLINE.finditer(text):
        found += _commands(match[1], name, variables, inline=True)
    return found


def _commands(text: str, where: str, variables: dict[str, str], *, inline: bool = False) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\(\([^)]*\)\)", "1", line)  # arithmetic
        line = re.sub(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "SUBSTITUTED", line)
        line = re.sub(r"<[a-z][^>]*>|\.\.\.(?=\s|$)|\[--[^]]*\]", ELIDED, line)
        line = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], f"${name[1]}"), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";<>|&")
        lexer.whitespace_split = True
        words = list(lexer)
        for number, word in enumerate(words):  # `>` and its file
            if word == ">":
                words[number : number + 2] = [";", ";"]
        for part in _parts(words):
            given: dict[str, str] = {}
            while part and re.fullmatch(r"\w+=.*", part[0]):
                name, _, value = part.pop(0).partition("=")
                given[name] = value
            if not part:
                variables.update(given)
            elif part[0] != "for":
                yield Command(where, tuple(part), given, inline)


def _parts(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in [*words, ";"]:
        if word not in _SPLIT:
            part.append(word)
        elif part:
            yield part
            part = []
