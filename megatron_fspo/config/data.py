"""The ``data`` section of the configuration: which prompts a run works through."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt

from megatron_fspo.section import Section


class Data(Section):
    """Prompts, one JSON object a line."""

    train: Path = Field(description="jsonl file of training prompts")
    validation: Path | None = Field(None, description="jsonl file of evaluation prompts")
    prompt_key: str = Field("prompt", description="JSON key of the prompt: text, or a list of chat messages")
    answer_key: str = Field("answer", description="JSON key of the reference answer")
    chat_template: bool = Field(False, description="render prompts through the tokenizer's chat template")
    max_prompt_tokens: PositiveInt = Field(1024, description="a longer prompt is an error")
    shuffle: bool = Field(True, description="new order every epoch, from `run.seed`")
