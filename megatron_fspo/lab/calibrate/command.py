"""The command: check, measure, write and print."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.calibrate.findings import band_of_run, findings
from megatron_fspo.lab.calibrate.page import write_page
from megatron_fspo.lab.calibrate.passes import measure, quiet
from megatron_fspo.lab.calibrate.responses import read_responses
from megatron_fspo.lab.calibrate.table import render
from megatron_fspo.trainer.noise import Calibration
from megatron_fspo.trainer.prepare import Inputs, prepare

FILE = "calibration.json"
PAGE = "index.html"


def check(config: Config, recipes: Sequence[str], responses: Path | None, *, world_size: int) -> Inputs:
    """Read and check everything, before a process group forms.

    Raises:
        InputError: the first thing that is wrong.
    """
    band_of_run(config)
    if recipes and config.fp8.on:
        raise InputError(f"--emulate is for runs in bfloat16 or float32; fp8.recipe is {config.fp8.recipe}")
    inputs = prepare(quiet(config, given=responses is not None), world_size=world_size)
    if responses is not None:
        count = len(read_responses(responses, inputs.config, inputs.arch))
        if count < (data := world_size // config.parallel.model_size):
            raise InputError(f"{responses} has {count} responses, fewer than the {data} data-parallel ranks")
    return inputs


def run(inputs: Inputs, recipes: Sequence[str], responses: Path | None) -> Calibration | None:
    """Measure, and write what was found into the run's folder; on the first rank. Collective."""
    config = inputs.config
    writer = os.environ.get("RANK", "0") == "0"
    if writer:
        shutil.rmtree(config.run_folder, ignore_errors=True)  # what is in it was made by this command
    emulated = [config.fp8.model_copy(update={"recipe": recipe}) for recipe in recipes]
    given = read_responses(responses, config, inputs.arch) if responses is not None else []
    measured = measure(inputs, emulated, given)
    if not writer:
        return None
    found = findings(measured, config, device=str(inputs.backend.device.type))
    (config.run_folder / FILE).write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    write_page(found, config.run_folder / PAGE)
    return found


def report(found: Calibration, inputs: Inputs) -> str:
    """What the console gets."""
    folder = inputs.config.run_folder
    return f"{render(found)}\n\n  for `loss.noise`   {folder / FILE}\n  page               {folder / PAGE}"
