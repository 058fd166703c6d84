"""The page for those who come from another trainer names keys and metrics that are ours."""

from __future__ import annotations

from pathlib import Path

from peer_keys import named

DOCS = Path(__file__).parents[2] / "docs"


def sections() -> dict[str, str]:
    parts = (DOCS / "config.md").read_text(encoding="utf-8").split("\n## [")[1:]
    return {part.split("]")[0]: part for part in parts}


def test_keys_are_in_the_configuration() -> None:
    documented = sections()
    keys = [key for key in named("Keys", "here") if "." in key and ":" not in key]
    assert len(keys) > 25
    for key in keys:
        section, name = key.split(".")
        part = documented[section]
        assert f"\n| `{name}` |" in part or (name == "name" and f"### {section}.name = " in part), key


def test_metrics_are_documented() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in named("Metrics", "here") if f"| `{name}` |" not in page] == []
