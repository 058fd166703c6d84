"""The ``data`` section of the configuration: data files, and how their rows become prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
)

from megatron_fspo.section import Section

PresetName = Literal["raw", "dapo", "math500", "aime", "amc", "gsm8k", "slime", "messages", "completion"]
"""Formats of public data sets; ``megatron_fspo.data.tasks`` defines each."""

TEMPLATES = {
    "plain": "{prompt}",
    "boxed": "{prompt} Let's think step by step and output the final answer within \\boxed{}.",
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}
"""Name → words around a question, as public data sets and their trainers have them."""


def _check_template(template: str) -> str:
    if template not in TEMPLATES and "{prompt}" not in template:
        raise ValueError(f"must be {', '.join(TEMPLATES)}, or text with {{prompt}} in place of the question")
    return template


class _File(Section):
    file: Path = Field(description="`.parquet`; any other suffix is read as jsonl")
    name: str | None = Field(
        None, pattern=r"^\w[\w.-]*$", description="in metrics and messages; default: file name without suffix"
    )
    weight: PositiveFloat | None = Field(
        None,
        description="relative share of the training prompts; for all sets, or none (every prompt equally "
        "often)",
    )
    samples: PositiveInt | None = Field(None, description="evaluation only: replaces `evaluation.samples`")


class Reading(Section):
    """How the rows of a file become prompts."""

    preset: PresetName | None = Field(
        None, description="file format; sets the defaults of `prompt_key` to `chat_template`"
    )
    prompt_key: str | None = Field(
        None, description="prompt field: text or chat messages; dots address nested fields"
    )
    answer_key: str | None = Field(None, description="reference answer field: text or number")
    answer_after: str | None = Field(
        None, description="the answer follows the last such mark; empty: the whole field"
    )
    template: Annotated[str, AfterValidator(_check_template)] | None = Field(
        None,
        description="words around the question: `plain` (none), `boxed`, `dapo`, or text with `{prompt}`",
    )
    chat_template: bool | None = Field(
        None, description="apply the tokenizer's chat template; false: plain text, for base models"
    )
    system_prompt: str | None = Field(
        None, description="first message, with chat_template; empty: only the file's"
    )
    too_long: Literal["error", "drop"] | None = Field(
        None, description="prompts longer than `data.max_prompt_tokens`"
    )
    duplicates: Literal["drop", "keep"] | None = Field(
        None, description="repeated prompts of a file with the same answer"
    )
    conflicts: Literal["error", "drop", "keep"] | None = Field(
        None,
        description="repeated prompts of a file with different answers; drop removes all of them",
    )


class DataSet(Reading, _File):
    """A file. Its table also accepts the keys of `[data]` from `preset` to `conflicts`; a missing key is read
    from `[data]`, then from the preset.
    """

    @property
    def title(self) -> str:
        """The name of the set, by default that of its file."""
        return self.name or self.file.stem


def _check_sets(sets: tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    if not sets:
        raise ValueError("must have at least one set")
    titles = [dataset.title for dataset in sets]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"several sets are named {title}: set a different name for each")
    if len({dataset.weight is None for dataset in sets}) > 1:
        raise ValueError("give a weight to every set, or to none")
    return sets


Files = Annotated[
    Annotated[Path, Tag("file")] | Annotated[tuple[DataSet, ...], AfterValidator(_check_sets), Tag("sets")],
    Discriminator(lambda value: "sets" if isinstance(value, list | tuple) else "file"),
]
"""A path, or a table per file."""


class _Files(Section):
    train: Files = Field(description="training prompts, or `[[data.train]]` tables")
    validation: Files | None = Field(None, description="evaluation prompts, or `[[data.validation]]` tables")


class Data(Reading, _Files):
    """Prompts, one per row of a file. See [data.md](data.md)."""

    preset: PresetName = Field(
        "raw", description="file format; sets the defaults of `prompt_key` to `chat_template`"
    )
    too_long: Literal["error", "drop"] = Field(
        "error", description="prompts longer than `data.max_prompt_tokens`"
    )
    duplicates: Literal["drop", "keep"] = Field(
        "drop",
        description="repeated prompts of a file with the same answer",
    )
    conflicts: Literal["error", "drop", "keep"] = Field(
        "error",
        description="repeated prompts of a file with different answers; drop removes all of them",
    )
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt")
    shuffle: bool = Field(True, description="new order every epoch, from `run.seed`")

    @property
    def train_sets(self) -> tuple[DataSet, ...]:
        """The training sets; a single one if ``train`` is a path."""
        return _as_sets(self.train)

    @property
    def validation_sets(self) -> tuple[DataSet, ...]:
        """The evaluation sets; empty without ``validation``."""
        return () if self.validation is None else _as_sets(self.validation)

    @field_validator("train", "validation")
    @classmethod
    def _keys_fit_the_use(
        cls, files: Path | tuple[DataSet, ...] | None, info: ValidationInfo
    ) -> Path | tuple[DataSet, ...] | None:
        for dataset in files if isinstance(files, tuple) else ():
            if info.field_name == "train" and dataset.samples is not None:
                raise ValueError(f"{dataset.title} has samples: for training, set rollout.samples instead")
            if info.field_name == "validation" and dataset.weight is not None:
                raise ValueError(f"{dataset.title} has a weight: only training sets can have one")
        return files


def _as_sets(files: Path | tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    return (DataSet(file=files),) if isinstance(files, Path) else files
