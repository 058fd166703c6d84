"""HF → shards of every rank → HF, bit-exact; and each layout against Megatron's own rule, spelled out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distcp_helpers import layer_chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_helpers import (
    HIDDEN,
    LAYERS,
    VOCAB,
    assert_bits,
    export,
    latent_shapes,
    load_ranks,
    megatron_shapes,
    save_model,
)

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.weights import (
    Architecture,
    HFReader,
    check_coverage,
    expected_hf_shapes,
    from_megatron_shards,
    hf_reader,
    iterate_hf_tensors,
    load_into,
    read_architecture,
    resolve,
    shard_shape,
    shard_slices,
    to_megatron_shard,
    write_hf_checkpoint,
)

PADDED = {1: 1280, 2: 1280, 4: 1536}  # 1237 to a multiple of 128 × tp, Megatron's default


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("heads", [4, 8, 32], ids=["gqa1", "gqa2", "gqa8"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip_is_bit_exact(tmp_path: Path, tp: int, tied: bool, heads: int, te: bool) -> None:
    original = save_model(tmp_path, tied=tied, heads=heads, kv_heads=4)
    shapes = megatron_shapes(heads, 4, tp, PADDED[tp], tied=tied)
    if te:  # which has these norms in the linear layers behind them
        shapes = {
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
                "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
            ): shape
            for name, shape in shapes.items()
        }
    ranks, loaded = load_ranks(tmp_path, shapes, tp, PADDED[tp])
    check_coverage(loaded, read_architecture(tmp_path))
    exported = export(tmp_path, ranks)
    assert len(exported) == len(original)
    assert_bits(dict(exported), original)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_follow_megatrons_rules(tmp_path: Path, tp: int) -> None:
    heads, groups = 8, 4
    hf = save_model(tmp_path, tied=False, heads=heads, kv_heads=groups)
    shapes = megatron_shapes(heads, groups, tp, PADDED[tp], tied=False)
    ranks, _ = load_ranks(tmp_path, shapes, tp, PADDED[tp])
    for layer in range(LAYERS):
        chunks = layer_chunks(hf, layer, tp, heads, groups)
        chunks["input_layernorm.weight"] = chunks.pop("self_attention.linear_qkv.layer_norm_weight")
        chunks["pre_mlp_layernorm.weight"] = chunks.pop("mlp.linear_fc1.layer_norm_weight")
        for rank, found in enumerate(ranks):
            # layers.py, _initialize_affine_weight_cpu: a rank has two chunks of a gated fc1.
            expected = {
                name: torch.cat([values for _, values in (held if len(held) == 1 else held[rank::tp])])
                for name, held in chunks.items()
            }
            assert_bits({name: found[f"decoder.layers.{layer}.{name}"] for name in expected}, expected)
    for name, source in [
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ]:
        table = torch.cat([rank[name] for rank in ranks])
        assert torch.equal(table[:VOCAB], hf[source])
        assert table[VOCAB:].shape == (PADDED[tp] - VOCAB, HIDDEN)
        assert not table[VOCAB:].any()
    assert all(torch.equal(rank["decoder.final_layernorm.weight"], hf["model.norm.weight"]) for rank in ranks)


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("tp", [1, 2])
def test_latent_attention_and_a_dense_layer_go_to_their_places(tmp_path: Path, tp: int, te: bool) -> None:
    hf = save_model(tmp_path, "deepseek_v3", heads=4, kv_heads=4)
    shapes = latent_shapes(tp, PADDED[tp])
    if te:
        for old, new in (
            ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
            ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
            ("layers.0.pre_mlp_layernorm.", "layers.0.mlp.linear_fc1.layer_norm_"),
        ):
            shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    ranks, loaded = load_ranks(tmp_path, shapes, tp, PADDED[tp])
    check_coverage(loaded, read_architecture(tmp_path))
    exported = export(tmp_path, ranks)
    assert len(exported) == len(hf)
    assert_bits(dict(exported), hf)
    heads = 4 // tp  # of a rank, each with an unrotated key of 6 and a value of 8
    kv = hf["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 6 + 8, 12)
    for rank, found in enumerate(ranks):
        held = found["decoder.layers.1.self_attention.linear_kv_up_proj.weight"]
        assert torch.equal(held, kv[rank * heads : (rank + 1) * heads].flatten(0, 1))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_pipeline_stages_export_every_tensor_once(tmp_path: Path, tied: bool) -> None:
    original = save_model(tmp_path, tied=tied)
    arch = read_architecture(tmp_path)
    loaded, exported = set(), []
    for stage in range(2):
        with pytest.raises(InputError, match="not loaded into a parameter"):
            check_coverage(loaded, arch)
        shapes = megatron_shapes(4, 2, 2, 1280, tied=tied, stages=2, stage=stage)
        ranks, names = load_ranks(tmp_path, shapes, 2, 1280, layer_offset=stage)
        loaded |= names
        exported += export(tmp_path, ranks, layer_offset=stage)
        if stage == 1:
            head = original["model.embed_tokens.weight" if tied else "lm_head.weight"]
            assert torch.equal(torch.cat([rank["output_layer.weight"] for rank in ranks])[:VOCAB], head)
    check_coverage(loaded, arch)
    assert len(exported) == len(original)
    assert_bits(dict(exported), original)


@pytest.mark.parametrize(("mapped", "opened"), [(2**30, 1), (-1, 5)])
def test_a_file_is_opened_once_until_enough_of_it_is_mapped(
    mapped: int, opened: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = save_model(tmp_path, tied=False)
    reader, real_open, count = HFReader(tmp_path), hf_reader.safe_open, 0

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return real_open(*args, **kwargs)

    monkeypatch.setattr(hf_reader, "BLOCK_BYTES", mapped)
    monkeypatch.setattr(hf_reader, "safe_open", counting)
    for name in sorted(original)[:5]:
        assert torch.equal(reader.read(name), original[name])
    assert count == opened


def test_a_rank_reads_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real_open = hf_reader.safe_open

    class Counting:
        """safetensors' handle, or slice, with the bytes of each copy it makes written down."""

        def __init__(self, inner):
            self.inner = inner

        def __enter__(self):
            return Counting(self.inner.__enter__())

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def get_slice(self, name):
            return Counting(self.inner.get_slice(name))

        def __getitem__(self, index):
            part = self.inner[index]
            read.append(part.nbytes)
            return part

    monkeypatch.setattr(hf_reader, "safe_open", lambda *args, **kwargs: Counting(real_open(*args, **kwargs)))
    original = save_model(tmp_path, tied=False, heads=8, kv_heads=4)
    norms = sum(tensor.nbytes for tensor in original.values() if tensor.dim() == 1)
    matrices = sum(tensor.nbytes for tensor in original.values()) - norms
    tp, padded = 4, 1240  # the last rank's part of the vocabulary is 3 rows short
    ranks, _ = load_ranks(tmp_path, megatron_shapes(8, 4, tp, padded, tied=False), tp, padded)
    assert sum(read) == matrices + tp * norms
    per_rank = [sum(read[i : i + len(read) // tp]) for i in range(0, len(read), len(read) // tp)]
    assert max(per_rank) <= matrices / tp + norms + 2 * 3 * HIDDEN * 4
    assert_bits(dict(export(tmp_path, ranks)), original)


def test_every_rank_goes_through_every_gather(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    shapes = megatron_shapes(4, 2, 2, 1280, tied=True)
    ranks, _ = load_ranks(tmp_path, shapes, 2, 1280)
    gathered = []
    trained = {name: tensor.requires_grad_() for name, tensor in ranks[1].items()}
    assert list(iterate_hf_tensors(trained.items(), read_architecture(tmp_path), gathered.append)) == []
    assert [tuple(tensor.shape) for tensor in gathered] == list(shapes.values())
    assert not any(tensor.requires_grad for tensor in gathered)


def test_replicas_that_drifted_apart_are_not_exported(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    ranks, _ = load_ranks(tmp_path, megatron_shapes(4, 2, 2, 1280, tied=True), 2, 1280)
    name = "decoder.layers.1.self_attention.k_layernorm.weight"
    ranks[1][name][3] = ranks[1][name][3].nextafter(torch.tensor(torch.inf))
    with pytest.raises(TrainingError, match=rf"{name} differs between tensor-parallel ranks 0 and 1"):
        export(tmp_path, ranks)


def test_loading_casts_to_the_parameters_dtype(tmp_path: Path) -> None:
    original = save_model(tmp_path, tied=True)
    shapes = megatron_shapes(4, 2, 2, 1280, tied=True)
    ranks, _ = load_ranks(tmp_path, shapes, 2, 1280, dtype=torch.bfloat16)
    assert_bits(dict(export(tmp_path, ranks)), {name: tensor.bfloat16() for name, tensor in original.items()})


@st.composite
def layouts(draw) -> tuple[Architecture, int, int]:
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = tp * draw(st.integers(1, 3))
    vocab = draw(st.integers(1, 50))
    family = draw(st.sampled_from(["qwen3", "phi3"]))
    arch = Architecture(
        model_type=family, num_layers=LAYERS, hidden_size=draw(st.integers(1, 9)),
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 8])), num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)), ffn_size=tp * draw(st.integers(1, 5)), vocab_size=vocab,
        tied=draw(st.booleans()), rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
        dtype=torch.float32,
    )  # fmt: skip
    return arch, tp, tp * (-(-vocab // tp) + draw(st.integers(0, 9)))


@given(layouts())
@settings(max_examples=80, deadline=None)
def test_shards_round_trip_for_any_sizes(layout: tuple[Architecture, int, int]) -> None:
    arch, tp, padded = layout
    state, count = {}, 1
    for name, shape in expected_hf_shapes(arch).items():
        size = torch.Size(shape).numel()
        state[name] = torch.arange(count, count + size).reshape(shape)  # every element its own value, never 0
        count += size
    back = {}
    for name in megatron_shapes(4, 2, 1, 1280, tied=False):
        if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) and arch.model_type != "qwen3":
            continue
        row = resolve(name, arch)
        shape = shard_shape(row, arch, tp, padded)
        shards, files = [], row.files(arch)
        for rank in range(tp):
            slices = shard_slices(row, arch, rank, tp, padded)
            for tensor, part in zip(row.hf, slices, strict=True):
                assert all(s.start <= s.stop <= n for s, n in zip(part, files[tensor.name], strict=True))
            parts = [state[t.name][part] for t, part in zip(row.hf, slices, strict=True)]
            shards.append(to_megatron_shard(row, parts, arch, shape))
            assert tuple(shards[-1].shape) == shape
        whole = sum(state[file].numel() for file in files)
        assert sum(int(s.count_nonzero()) for s in shards) == whole * (
            tp if row.layout == "replicated" else 1
        )
        back |= dict(zip(files, from_megatron_shards(row, shards, arch), strict=True))
    assert_bits(back, state)


def test_only_the_named_layers_exist(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    arch = read_architecture(tmp_path)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert resolve(name, arch).hf[0].name == "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(InputError, match=rf"{name}: layer 2"):
        resolve(name, arch, layer_offset=1)
    for unknown in ["decoder.layers.0.mlp.router.weight", "decoder.layers.x.input_layernorm.weight"]:
        with pytest.raises(InputError, match=unknown):
            resolve(unknown, arch)


def test_a_parameter_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    arch = read_architecture(tmp_path)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    reader = HFReader(tmp_path)
    with pytest.raises(InputError, match=rf"{name} has shape \(48, 21\).*\(48, 20\)"):
        load_into([(name, torch.zeros(48, 21))], reader, arch, tp_rank=0, tp_size=1, padded_vocab=1280)
    with pytest.raises(InputError, match=rf"{name}: shape \(48, 20\) .*rank 0 of 2.*\(24, 20\)"):
        from_megatron_shards(resolve(name, arch), [torch.zeros(48, 20)] * 2, arch)
    with pytest.raises(InputError, match=r"padded vocabulary 1236"):
        embedding = resolve("embedding.word_embeddings.weight", arch)
        from_megatron_shards(embedding, [torch.zeros(618, 20)] * 2, arch)


def test_an_export_without_the_bias_of_a_router_names_it(tmp_path: Path) -> None:
    tensors = save_model(tmp_path / "hf", "glm4_moe")
    (bias,) = (name for name in tensors if name.endswith("e_score_correction_bias"))
    rest = ((name, tensor) for name, tensor in tensors.items() if name != bias)
    with pytest.raises(InputError, match=bias):
        write_hf_checkpoint(tmp_path / "out", rest, tmp_path / "hf")


def test_a_dense_layer_has_no_experts_and_others_no_mlp(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek_v3")
    arch = read_architecture(tmp_path)
    for layer, legal, other in (
        (0, "linear_fc1.weight", "router.weight"),
        (1, "router.expert_bias", "linear_fc2.weight"),
    ):
        assert resolve(f"decoder.layers.{layer}.mlp.{legal}", arch).hf
        with pytest.raises(InputError, match=f"layers.{layer}.mlp.{other}"):
            resolve(f"decoder.layers.{layer}.mlp.{other}", arch)
