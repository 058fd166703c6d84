"""What a trace may show, and what of it is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_fspo.config import Config
from megatron_fspo.lab.plan.plan import GIB, Given, make_plan
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.trace.record import Request
from megatron_fspo.parallel.head import KEEP_BYTES

UPDATES = 2


@dataclass(frozen=True)
class Sync:
    """A wait of the host that is allowed."""

    phase: str
    file: str
    function: str
    kind: str
    why: str
    micro_batch: int = 0
    step: int = 0
    """In each optimizer step; in the old pass, in all of it."""


_STEP = "once an optimizer step, and the next begins with it"
_PASS = "once a rollout"
_SHAPES = "Megatron's own, of messages of any length between stages"
_EXPERTS = "Megatron's own: tokens for each expert; a norm of experts and one of the rest"
ALLOWED = [
    Sync("update", "parallel/head.py", "backward", "nonzero", "clipped rows are not computed", micro_batch=1),
    Sync("update", "mcore/model/policy.py", "grad_norm", "item", _STEP, step=1),
    Sync("update", "parallel/groups.py", "sum_metrics", "tolist", _STEP, step=1),
    Sync("update", "record/records.py", "records", "tolist", _STEP, step=1),
    Sync("update", "parallel/groups.py", "any_rank", "item", "max_kl, and a norm that is not finite", step=2),
    Sync(
        "update", "mcore/machine/backend.py", "busy_seconds", "synchronize", "the time of a slow rank", step=2
    ),
    # Of megatron-core 0.16.
    Sync("update", "distributed/finalize_model_grads.py", "finalize_model_grads", "item", _STEP, step=2),
    Sync("update", "optimizer/clip_grads.py", "get_grad_norm_fp32", "item", _STEP, step=1),
    Sync("old pass", "parallel/groups.py", "sum_metrics", "tolist", _PASS, step=1),
    Sync("old pass", "trainer/mismatch.py", "make_alarm", "pageable copy", _PASS, step=1),
    Sync("old pass", "trainer/mismatch.py", "measure", "tolist", _PASS, step=1),
    Sync("old pass", "trainer/mismatch.py", "measure", "copy to the host", _PASS, step=2),
    Sync("old pass", "trainer/mismatch.py", "_gap", "tolist", _PASS, step=1),
    Sync("old pass", "trainer/mismatch.py", "check", "tolist", _PASS, step=1),
    Sync("old pass", "trainer/rollout.py", "_bring", "copy to the host", "tokens by NCCL", step=2),
    Sync("old pass", "trainer/rollout.py", "_bring", "pageable copy", "tokens by NCCL", step=2),
    Sync("old pass", "parallel/groups.py", "exchange", "pageable copy", "tokens by NCCL", step=4),
    Sync("old pass", "parallel/groups.py", "exchange", "tolist", "tokens by NCCL", step=4),
    Sync("old pass", "parallel/groups.py", "exchange", "copy to the host", "tokens by NCCL", step=2),
    *(
        Sync(phase, "transformer_engine/pytorch/utils.py", "_empty_tensor", "pageable copy", "once", step=1)
        for phase in ("old pass", "update")
    ),
    *(
        Sync(phase, "p2p_communication.py", function, kind, _SHAPES, micro_batch=12)
        for phase in ("old pass", "update")
        for function, kind in (
            ("_communicate_shapes", "pageable copy"),
            ("_communicate_shapes", "synchronize"),
            ("_communicate_shapes", "tolist"),
            ("_communicate", "synchronize"),
        )
    ),
    # Of two layers, and once an optimizer step.
    *(
        Sync(phase, f"megatron/core/transformer/moe/{file}.py", function, kind, _EXPERTS, micro_batch=most)
        for phase in ("old pass", "update")
        for file, function, kind, most in (
            ("moe_utils", "maybe_move_tensor_to_cpu", "copy to the host", 10),
            ("moe_utils", "permute", "masked_select", 4),
            ("token_dispatcher", "_maybe_dtoh_and_synchronize", "synchronize", 2),
        )
    ),
    *(
        Sync("update", f"megatron/core/{file}.py", function, "item", _EXPERTS, step=3)
        for file, function in (
            ("optimizer/optimizer", "get_grad_norm"),
            ("optimizer/clip_grads", "get_grad_norm_fp32"),
            ("distributed/finalize_model_grads", "finalize_model_grads"),
        )
    ),
]
DEBUGGING = ("megatron/core/models/common/embeddings/rope_utils.py", "megatron_fspo/mcore/model/layers.py")
"""Local layers wait in every layer: they are to debug with."""


def problems(seen: dict[str, Any], asked: Request) -> list[str]:
    """Everything that is wrong, a line each, which begins with what it is about."""
    if seen["error"]:
        return [f"device: {seen['error']}" if seen["mixed"] else seen["error"]]
    config = Config.model_validate(asked.config)
    checks = (_syncs, _memory, _sizes, _messages, _connected)
    return [line for check in checks for line in check(seen, asked, config)]


def _syncs(seen: dict[str, Any], asked: Request, config: Config) -> Iterator[str]:
    counted: Counter[tuple[str, str, str, str]] = Counter()
    for one in seen["syncs"]:
        site = one["site"]
        if one["phase"] in ("old pass", "update") and site["file"] not in DEBUGGING:
            counted[one["phase"], site["file"], site["function"], one["kind"]] += one["count"]
    for (phase, file, function, kind), count in counted.items():
        allowed = sum(
            one.micro_batch * seen["micro_batches"] + one.step * (UPDATES if phase == "update" else 1)
            for one in ALLOWED
            if file.endswith(one.file) and (one.phase, one.function, one.kind) == (phase, function, kind)
        )
        if count > allowed:
            yield f"{kind}: {count} in the {phase} at {file} {function}, {allowed} are allowed"
    yield from (f"early: {line}" for line in seen["early"])


def _connected(seen: dict[str, Any], asked: Request, config: Config) -> Iterator[str]:
    """NCCL would allocate for a group that is first used when memory is full."""
    used: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    for one in seen["collectives"]:
        used[one["site"]["function"] == "connect_groups"].add(tuple(one["ranks"]))
    yield from (f"connected: ranks {ranks} are not, before the step" for ranks in used[False] - used[True])


def _memory(seen: dict[str, Any], asked: Request, config: Config) -> Iterator[str]:
    planned, most = plan_of(asked, config), seen["peaks"]["update"]
    local = config.model.layers == "local"
    if not -0.1 * planned < most - planned <= (0.1 if local else 0.03) * planned:
        yield f"memory: {most / GIB:.2f} GiB in an update, {planned / GIB:.2f} are planned"
    if config.vllm.colocated and seen["left"] > 0.25 * GIB:
        yield f"lent: {seen['left'] / GIB:.2f} GiB stay on the GPU while servers have it"


def plan_of(asked: Request, config: Config) -> float:
    """Bytes that ``plan`` gives a rank in an update."""
    arch = find_model(asked.model)
    if asked.layers is not None:
        from dataclasses import replace

        arch = replace(arch, num_layers=asked.layers)
    stage = make_plan(config, arch, Given(world=asked.world)).stages[
        asked.rank * config.parallel.pipeline // asked.world
    ]
    return sum(stage.always.values()) + sum(stage.phases["update"].values())


def _sizes(seen: dict[str, Any], asked: Request, config: Config) -> Iterator[str]:
    arch = find_model(asked.model)
    columns = arch.vocab_size // config.parallel.tensor
    logits = config.rollout.max_response_tokens * columns * 2
    weights = [width * arch.hidden_size * arch.vocab_size // config.parallel.tensor for width in (2, 4)]
    for one in seen["allocations"]:
        inside = one["phase"] in ("old pass", "update") and "optimizer" not in one["site"]["file"]
        is_weight = any(abs(one["value"] / size - 1) < 0.01 for size in weights)
        # The head keeps and makes some of them, up to a fixed size.
        of_head = one["site"]["file"].startswith("megatron_fspo/parallel/") and one["value"] <= KEEP_BYTES
        if inside and one["value"] >= logits * 0.99 and not (is_weight or of_head):
            yield f"logits: {one['value']} bytes at once, those of all logits are {logits}: {one['site']}"
    yield from (f"float64: {one['value']} tensors at {one['site']}" for one in seen["wide"])


def _messages(seen: dict[str, Any], asked: Request, config: Config) -> Iterator[str]:
    """Against docs/parallelism.md: group, how often, and how much."""
    parallel, arch = config.parallel, find_model(asked.model)
    multiple = config.fp8.align * (parallel.tensor if parallel.sequence else 1)
    tokens = -(-config.batch.max_tokens // parallel.context // multiple) * multiple
    rows = tokens  # response tokens of a rank: not all of these
    hidden = tokens * arch.hidden_size
    layers = (asked.layers or arch.num_layers) // parallel.pipeline
    in_fp8 = layers - 2 * config.fp8.first_last_layers_bf16 if config.fp8.recipe != "none" else 0
    wide = layers - in_fp8
    sequences = 64
    responses = seen["micro_batches"] * len(seen["groups"]["dp"])
    # Function → group, in a micro-batch of the old pass and of the update, in each step, bytes at most.
    rules: dict[tuple[str, str], tuple[int, int, int, float]] = {
        ("_gather", "tp"): (
            1 + parallel.sequence,
            1 + parallel.sequence,
            0,
            max(2 * hidden, 16 * rows * parallel.tensor),
        ),
        ("broadcast_first", "tp"): (0, 1, 4, 8 * rows * 4),
        ("broadcast_first", "cp"): (0, 1, 4, 8 * rows * 4),
        ("broadcast_first", "pp"): (0, 0, 4, 8 * rows * 4),
        ("broadcast_first", "dp_cp"): (0, 0, 1, 64),
        ("_hidden_gradient", "tp"): (0, 1, 0, 4 * hidden),
        ("added_up", "cp"): (0, 1, 0, 48 * sequences),
        ("added_up", "dp_cp"): (0, 0, 1, 48 * sequences),
        ("sum_metrics", "dp_cp"): (0, 0, 1, 32 * 8),
        ("measure", "dp_cp"): (0, 0, 1, 64 + 8 * max(asked.world, responses)),
        ("check", "dp_cp"): (0, 0, 1, 64),
        ("any_rank", "all"): (0, 0, 2, 8),
        ("report", "all"): (0, 0, 1, 8 * arch.num_layers * (arch.num_experts + 6)),
        ("_whole", "tp"): (0, 0, 1, seen["micro_batches"] * tokens * layers * 8),
        ("_losses", "tp"): (0, layers, 0, 4 * sequences * arch.num_experts),
        ("flipped", "pp"): (0, 0, 1, seen["micro_batches"] * tokens),
        ("score", "pp"): (0, 0, 1, 4 * rows * seen["micro_batches"]),
        ("exchange", "dp"): (0, 0, 4, 4 * rows * seen["micro_batches"]),
        ("gather_along_first_dim", "tp"): (2 * wide, 6 * wide, 0, 2 * hidden),
        ("_start_all_gather_fp8_blockwise", "tp"): (2 * in_fp8, 6 * in_fp8, 0, hidden),
        ("_all_gather_fp8", "tp"): (2 * in_fp8, 6 * in_fp8, 0, hidden),
        ("_all_gather_mxfp8", "tp"): (2 * in_fp8, 6 * in_fp8, 0, hidden),
        ("reduce_scatter_along_first_dim", "tp"): (2 * layers, 4 * layers, 0, 2 * hidden),
        **dict.fromkeys(
            (("start_grad_sync", name) for name in ("dp_cp", "edp")), (0, 0, 3 + layers * 2, math.inf)
        ),
        ("finalize_model_grads", "dp_cp"): (0, 0, 1, 4),
        ("finalize_model_grads", "pp"): (0, 0, 1, 4),
    }
    ours = [one for one in seen["collectives"] if one["phase"] in ("old pass", "update")]
    counted: Counter[tuple[str, str, str]] = Counter()
    for one in ours:
        function, file = one["site"]["function"], one["site"]["file"]
        known = [group for name, group in rules if name == function]
        if not known:
            if file.startswith("megatron_fspo/"):
                yield f"collective: {one['name']} in {function} is in no table"
            continue
        members = seen["groups"] | {"all": list(range(asked.world))}
        group = next((name for name in known if members[name] == one["ranks"]), None)
        if group is None:
            yield f"group: {one['name']} in {function} over the ranks {one['ranks']}, not over {known}"
            continue
        if one["largest"] > rules[function, group][3]:
            yield f"collective: {one['name']} in {function} has {one['largest']} bytes"
        counted[one["phase"], function, group] += one["count"]
    for (phase, function, group), count in counted.items():
        old, update, step, _ = rules[function, group]
        each = update if phase == "update" else old * (2 if config.loss.kl_coef else 1)
        allowed = each * seen["micro_batches"] + step * (UPDATES if phase == "update" else 1)
        again = 2 if config.model.recompute == "full" else 1
        if count > allowed * again:
            yield f"collective: {count} in the {phase} in {function} over {group}, {allowed} are in the table"
