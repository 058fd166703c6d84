"""A tokenizer of one token per character, with everything a real one may have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

PRINTABLE = [chr(code) for code in range(32, 127)]
BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here\\nnor there') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0–94 are the printable ASCII characters, 95 is BOS, 96 EOS; asked for special tokens, it adds BOS.

    Other characters have no token.
    """
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(PRINTABLE)}, merges=[]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([BOS, EOS])
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $0", special_tokens=[(BOS, 95)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, chat_template=TEMPLATE
    )


@pytest.fixture
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A folder with the tokenizer's files, and no others."""
    folder = tmp_path / "checkpoint"
    tokenizer.save_pretrained(folder)
    return folder
