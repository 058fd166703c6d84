"""Writing Hugging Face checkpoints: equal when read back, and all or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, WhisperFeatureExtractor
from weights_helpers import VOCAB, assert_bits, contents, edit_config, refused, save_model, tensors_of

from megatron_fspo.errors import InputError
from megatron_fspo.weights import read_architecture, write_hf_checkpoint
from megatron_fspo.weights.folder import differing_side_files, side_files

INDEX = "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_model(tmp_path / "source", tied=False)
    return tmp_path / "source"


@pytest.mark.parametrize(("max_shard_bytes", "files"), [(5 * 2**30, 1), (100_000, 3), (1, 25)])
def test_what_is_written_reads_back(source: Path, tmp_path: Path, max_shard_bytes: int, files: int) -> None:
    from transformers import Qwen3ForCausalLM

    original, out = tensors_of(source), tmp_path / "new" / "out"
    write_hf_checkpoint(out, original.items(), source, max_shard_bytes=max_shard_bytes)
    written = sorted(out.glob("*.safetensors"))
    assert len(written) == files
    assert_bits(tensors_of(out), original)
    model = Qwen3ForCausalLM.from_pretrained(out)
    assert_bits(dict(model.state_dict()), original)
    for path in written:
        held = load_file(path)
        assert sum(tensor.nbytes for tensor in held.values()) <= max_shard_bytes or len(held) == 1
        with safe_open(path, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    if files > 1:
        index = json.loads((out / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
        assert written[0].name == f"model-00001-of-{files:05}.safetensors"
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_config_and_tokenizer_come_along_but_no_code(source: Path, tmp_path: Path) -> None:
    theirs = {"tokenizer_config.json", "merges.txt"} & {path.name for path in source.iterdir()}
    files = ("tokenizer.json", "chat_template.jinja", "LICENSE", "additional_chat_templates/tool_use.jinja")
    for file in files:
        (source / file).parent.mkdir(exist_ok=True)
        (source / file).write_text(file)
    for file in ("modeling_evil.py", "pytorch_model.bin", "optimizer.pt"):
        (source / file).write_text("no")
    write_hf_checkpoint(tmp_path / "out", tensors_of(source).items(), source)
    out = tmp_path / "out"
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "manifest.json",
        *files,
        *theirs,
    }
    assert differing_side_files(source, out) == []
    (out / "LICENSE").write_text("mine")
    (out / "tokenizer.json").unlink()
    assert differing_side_files(source, out) == ["LICENSE", "tokenizer.json"]


def test_whatever_transformers_saves_beside_weights_comes_along(tmp_path: Path) -> None:
    """Of a newer transformers too: a file that is left behind fails here."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        chat_template={"default": "x", "tool_use": "y"},
    )
    tokenizer.save_pretrained(tmp_path)
    WhisperFeatureExtractor().save_pretrained(tmp_path)
    GenerationConfig().save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    saved = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(side_files(tmp_path)) == saved and len(saved) >= 6


def test_each_tensor_keeps_the_dtype_of_the_source(tmp_path: Path) -> None:
    original = save_model(tmp_path / "source", tied=True, dtype=torch.bfloat16)
    original["model.norm.weight"] = original["model.norm.weight"].float()
    save_file(original, tmp_path / "source" / "model.safetensors")
    trained = {name: tensor.float() for name, tensor in original.items()}
    write_hf_checkpoint(tmp_path / "out", trained.items(), tmp_path / "source")
    assert_bits(tensors_of(tmp_path / "out"), original)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_new_dtype_is_in_the_files_and_in_the_config(source: Path, tmp_path: Path, key: str) -> None:
    edit_config(source, **{"dtype": ..., key: "float32"})
    original = tensors_of(source)
    (source / "model.safetensors").unlink()  # the source's weights are not asked
    write_hf_checkpoint(tmp_path / "out", original.items(), source, dtype=torch.bfloat16)
    assert_bits(tensors_of(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in original.items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {key: "bfloat16"}
    assert read_architecture(tmp_path / "out").dtype == torch.bfloat16


def test_a_dtype_no_config_can_name_is_refused(source: Path, tmp_path: Path) -> None:
    out, tensors = tmp_path / "out", tensors_of(source).items()
    refused(lambda: write_hf_checkpoint(out, tensors, source, dtype=torch.int8), tmp_path, "int8")


def test_views_parameters_and_a_buffer_used_again_are_written_as_they_look(
    source: Path, tmp_path: Path
) -> None:
    original = tensors_of(source)
    buffer = torch.empty(max(tensor.numel() for tensor in original.values()))

    def given() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in original.items():
            view = buffer[: tensor.numel()].view_as(tensor.t()).t()
            yield name, torch.nn.Parameter(view.copy_(tensor))

    write_hf_checkpoint(tmp_path / "out", given(), source)
    assert_bits(tensors_of(tmp_path / "out"), original)


def interrupted(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[:10]
    raise KeyboardInterrupt("ctrl-c")


Bad = Callable[[dict[str, Tensor]], object]
BAD: dict[str, tuple[Bad, str]] = {
    "interrupted": (interrupted, "ctrl-c"),
    "one missing": (lambda t: [i for i in t.items() if i[0] != Q], rf"1 tensors .* {Q}"),
    "half of one": (lambda t: (t | {"model.norm.weight": torch.ones(7)}).items(), "norm"),
    "twice": (lambda t: [*t.items(), (Q, t[Q])], rf"{Q}: given twice"),
    "foreign": (lambda t: (t | {"x": t[Q]}).items(), r"x: not a tensor"),
    "padded": (
        lambda t: (t | {"lm_head.weight": torch.zeros(1280, 20)}).items(),
        rf"lm_head.weight: .* shape \(1280, 20\).* \({VOCAB}, 20\)",
    ),
    "NaN": (lambda t: (t | {Q: t[Q] * torch.nan}).items(), rf"{Q} is not finite in float32"),
}


@pytest.mark.parametrize("present", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_all_or_nothing(source: Path, tmp_path: Path, bad: Bad, message: str, present: bool) -> None:
    tensors, out = tensors_of(source), tmp_path / "out"
    if present:
        write_hf_checkpoint(out, tensors.items(), source)
    before = contents(tmp_path)
    with pytest.raises((InputError, KeyboardInterrupt), match=message):
        write_hf_checkpoint(out, bad(tensors), source, max_shard_bytes=1000)
    assert contents(tmp_path) == before


def test_a_checkpoint_is_replaced_whole(source: Path, tmp_path: Path) -> None:
    tensors, out = tensors_of(source), tmp_path / "out"
    write_hf_checkpoint(out, tensors.items(), source, max_shard_bytes=1000)
    for leftover in (".out.partial", ".out.old"):  # of runs that were killed
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "model.safetensors").write_text("half")
    new = {name: tensor + 1 for name, tensor in tensors.items()}
    write_hf_checkpoint(out, new.items(), source)
    assert_bits(tensors_of(out), new)  # a stale index or shard beside it would be refused
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_a_leftover_that_is_no_folder_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").symlink_to(source)
    tensors = tensors_of(source)
    refused(lambda: write_hf_checkpoint(tmp_path / "out", tensors.items(), source), tmp_path, "symbolic link")
    assert_bits(tensors_of(source), tensors)


def test_the_old_one_stays_if_the_last_step_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, out = tensors_of(source), tmp_path / "out"
    write_hf_checkpoint(out, tensors.items(), source)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == ".out.partial":
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    refused(lambda: write_hf_checkpoint(out, tensors.items(), source), tmp_path, "/out: no space")


def test_other_folders_are_not_replaced(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "home", tmp_path / "file", source):
        refused(lambda out=target: write_hf_checkpoint(out, tensors.items(), source), tmp_path, str(target))
    write_hf_checkpoint(tmp_path / "empty", tensors.items(), source)
    assert_bits(tensors_of(tmp_path / "empty"), tensors)
