"""Renders the pages: one HTML file each, with everything in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_fspo import __version__


def render_page(template: Path, svgs: Mapping[str, str], **content: Any) -> str:
    """Return a page. ``template`` may extend ``base.html`` of this folder; ``svgs`` are pictures by name.

    Pictures are ours and have no text of the user's: they alone are not escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pictures = {name: Markup(svg) for name, svg in svgs.items()}
    return environment.get_template(template.name).render(svgs=pictures, version=__version__, **content)
