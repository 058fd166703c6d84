"""``megatron-fspo plan``: what it says, what it refuses, and that its parts add up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from launch import REPO
from megatron_fspo.cli import main
from megatron_fspo.config import Parallel
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.plan.activations import activations, in_flight, layer_bytes
from megatron_fspo.lab.plan.command import assumed
from megatron_fspo.lab.plan.plan import GIB, Given, make_plan
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.plan.shape import PlannedPack, Shape, stage_parameters
from megatron_fspo.lab.plan.speed import Machine
from megatron_fspo.lab.plan.state import checkpoint_bytes, communicators, model_values, state

EXAMPLES = REPO / "examples"
RUN = EXAMPLES / "qwen3_8b/run.toml"


def shape(model: str, world: int = 1, **more: Any) -> Shape:
    parallel = {name: more.pop(name) for name in list(more) if name in Parallel.model_fields}
    given = {"dtype": torch.bfloat16, "layers": "transformer_engine", "device": "cuda", **more}
    return Shape(arch=PRESETS[model], parallel=Parallel(**parallel), world=world, **given)


def test_presets_have_the_published_numbers_of_parameters() -> None:
    billions = {"smollm2-135m": 0.1345, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen3-30b-a3b": 30.53}
    billions |= {"qwen3-235b-a22b": 235.09, "llama-3.1-70b": 70.55}
    counts = {name: model_values(PRESETS[name]) for name in billions}
    assert {name: count / 1e9 for name, count in counts.items()} == pytest.approx(billions, rel=1e-3)
    # A dense one takes 18 bytes a parameter, and its checkpoint 14.
    dense = shape("qwen3-8b")
    assert sum(vars(state(dense, 0)).values()) == 18 * counts["qwen3-8b"]
    assert checkpoint_bytes(dense) == 14 * counts["qwen3-8b"]


@pytest.mark.parametrize("spread", [False, True])
def test_experts_and_stages_add_up_to_the_model(spread: bool) -> None:
    # Of 2 stages x 4 tensor ranks; 32 of 128 ranks hold each expert once.
    layout = shape("qwen3-235b-a22b", 128, tensor=4, sequence=True, pipeline=2, expert=32,
                   distributed_optimizer=spread)  # fmt: skip
    chunks = [chunk for stage in (0, 1) for chunk in stage_parameters(layout, stage)]
    experts = sum(p.count for chunk in chunks for p in chunk if p.expert)
    arch = PRESETS["qwen3-235b-a22b"]
    assert arch.experts is not None
    assert 32 * experts == 94 * 128 * 3 * arch.hidden_size * arch.experts.ffn_size
    held = [state(layout, stage) for stage in (0, 1)]
    assert all(one.gradients == 2 * one.parameters for one in held)
    assert all((one.optimizer < 3 * one.gradients) is spread for one in held)


def test_micro_batches_under_way() -> None:
    four = shape("qwen3-8b", 4, pipeline=4)
    assert [in_flight(four, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(four, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    twice = shape("qwen3-8b", 4, pipeline=4, virtual_pipeline=3)
    assert [in_flight(twice, stage, 8) for stage in range(4)] == [15, 13, 11, 9]


def test_the_kernels_of_the_head_keep_so_much_and_no_more() -> None:
    for tokens, tensor in ((2048, 8), (65536, 1)):
        layout, pack = shape("qwen3-8b", tensor, tensor=tensor), PlannedPack(lengths=(tokens,), scored=tokens)
        chunks, kernels = (
            activations(replace(layout, kernels=kernels), 0, pack, 1).moments for kernels in (False, True)
        )
        logits, states = 2 * tokens * layout.vocab_rows, 2 * tokens * 4096
        kept = min(logits, 2**30)
        assert kernels["the head's backward"] == pytest.approx(
            2 * states + max(kept + states + min(logits, 2**29), 2 * states + 2 * layout.vocab_rows * 4096)
        )
        assert kernels["the head's forward"] == pytest.approx(2 * states + kept + states)
        assert chunks["a layer's backward"] == kernels["a layer's backward"]


def test_transformer_engine_keeps_less_than_local_layers() -> None:
    pack = PlannedPack(lengths=(4096, 4096), scored=4096)
    fused, local = (layer_bytes(shape("qwen3-8b", layers=kind), pack) for kind in
                    ("transformer_engine", "local"))  # fmt: skip
    assert 0.6 * local < fused < 0.8 * local
    # Per token in bf16: 4 H at two norms, q and k before their norms, q, k, v, out, 3 F, and statistics.
    a = PRESETS["qwen3-8b"]
    values = 4 * a.hidden_size + 3 * a.q_size + 3 * a.kv_size + 3 * a.ffn_size
    assert fused == 8192 * (2 * values + 4 * (2 + 2 * a.num_heads + a.num_kv_heads))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    out, err = capsys.readouterr()
    return status, out, err


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status, out, _ = run(capsys, *words, "--json")
    return status, json.loads(out)


def words_of(file: str, nproc: int) -> list[str]:
    """Of a shipped configuration of the model with 8 billion parameters."""
    files = dict.fromkeys(["run", file])
    words = [word for name in files for word in ("--config", str(EXAMPLES / f"qwen3_8b/{name}.toml"))]
    return [*words, "--model", "qwen3-8b", "--nproc", str(nproc)]


# Ranks that train of each; the others of its nodes are servers.
SHIPPED = {"run": 8, "one_node": 4, "colocated": 8, "two_nodes": 8, "four_nodes": 16}


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_configurations_of_8b_fit_80_gb(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, *words_of(file, SHIPPED[file]))
    assert status == 0 and found["fits"] and not found["changes"]
    assert all(stage["total"] < 76 * GIB for stage in found["stages"])


def words_of_mixture(file: str, nproc: int) -> list[str]:
    files = ["qwen3_8b/run.toml", "qwen3_30b_a3b/run.toml", f"qwen3_30b_a3b/{file}.toml"]
    words = [word for name in files for word in ("--config", str(EXAMPLES / name))]
    return [*words, "--model", "qwen3-30b-a3b", "--nproc", str(nproc)]


@pytest.mark.parametrize(("file", "nproc"), [("one_node", 8), ("two_nodes", 8), ("four_nodes", 16)])
def test_shipped_configurations_of_a_mixture_fit_80_gb(
    file: str, nproc: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of_mixture(file, nproc)
    status, found = run_json(capsys, *words, "--servers", str(nproc // 2))
    assert status == 0 and found["server"]["gpus"] == 2
    # Half as many do not: where all of a node train, servers have to take turns with them.
    assert file == "four_nodes" or run(capsys, *words, "--nproc", "4", "--parallel.expert", "4")[0] == 1
    (stage,) = found["stages"]
    # uint8 of 48 layers and 8 experts: 1,024 responses of the longest, over the data-parallel ranks. And
    # those of an optimizer step's routers, which have a quarter of the tokens, and whether they differ.
    tokens = 1024 // found["data"] * 10240
    kept = tokens * 48 * 8 + tokens // 4 // 4 * 48 * 9
    assert stage["phases"]["update"]["experts of each token, from the old pass"] == kept


def test_routes_are_kept_only_where_somebody_asks(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words_of_mixture("four_nodes", 16), "--moe.replay", "off"]
    key = "experts of each token, from the old pass"
    for old, kept in (("recompute", True), ("sampled", False)):
        _, found = run_json(capsys, *words, "--rollout.old_log_probs", old)
        assert (key in found["stages"][0]["phases"]["update"]) == kept


def test_an_uneven_share_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    for file, nproc, more in (("four_nodes", 16, "8.0"), ("two_nodes", 8, "0.0")):
        _, found = run_json(capsys, *words_of_mixture(file, nproc))
        assert any(f"twice their share needs {more} GiB more" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "servers", "seconds", "noted"),
    [
        ("", 1, 3035, "vllm.urls"),
        ("--servers 8", 8, 496, None),
        ("--vllm.discovery /shared/servers", 1, 3035, "vllm.discovery"),
        ("--vllm.discovery /shared/servers --servers 8", 8, 496, None),
        ("--vllm.urls ['http://a:1','http://b:1']", 2, 1584, "vllm.urls"),
    ],
)
def test_servers_are_counted(
    words: str, servers: int, seconds: float, noted: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = run_json(capsys, *words_of("two_nodes", 8), *words.split())
    assert found["servers"] == servers
    every = sum(part for parts in found["estimate_seconds"].values() for part in parts.values())
    assert every == pytest.approx(seconds, rel=0.01)
    notes = [note for note in found["notes"] if "--servers" in note]
    assert [noted in note for note in notes] == [True] * (noted is not None)  # type: ignore[operator]


def test_memory_phases_on_shared_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words_of("one_node", 8), "--vllm.colocated", "true", "--vllm.transfer", "gloo"]
    status, found = run_json(capsys, *words, "--server-share", "0.85")
    server, stage = found["server"], found["stages"][0]
    # 4 ranks of TP4 have the job, tensor parallelism and the optimizer's norm; 2 copies of them the fourth.
    assert stage["nccl"] == (4 * 1.25 + 0.39) * 2**30
    assert status == 0 and found["memory_phases"]["servers"] == 0.85 * 80 * 2**30 + stage["nccl"]
    weights = stage["always"]["parameters"] + server["weights"] + server["receiving"]
    sent = stage["phases"]["sync"]["weights on their way to the servers"]
    assert found["memory_phases"]["update"] == pytest.approx(stage["nccl"] + weights + sent)
    status, out, _ = run(capsys, *words, "--server-share", "0.98")
    assert status == 1 and "DOES NOT FIT: memory phase 'servers' needs 83.8 of 76.0 GiB" in out


@pytest.mark.parametrize(
    ("model", "world", "words", "several", "alone"),
    [
        ("qwen3-0.6b", 1, "", 0, 1),
        ("qwen3-0.6b", 8, "--parallel.tensor 2 --parallel.pipeline 2 --parallel.context 2", 6, 0),
        ("qwen3-0.6b", 8, "--parallel.context 4", 6, 1),  # with two neighbours in the ring
        ("qwen3-30b-a3b", 8, "--parallel.tensor 4 --parallel.sequence true --parallel.expert 8", 5, 2),
    ],
)
def test_communicators_are_counted(model: str, world: int, words: str, several: int, alone: int) -> None:
    config = load_config(
        [EXAMPLES / "make_sum/run.toml"],
        [*"--parallel.tensor 1 --parallel.sequence false".split(), *words.split()],
    )
    assert communicators(make_plan(config, PRESETS[model], Given(world=world)).shape) == (several, alone)


def test_what_does_not_fit_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words_of("run", 8), "--gpu-memory", "48"]
    status, out, _ = run(capsys, *words)
    assert status == 1 and "DOES NOT FIT: stage 0 needs" in out
    status, found = run_json(capsys, *words)
    fitting = [change for change in found["changes"] if change["fits"]]
    assert status == 1 and fitting and found["problems"]
    assert [c["estimate_seconds"] for c in fitting] == sorted(c["estimate_seconds"] for c in fitting)
    assert all(change["total"] <= found["room"] for change in fitting)
    # Taken at its word, the first one fits.
    changes = [part.split(" = ") for part in fitting[0]["change"].split(", ")]
    assert run(capsys, *words, *(f"--{key}={value}" for key, value in changes))[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model gpt-5", "gpt-5 is neither a folder with a config.json nor one of smollm2-135m"),
        ("--nproc 6", "does not divide the world size 6"),
        ("--nproc 0", "--nproc 0: must be"),
        (
            "--nproc 16 --model qwen3-235b-a22b --parallel.pipeline 4 --parallel.tensor 4",
            "does not divide the model's 94 layers",
        ),
        ("--assume speed=3", "--assume speed=3: unknown name; the names are flops"),
        ("--assume flops=fast", "--assume flops=fast: must be"),
        ("--assume flops=-1", "--assume flops=-1: must be"),
        ("--server-share 85", "--server-share 85: must be"),
        ("--servers 0", "--servers 0: must be"),
        ("--trace every", "--trace 'every': must be"),
        ("--servers 8", "rollout.engine = embedded uses no servers"),
        ("--reserve 80", "must be less than --gpu-memory 80"),
        ("--parallel.tensr 2", "did you mean parallel.tensor"),
    ],
)
def test_what_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words_of("run", 8), *words.split())
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1, err


def test_a_folder_names_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(EXAMPLES / "make_sum/run.toml")
    here = str(EXAMPLES / "make_sum/checkpoint")
    both = ("--config", config, "--nproc", "2", "--model.backend", "cpu", "--json")
    own = run(capsys, *both, "--model.checkpoint", here)
    assert own == run(capsys, *both, "--model", f"{here}/config.json") and own[0] == 0


def test_assumptions_move_the_estimate() -> None:
    config, arch = load_config(RUN), PRESETS["qwen3-8b"]
    slow = make_plan(config, arch, Given(world=8))
    assert slow.phases[0].parts["decoding steps"] == pytest.approx(36 * 0.0022 * 16384)
    fp8 = make_plan(load_config(RUN, ["--fp8.recipe", "blockwise"]), arch, Given(world=8))
    gained = [
        before.parts["arithmetic"] / after.parts["arithmetic"]
        for before, after in zip(slow.phases[1:3], fp8.phases[1:3], strict=True)
    ]
    assert gained == pytest.approx([1.3, 1.3])
    fast = make_plan(config, arch, Given(world=8, machine=assumed(["flops=1978e12", "memory=6.7e12"])))
    by_name = {phase.name: phase for phase in fast.phases}
    for phase in slow.phases[1:3]:
        assert by_name[phase.name].parts["arithmetic"] == pytest.approx(phase.parts["arithmetic"] / 2)
    assert fast.seconds < slow.seconds and assumed([]) == Machine()
    again = make_plan(load_config(RUN, ["--model.recompute", "full"]), arch, Given(world=8))
    held = [sum(plan.stages[0].phases["update"].values()) for plan in (slow, again)]
    assert held[1] < held[0] / 2
    assert again.phases[2].parts["arithmetic"] > 1.2 * slow.phases[2].parts["arithmetic"]
    longer = make_plan(config, arch, Given(world=8, mean_response=config.rollout.max_response_tokens))
    assert longer.seconds > slow.seconds and longer.worst.total == slow.worst.total
