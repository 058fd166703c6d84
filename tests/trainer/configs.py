"""The configuration of a run that never begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_fspo.config import Config


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """Of the run ``one`` under this folder."""
    return Config.model_validate(
        {
            "run": {"steps": 300, "folder": folder, "name": "one"},
            "model": {"checkpoint": "c"},
            "data": {"train": "t"},
            "reward": {"name": "exact_match"},
            "rollout": {"prompts": 4, "max_response_tokens": 8},
            **sections,
        }
    )
