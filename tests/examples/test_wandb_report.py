"""The report for wandb shows metrics that exist, in plots that wandb's own package takes."""

from __future__ import annotations

import runpy

import pytest

from launch import REPO
from metrics_page import unknown


@pytest.mark.filterwarnings("ignore")
def test_its_plots() -> None:
    program = runpy.run_path(str(REPO / "examples/wandb_report/report.py"))
    report = program["build"]("team", "project")
    grids = [block for block in report.blocks if hasattr(block, "panels")]
    panels = [panel for grid in grids for panel in grid.panels]
    metrics = [metric for panel in panels for metric in panel._to_model().config.metrics]
    plots = [plot for section in program["SECTIONS"].values() for plot in section.values()]
    assert len(panels) == len(plots) and metrics == [metric for plot in plots for metric in plot]
    assert unknown(set(metrics)) == []
    corners = [[(panel.layout.x, panel.layout.y) for panel in grid.panels] for grid in grids]
    assert all(len(set(grid)) == len(grid) for grid in corners)
