"""The ``data`` section of the configuration: which files a run reads, and how their rows become prompts."""

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

from megatron_fspo.losses.section import Section

PresetName = Literal["raw", "dapo", "math500", "aime", "amc", "gsm8k", "slime"]
"""Formats of public data sets; ``megatron_fspo.data.tasks`` has what each stands for."""

TEMPLATES = {
    "plain": "{prompt}",
    "boxed": "{prompt} Let's think step by step and output the final answer within \\boxed{}.",
    "dapo": (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
}
"""By name, the words around a question that the public data sets and their trainers use."""


def _check_template(template: str) -> str:
    if template not in TEMPLATES and "{prompt}" not in template:
        raise ValueError(f"must be {', '.join(TEMPLATES)}, or text with {{prompt}} where the question goes")
    return template


class _File(Section):
    file: Path = Field(description="`.parquet`; any other is read as jsonl, one JSON object a line")
    name: str | None = Field(
        None, pattern=r"^\w[\w.-]*$", description="in metrics and messages; none: the file's, without suffix"
    )
    weight: PositiveFloat | None = Field(
        None,
        description="share of the training prompts, relative to the other sets; for all sets or for none: "
        "then every prompt comes equally often",
    )
    samples: PositiveInt | None = Field(
        None, description="responses per prompt of an evaluation set, in place of `evaluation.samples`"
    )


class Reading(Section):
    """How the rows of a file become prompts."""

    preset: PresetName | None = Field(
        None, description="format of the file: what the keys down to `system_prompt` are if not given"
    )
    prompt_key: str | None = Field(
        None, description="field of the prompt: text, or a list of chat messages; dots lead into objects"
    )
    answer_key: str | None = Field(None, description="field of the reference answer: text or a number")
    answer_after: str | None = Field(
        None, description="the answer is what follows the last of these marks; empty: the whole field"
    )
    template: Annotated[str, AfterValidator(_check_template)] | None = Field(
        None,
        description="words around the question: `plain` (none), `boxed`, `dapo`, or text with `{prompt}`",
    )
    chat_template: bool | None = Field(
        None, description="render prompts through the tokenizer's chat template; false: as text (base models)"
    )
    system_prompt: str | None = Field(
        None, description="first message, with chat_template; empty: none but the file's"
    )
    too_long: Literal["error", "drop"] | None = Field(
        None, description="a prompt of more than `data.max_prompt_tokens`; dropped ones are counted"
    )
    duplicates: Literal["drop", "keep"] | None = Field(
        None, description="a prompt that the file has already, with the same answer; dropped ones are counted"
    )
    conflicts: Literal["error", "drop", "keep"] | None = Field(
        None,
        description="a prompt that the file has already, with another answer; drop: none of them is taken",
    )


class DataSet(Reading, _File):
    """A file. What its table does not say is as `[data]` has it, or else as the preset has it."""

    @property
    def title(self) -> str:
        """Its name, or else the file's."""
        return self.name or self.file.stem


def _check_sets(sets: tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    if not sets:
        raise ValueError("name at least one set")
    titles = [one.title for one in sets]
    for title in titles:
        if titles.count(title) > 1:
            raise ValueError(f"several sets are called {title}: give each a name of its own")
    if len({one.weight is None for one in sets}) > 1:
        raise ValueError("give a weight to every set, or to none")
    return sets


Files = Annotated[
    Annotated[Path, Tag("file")] | Annotated[tuple[DataSet, ...], AfterValidator(_check_sets), Tag("sets")],
    Discriminator(lambda value: "sets" if isinstance(value, list | tuple) else "file"),
]
"""A path, or one table for each of several files."""


class _Files(Section):
    train: Files = Field(description="file of training prompts, jsonl or parquet; or `[[data.train]]` tables")
    validation: Files | None = Field(
        None, description="file of evaluation prompts; or `[[data.validation]]` tables, a set each"
    )


class Data(Reading, _Files):
    """Prompts: one row of a file each. See [data.md](data.md)."""

    preset: PresetName = Field(
        "raw", description="format of the files: what the keys down to `system_prompt` are if not given"
    )
    too_long: Literal["error", "drop"] = Field(
        "error", description="a prompt of more than `max_prompt_tokens`; dropped ones are counted"
    )
    duplicates: Literal["drop", "keep"] = Field(
        "drop",
        description="a prompt that its file has already, with the same answer; dropped ones are counted",
    )
    conflicts: Literal["error", "drop", "keep"] = Field(
        "error",
        description="a prompt that its file has already, with another answer; drop: none of them is taken",
    )
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt, see `too_long`")
    shuffle: bool = Field(True, description="new order every epoch, from `run.seed`")

    @property
    def train_sets(self) -> tuple[DataSet, ...]:
        """The training sets; one, if ``train`` is a path."""
        return _as_sets(self.train)

    @property
    def validation_sets(self) -> tuple[DataSet, ...]:
        """The evaluation sets; none, if ``validation`` is not given."""
        return () if self.validation is None else _as_sets(self.validation)

    @field_validator("train", "validation")
    @classmethod
    def _keys_fit_the_use(
        cls, files: Path | tuple[DataSet, ...] | None, info: ValidationInfo
    ) -> Path | tuple[DataSet, ...] | None:
        for one in files if isinstance(files, tuple) else ():
            if info.field_name == "train" and one.samples is not None:
                raise ValueError(f"{one.title} has samples: every training prompt has rollout.samples")
            if info.field_name == "validation" and one.weight is not None:
                raise ValueError(f"{one.title} has a weight: every evaluation set is evaluated as a whole")
        return files


def _as_sets(files: Path | tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    return (DataSet(file=files),) if isinstance(files, Path) else files
