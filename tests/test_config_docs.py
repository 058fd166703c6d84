from __future__ import annotations

import importlib.util

from launch import REPO
from megatron_fspo.options import legal_keys

PAGE = REPO / "docs/config.md"


def test_the_configuration_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("make_config", REPO / "docs/make_config.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert PAGE.read_text(encoding="utf-8") == module.render(), "docs/config.md is stale: run `make docs`"


def test_the_page_has_every_key_once_per_section_that_has_it() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key, field, _ in legal_keys():
        section, _, name = key.partition(".")
        if key != "loss.name":
            assert f"| `{name}` |" in text[text.index(f"## [{section}]") :], key
            assert (field.description or "") in text, key
