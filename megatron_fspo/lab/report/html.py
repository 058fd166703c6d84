"""Renders the pages: one HTML file each, with everything in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_fspo import __version__
from megatron_fspo.lab.report.charts import Spec


def render_page(template: Path, figures: Mapping[str, Spec], **content: Any) -> str:
    """Return a page. ``template`` may extend ``base.html`` of this folder; ``figures`` are specifications in
    Vega-Lite by name, each of which the template has a place for."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template(template.name)
    return page.render(figures=figures, vega=vega() if figures else "", version=__version__, **content)


@cache
def vega() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed as one script, 0.9 MB. The first call takes 2 s of CPU time."""
    import vl_convert

    return Markup(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
