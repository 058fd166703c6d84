"""Loading a checkpoint's tokenizer, and whether model and tokenizer belong together."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_fspo.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from megatron_fspo.errors import InputError


def test_loads_what_was_saved(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("name", ["none", "Qwen/Qwen3-8B", "."])
def test_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A name on the hub is not a folder, and is not fetched."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such folder" if name != "." else "holds no tokenizer"):
        load_tokenizer(name)


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer(checkpoint: Path, broken: str) -> None:
    (checkpoint / broken).write_text('{"half a')
    with pytest.raises(InputError, match=r"cannot load the tokenizer: .") as caught:
        load_tokenizer(checkpoint)
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (checkpoint / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"cannot load the tokenizer: .* contains custom code"):
        load_tokenizer(checkpoint)
    assert not ran.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% if messages | length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}{% endif %}",
        "{{ 'x' * 10 ** 11 }}",
        "{% set x = namespace(y='x' * 10**6) %}{% for a in range(99) %}{% set x.y = x.y + x.y %}{% endfor %}",
    ],
)
def test_a_template_without_end(checkpoint: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.data.tokenizer._TEMPLATE_SECONDS", 0.5)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    (checkpoint / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match=r"chat template needs more than 0\.5 s or 2 GiB"):
        load_tokenizer(checkpoint)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    assert load_tokenizer(checkpoint).chat_template.startswith("{{ raise")


def test_check_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    check_vocabulary(tokenizer, 97)
    check_vocabulary(tokenizer, 128)  # padded
    with pytest.raises(
        InputError, match=r"largest id is 96 \('</s>'\), the model's vocab_size 96, .* at least 97"
    ):
        check_vocabulary(tokenizer, 96)


EOS = 96


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (EOS,)), (EOS, (EOS,)), (0, (EOS, 0)), ([5, EOS, 7, 5], (EOS, 5, 7)), ([], (EOS,))],
)
def test_stop_token_ids(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: Any, expected: tuple[int, ...]
) -> None:
    assert stop_token_ids(tokenizer, tmp_path) == (EOS,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": given}))
    assert stop_token_ids(tokenizer, tmp_path) == expected, "config.json alone has them"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3 if expected != (EOS,) else None}))
    assert stop_token_ids(tokenizer, tmp_path) == expected


def test_stop_token_ids_of_the_user(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert stop_token_ids(tokenizer, tmp_path, (7, 5)) == (EOS, 5, 7)
    last = len(tokenizer) - 1
    with pytest.raises(InputError, match=rf"stop_token_ids has \[{last + 1}\], .* end at {last}"):
        stop_token_ids(tokenizer, tmp_path, (last, last + 1))


def test_stop_token_ids_of_a_tokenizer_without_eos(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no stop token"):
        stop_token_ids(tokenizer, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert stop_token_ids(tokenizer, tmp_path) == (3,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id .* got '</s>'"),
        ('{"eos_token_id": [1, -1]}', r"got \[1, -1\]"),
        ('{"eos_token_id": true}', "got True"),
        ("[1]", r"got \[1\]"),
        ("{", "generation_config.json: not JSON: "),
    ],
)
def test_a_broken_generation_config(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        stop_token_ids(tokenizer, tmp_path)
