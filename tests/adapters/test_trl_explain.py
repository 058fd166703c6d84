"""``explain`` on a dump of TRL has the figures that FSPOTrainer logs of the same batch.

The batch goes through TRL's path as in test_trl_adapter; the dump is written by examples/explain/dump_trl.py.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import trl
from trl_batches import make_trainer, one_step, random_batch

from launch import REPO
from megatron_fspo.adapters.trl import FSPOConfig, FSPOTrainer
from megatron_fspo.lab.explain.command import explain
from megatron_fspo.lab.explain.rows import NAMES, OTHER_MASKS

# TRL and transformers announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = {"c_low": 0.02, "c_high": 0.01, "c_dual": 0.012}


def test_figures_of_the_dump_are_those_logged(tmp_path: Path) -> None:
    example = runpy.run_path(str(REPO / "examples/explain/dump_trl.py"))
    # The example's methods before FSPOTrainer's: what a user writes who dumps a run of FSPO.
    trainer_class = type("DumpingFSPOTrainer", (example["DumpingTrainer"], FSPOTrainer), {})
    trainer = make_trainer(trainer_class, FSPOConfig, tmp_path, n=16, **LIMITS)
    one_step(trainer, random_batch(n=16, seed=2))
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}

    words = [word for key, value in LIMITS.items() for word in (f"--fspo.{key}", str(value))]
    found = explain(tmp_path / "dump.jsonl", words, [], step=None, rate=None)
    fspo = found.given[0]
    assert (len(found.dump), found.dump.empty) == (15, 1)
    figures = {
        "fspo/clip_low": fspo.clip_low,
        "fspo/clip_high": fspo.clip_high,
        "fspo/dual_clip_frac": fspo.dual_clip,
        "fspo/out_of_band": fspo.out_of_band,
        "fspo/sigma_hat": found.sigma,
    }
    assert min(figures.values()) > 0, figures
    assert figures == pytest.approx({name: logged[name] for name in figures}, rel=1e-4)


def test_every_mask_is_known() -> None:
    """Of a newer trl too: a mask that `explain` ignores would count tokens that the loss does not."""
    files = Path(trl.__file__).parent.glob("trainer/grpo_trainer.py")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    masks = set(re.findall(r'"(\w*mask)"', text)) - {"sequence_mask", "token_mask"}  # modes of its correction
    assert len(masks) > 1 and masks <= {*NAMES["mask"], *OTHER_MASKS}, masks
