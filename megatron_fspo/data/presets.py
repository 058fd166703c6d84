"""What each preset stands for, and what a file of a run is read with in the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fspo.config.data import TEMPLATES, Data, DataSet, PresetName, Reading

Which = Literal["train", "validation"]
"""Which files of a run."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The keys that depend on the format of a file; what they mean is in the configuration."""

    prompt_key: str = "problem"
    answer_key: str = "answer"
    answer_after: str = ""
    template: str = "boxed"
    chat_template: bool = True
    system_prompt: str = ""


PRESETS: dict[PresetName, Preset] = {
    "raw": Preset(prompt_key="prompt", template="plain", chat_template=False),
    "dapo": Preset(prompt_key="prompt", answer_key="reward_model.ground_truth", template="plain"),
    "math500": Preset(),
    "aime": Preset(),
    "amc": Preset(),
    "gsm8k": Preset(prompt_key="question", answer_after="####"),
    "slime": Preset(prompt_key="prompt", answer_key="label", template="plain"),
}
"""By name. The prompts of DAPO's and slime's files hold their instruction already; the others are bare
questions, and are asked for an answer in a box."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file, and all that says how its rows become prompts. ``template`` is text with ``{prompt}``."""

    file: Path
    name: str
    weight: float | None = None
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    answer_after: str = ""
    template: str = "{prompt}"
    chat_template: bool = False
    system_prompt: str = ""
    too_long: str = "error"
    duplicates: str = "drop"
    conflicts: str = "error"


def sources_of(data: Data, which: Which) -> tuple[Source, ...]:
    """The files of a run, in the order of the configuration. What a set's table gives holds; else what
    ``[data]`` gives; else what the preset says, the set's own or that of ``[data]``."""
    sets = data.train_sets if which == "train" else data.validation_sets
    return tuple(source_of(data, one) for one in sets)


def source_of(data: Data, one: DataSet) -> Source:
    """As :func:`sources_of`, of one set."""
    keys: dict[str, Any] = asdict(PRESETS[one.preset or data.preset])
    for given in (data, one):
        values = {key: getattr(given, key) for key in Reading.model_fields if key != "preset"}
        keys |= {key: value for key, value in values.items() if value is not None}
    keys["template"] = TEMPLATES.get(keys["template"], keys["template"])
    return Source(file=one.file, name=one.title, weight=one.weight, **keys)
