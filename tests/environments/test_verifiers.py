"""An environment of the real verifiers package, in its own process and venv."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.types import Prompt, Reply
from test_agent import Talk, text_of
from test_text import TOKENIZER, ids

PYTHON = Path(os.environ.get("VERIFIERS_PYTHON", REPO / ".venv-verifiers/bin/python"))
AGENT = str(REPO / "examples/verifiers/agent.py")


@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make .venv-verifiers/.ready`")
def test_an_episode_gives_another_try_and_its_reward(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    subprocess.run([PYTHON, AGENT, "retry_sums", "--rows", data], check=True)
    row = json.loads(data.read_text().splitlines()[1])
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
    )
    talk = Talk("", command=(str(PYTHON), AGENT, "retry_sums"), seconds=120)
    talk.prompt = Prompt(index=1, token_ids=tuple(ids(text)), text=text, answer=row["answer"], fields=row)
    again = "\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(talk.say("7")) == again
    assert talk.say("2 + 3 is 5.") == Reply(reward=0.5)
