"""One rank of benchmarks/step_overhead.py, which starts it with torchrun: a step without its model.

The package is the one on PYTHONPATH: that of this checkout, or of an older commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

PHASES = ("share", "exchange", "grade", "plan", "collate", "mismatch", "records")
"""What is compared, in the order of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--code", choices=["before", "after"], required=True)
    parser.add_argument("--package", type=Path, required=True, help="where megatron_fspo has to come from")
    parser.add_argument("--responses", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of the longest response")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--plan", action="store_true", help="only plan, in one process; seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    import megatron_fspo

    found = Path(str(megatron_fspo.__file__)).resolve()
    assert found.is_relative_to(options.package.resolve()), f"megatron_fspo is {found}"
    report = plan(options) if options.plan else measure(options)
    if report is not None:
        options.out.write_text(json.dumps(report) + "\n", encoding="utf-8")


def plan(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of CPU to plan both optimizer steps of a rollout for four ranks."""
    from megatron_fspo.packing.plan import attention_costs, plan_micro_batches
    from step_synthetic import PROMPT, lengths_of

    lengths = [PROMPT + length for length in lengths_of(options.responses, options.tokens)]
    began = time.process_time()
    for part in (lengths[::2], lengths[1::2]):
        # Of a model of 8 billion parameters: a layer's matrices, and its query heads.
        costs = attention_costs(part, linear_size=193_000_000, attention_size=4096)
        plan_micro_batches(part, ranks=4, max_tokens=2 * (PROMPT + options.tokens), costs=costs)
    seconds = time.process_time() - began
    return {"seconds": seconds, "response_tokens": sum(lengths) - PROMPT * len(lengths)}


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """On the first rank what all found."""
    from megatron_fspo.mcore.backend import choose_backend
    from megatron_fspo.mcore.startup import start, stop
    from step_synthetic import Clock, Memory, Traffic, config_of, lengths_of

    torch.set_num_threads(1)
    parallel = {"tensor": options.tensor, "context": options.context}
    config = config_of(options.responses, options.tokens, parallel)
    backend = choose_backend("cpu")
    groups = start(backend, parallel=config.parallel, seed=1)
    clock, code = Clock(), import_module(f"step_{options.code}")
    code.wrap(clock)
    traffic = Traffic()
    inputs = _inputs(config, backend, clock)
    # What the first step alone takes is no matter of its size.
    _one(inputs, groups, clock, code, argparse.Namespace(responses=64, tokens=64))
    repeats = []
    for _ in range(options.repeats):
        traffic.bytes = 0
        memory = Memory()
        dist.barrier()
        repeats.append(_one(inputs, groups, clock, code, options) | {"received": traffic.bytes})
        repeats[-1]["memory"] = memory.bytes()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, repeats)
    first = dist.get_rank() == 0
    stop()
    lengths = lengths_of(options.responses, options.tokens)
    return _report(ranks, sum(lengths)) if first else None


def _inputs(config: Any, backend: Any, clock: Any) -> Any:
    from megatron_fspo.weights import read_architecture
    from step_synthetic import STOP

    turns = itertools.count()  # no prompt without a spread, whose responses this checkout would leave out

    def decode(ids: Any, skip_special_tokens: bool) -> str:
        return ""

    def reward(prompt: Any, completion: Any, text: str) -> float:
        return float(next(turns) % 2)

    return SimpleNamespace(
        config=config,
        backend=backend,
        arch=read_architecture(config.model.checkpoint),
        tokenizer=SimpleNamespace(decode=decode),
        decode=lambda ids: decode(ids, skip_special_tokens=False),
        reward=reward,
        stop_token_ids=(STOP,),
        dtype=torch.bfloat16,
        noise=None,
    )


def _one(inputs: Any, groups: Any, clock: Any, code: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One step."""
    from megatron_fspo.rollout.client.engine import Leader, VLLMEngine
    from megatron_fspo.types import SamplingParams
    from step_synthetic import SAMPLES, STOP, Servers, lengths_of, prompts_of, run_of

    lengths = lengths_of(options.responses, options.tokens)
    prompts = prompts_of(options.responses // SAMPLES)
    leader = None
    if dist.get_rank() == 0:
        servers: Any = Servers(clock, lengths, options.tokens)
        leader = Leader(loop=servers, pool=servers, http=None, sender=None)  # type: ignore[arg-type]
    engine = VLLMEngine(None, groups, leader, canary_sequences=[], tolerance=0.0)  # type: ignore[arg-type]
    run = run_of(inputs, groups, clock)
    params = SamplingParams(n=SAMPLES, max_tokens=options.tokens, stop_token_ids=(STOP,))
    clock.clear()
    with clock("share"):
        batch = code.ask(inputs, engine, groups, prompts, params)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    responses = code.collect(run, _timed(batch, clock), clock)
    del batch
    metrics = code.step(run, responses, clock)
    dist.barrier()
    assert metrics["response_length/mean"] == sum(lengths) / len(lengths)
    return {
        "wall": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "phases": dict(clock.cpu),
        "metrics": {name: value for name, value in metrics.items() if value == value},
    }


def _timed(batch: Any, clock: Any) -> Any:
    def pending(progress: Any = None, **_: Any) -> Any:
        with clock("share"):
            return batch.pending(progress)

    return replace(batch, pending=pending)


def _report(ranks: list[list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """The fastest repeat of each number; memory and traffic of the first."""
    first = [repeats[0] for repeats in ranks]
    count = len(ranks[0])
    names = {*PHASES, "read"}
    busiest = [max(repeats[i]["cpu"] for repeats in ranks) for i in range(count)]
    return {
        "response_tokens": tokens,
        "wall_seconds": min(repeat["wall"] for repeat in ranks[0]),
        "cpu_seconds_busiest_rank": min(busiest),
        "cpu_seconds_all_ranks": min(sum(repeats[i]["cpu"] for repeats in ranks) for i in range(count)),
        "phases": {
            name: min(max(repeats[i]["phases"].get(name, 0.0) for repeats in ranks) for i in range(count))
            for name in sorted(names)
        },
        "memory_first_rank": first[0]["memory"],
        "memory_other_ranks": max(rank["memory"] for rank in first[1:]) if first[1:] else None,
        "received_all_ranks": sum(rank["received"] for rank in first),
        "metrics": ranks[0][0]["metrics"],
    }


if __name__ == "__main__":
    main()
