"""Routes in an answer: those that can be its tokens' are read, and all others are counted as missing."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_server import PARAMS, FakeServer, good_answer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_fspo.config import VLLM
from megatron_fspo.errors import InputError, InputErrors
from megatron_fspo.packing.batch import route_dtype
from megatron_fspo.rollout.client.answers import read_completion
from megatron_fspo.rollout.client.connect import Needs, absent_servers, connect, settle
from megatron_fspo.rollout.client.routes import read_routes
from megatron_fspo.rollout.server import flags
from megatron_fspo.types import Completion, Routing

ROUTING = Routing(layers=3, experts=9, per_token=2)
PROMPT = 4
TOKENS = PROMPT + 3
INFO = "/server_info?config_format=json"


def encoded(routes: Any) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def some(tokens: int = TOKENS, routing: Routing = ROUTING, seed: int = 0) -> np.ndarray[Any, Any]:
    """Routes that could be."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens - 1, routing.layers, routing.experts, generator=generator)
    experts = scores.topk(routing.per_token, sorted=False).indices.numpy()
    return experts.astype(np.uint8 if routing.experts <= 256 else np.uint16)


def completion(sent: str | None, **changes: Any) -> Completion:
    """Of an answer with these routes; a prompt of 4 tokens and a response of 3."""
    answer = good_answer(3 + 50 * 5 + 50 * 50 * 8)
    answer["choices"][0] |= {"routed_experts": sent} | changes.pop("choice", {})
    params = replace(PARAMS, routing=ROUTING, **changes)
    return read_completion(json.dumps(answer).encode(), params, PROMPT)


@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 5), st.integers(0, 400), st.integers(0, 99))
def test_routes_come_back(tokens: int, layers: int, per_token: int, more: int, seed: int) -> None:
    routing = Routing(layers=layers, experts=per_token + more, per_token=per_token)
    want = some(tokens, routing, seed)
    got = read_routes(encoded(want), routing, tokens=tokens, versions=1)
    assert got.dtype == route_dtype(routing.experts) and got.tolist() == want.tolist()


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_break_the_reader(junk: bytes, as_array: bool) -> None:
    sent = base64.b64encode((b"\x93NUMPY\x01\x00" if as_array else b"") + junk).decode()
    with pytest.raises(ValueError):
        read_routes(sent, ROUTING, tokens=TOKENS, versions=1)


@given(st.data())
def test_one_wrong_expert_is_enough(data: st.DataObject) -> None:
    routes = some()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in routes.shape)
    other = int(routes[(*place[:2], 1 - place[2])])
    routes[place] = data.draw(st.one_of(st.just(other), st.integers(ROUTING.experts, 255)))
    with pytest.raises(ValueError, match=r"twice|a layer has 9"):
        read_routes(encoded(routes), ROUTING, tokens=TOKENS, versions=1)


GOOD = some()
HOSTILE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999,)}".ljust(118)
)
WRONG: dict[str, str | None] = {
    "none": None,
    "no base64": "%%",
    "a token too few": encoded(GOOD[1:]),
    "a token too many": encoded(np.concatenate([GOOD, GOOD[-1:]])),
    "a layer too few": encoded(GOOD[:, 1:]),
    "an expert too few": encoded(GOOD[..., :1]),
    "flat": encoded(GOOD.reshape(-1)),
    "another order": encoded(np.asfortranarray(GOOD)),
    "uint16": encoded(GOOD.astype(np.uint16)),
    "int8": encoded(GOOD.astype(np.int8)),
    "objects": encoded(np.array([{}], dtype=object)),
    "rows of zeros": encoded(np.concatenate([GOOD[:2] * 0, GOOD[2:]])),
    "rows that nobody filled": encoded(np.concatenate([GOOD[:-1], GOOD[-1:] * 0 + 255])),
    "cut off": encoded(GOOD)[:-4],
    "more than it says": base64.b64encode(HOSTILE).decode(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_believed_is_left_out_and_says_why(name: str) -> None:
    """The response itself stays."""
    got = completion(WRONG[name])
    assert got.routes is None and 0 < len(got.route_problem) < 300 and "\n" not in got.route_problem
    assert tuple(got.token_ids) == (3, 5, 8)


def test_a_weight_update_under_way() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    got = completion(encoded(GOOD), choice={"weight_versions": spans})
    assert got.routes is None and "update" in got.route_problem
    whole = [{"version": "2", "start": 0, "end": 3}]
    assert completion(encoded(GOOD), choice={"weight_versions": whole}).route_problem == ""


def test_routes_end_with_the_response() -> None:
    """A stop string cuts both; of the token that is last then the sampler's route is not needed."""
    whole = completion(encoded(GOOD))
    assert whole.routes is not None and whole.routes.tolist() == GOOD.tolist()
    cut = completion(encoded(GOOD), stop=("5",), decode=lambda ids: "".join(map(str, ids)))
    assert tuple(cut.token_ids) == (3, 5)
    assert cut.routes is not None and cut.routes.tolist() == GOOD[:-1].tolist()


def test_they_are_not_read_where_nobody_replays_them() -> None:
    answer = good_answer(8)
    answer["choices"][0]["routed_experts"] = "%%"
    got = read_completion(json.dumps(answer).encode(), PARAMS, PROMPT)
    assert got.routes is None and got.route_problem == ""


@pytest.mark.parametrize(
    ("lora", "lines"), [({"max_lora_rank": 8}, 0), ({"max_lora_rank": 1}, 1), (None, 1), ({}, 1)]
)
def test_a_server_without_adapters_is_refused(lora: object, lines: int) -> None:
    async def main() -> list[str]:
        async with FakeServer() as fake:
            fake.answers[INFO] = {"vllm_config": {"lora_config": lora}}
            return await absent_servers(VLLM(urls=(fake.url,)), Needs(lora_rank=4))

    said = asyncio.run(main())
    assert len(said) == lines and all("serve --lora-rank 4" in line for line in said)


def test_first_layers_with_an_mlp_have_no_routes() -> None:
    """Servers send zeros for them."""
    routing, routes = replace(ROUTING, dense=1), some()
    routes[:, 0] = 0
    got = read_routes(encoded(routes), routing, tokens=TOKENS, versions=1)
    assert torch.equal(got.int(), torch.from_numpy(routes))
    routes[-1, 1] = 0
    for each in (routing, ROUTING):
        with pytest.raises(ValueError, match="twice"):
            read_routes(encoded(routes), each, tokens=TOKENS, versions=1)


@pytest.mark.parametrize(
    ("heads", "inputs"), [({"head_dim": 8}, 24), ({"head_dim": 4, "kv_lora_rank": 6, "v_head_dim": 10}, 30)]
)
def test_the_first_adapter_is_of_a_matrix_that_every_family_has(
    heads: dict[str, int], inputs: int, tmp_path: Path
) -> None:
    flags.write_first_adapter(tmp_path, {"hidden_size": 16, "num_attention_heads": 3, **heads})
    factors = load_file(tmp_path / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.self_attn.o_proj.lora"
    shapes = {name: tuple(factor.shape) for name, factor in factors.items()}
    assert shapes == {f"{stem}_A.weight": (1, inputs), f"{stem}_B.weight": (16, 1)}


HEADS = {"num_attention_heads": None, "head_dim": 8}


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 8}, {"hidden_size": 8, **HEADS}, {**HEADS}])
def test_the_first_adapter_needs_the_sizes_of_the_model(tmp_path: Path, sizes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"--lora-rank: .*num_attention_heads"):
        flags.write_first_adapter(tmp_path, sizes)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ({"vllm_config": {"aux_output_config": {"enable_return_routed_experts": True}}}, False),
        ({"vllm_config": {"aux_output_config": {"enable_return_routed_experts": False}}}, True),
        ({"vllm_config": "text"}, True),
        ([], True),
    ],
)
def test_a_server_without_routes_is_refused_at_the_start(told: object, refused: bool) -> None:
    async def main() -> None:
        async with FakeServer() as fake:
            fake.answers[INFO] = told
            options = VLLM(urls=(fake.url,))
            leader = connect(options, 50)
            settled = asyncio.to_thread(leader.loop.run, settle(leader, Needs(routes=True), colocated=False))
            try:
                if refused:
                    with pytest.raises(InputErrors, match="returns no routes") as error:
                        await settled
                    assert fake.url in str(error.value) and "\n" not in str(error.value)
                else:
                    await settled
                assert len(await absent_servers(options, Needs(routes=True))) == refused
                assert await absent_servers(options, Needs()) == []
                await asyncio.to_thread(leader.loop.run, settle(leader, Needs(), colocated=False))
            finally:
                await asyncio.to_thread(leader.loop.run, leader.http.aclose())
                leader.loop.close()

    asyncio.run(main())


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.32.0"])
def test_routes_come_by_a_flag_of_vllm(tmp_path: Path, version: str) -> None:
    """On a CPU with a worker of ours, whose passes are not asynchronous."""
    vllm = flags.Installation(Path("vllm"), version)
    asked = flags.ServerOptions(tmp_path, routes=True)
    sizes: dict[str, int] = {"head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(InputError, match=r"--routes: .*config\.json"):
        flags.check(asked, vllm)
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps(sizes | {key: 4}))
        flags.check(asked, vllm)
    flag, ours = "--enable-return-routed-experts", ("--worker-cls", "--no-async-scheduling")
    assert flag not in flags.command(flags.ServerOptions(tmp_path), vllm)
    words = flags.command(asked, vllm)
    assert flag in words and all((word in words) == vllm.on_cpu for word in ours)
