"""What is made up for benchmarks/step_overhead.py: prompts, answers of servers, log-probs of a model; and the
clock, the memory and the traffic of a rank."""

from __future__ import annotations

import gc
import json
import random
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from machine import ROOT
from megatron_fspo.config import Config
from megatron_fspo.mcore.policy import Update
from megatron_fspo.objective.policy_objective import LossTerms
from megatron_fspo.rollout.client.answers import read_completion
from megatron_fspo.rollout.common import MODEL
from megatron_fspo.types import Prompt

PROMPT = 512  # tokens
SAMPLES = 8
VOCAB_SIZE = 150_000
STOP = 0


def lengths_of(responses: int, tokens: int) -> list[int]:
    """Of a step: three in five are cut off at ``tokens``, the others from an eighth of that on."""
    numbers = random.Random(responses)
    return [
        tokens if numbers.random() < 0.6 else numbers.randint(tokens // 8, tokens - 1)
        for _ in range(responses)
    ]


def config_of(responses: int, tokens: int, parallel: dict[str, int]) -> Config:
    """Of a run with two optimizer steps to a rollout, and a correction."""
    values = tomllib.loads((ROOT / "examples/make_sum/run.toml").read_text(encoding="utf-8"))
    changes: dict[str, dict[str, Any]] = {
        "data": {"max_prompt_tokens": PROMPT},
        "rollout": {
            "engine": "vllm",
            "prompts": responses // SAMPLES,
            "samples": SAMPLES,
            "max_response_tokens": tokens,
        },
        "batch": {
            "mini_batches": 2,
            "epochs": 1,
            "max_tokens": 2 * (PROMPT + tokens),
            "balance": "attention",
        },
        "parallel": {"sequence": parallel["tensor"] > 1, **parallel},
        "model": {"dtype": "bfloat16"},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    values["loss"] = {"name": "fspo"}
    values["correction"] = {"name": "length_fair_gate"}
    return Config.model_validate(values)


def prompts_of(count: int) -> list[Prompt]:
    """All of one length."""
    ids = tuple(range(1, PROMPT + 1))
    return [Prompt(index=i, token_ids=ids, text="", answer="") for i in range(count)]


class Answers:
    """What servers say, as vLLM 0.32 writes it; made piece by piece, just before it is read."""

    def __init__(self, tokens: int) -> None:
        numbers = random.Random(tokens)
        self._ids = [str(numbers.randrange(1, VOCAB_SIZE)) for _ in range(2 * tokens)]
        self._said = []
        for token in self._ids:
            entry = f'{{"token_id":{token},"logprob":{-numbers.expovariate(1.0)},"rank":1'
            self._said.append(f'{entry},"top_logprobs":[{entry}}}]}}')
        self._tokens = tokens

    def body(self, number: int, length: int) -> bytes:
        """One that is cut off, or one that ends with the stop token."""
        first = number * 7919 % self._tokens
        ids, said = self._ids[first : first + length], self._said[first : first + length]
        if length < self._tokens:
            ids[-1] = str(STOP)
            said[-1] = f'{{"token_id":{STOP},"logprob":-0.5}}'
        choice = {
            "index": 0,
            "finish_reason": "stop" if length < self._tokens else "length",
            "weight_versions": [{"version": "1", "start": 0, "end": length}],
        }
        known = json.dumps(choice)[:-1]
        text = f'{known},"token_ids":[{",".join(ids)}],"logprobs":{{"content":[{",".join(said)}]}}}}'
        return f'{{"model":"{MODEL}","choices":[{text}]}}'.encode()


class Servers:
    """In place of the pool, and of the loop that runs it: reads all answers at once."""

    admit = None

    def __init__(self, clock: Clock, lengths: Sequence[int], tokens: int) -> None:
        self._clock, self._lengths, self._tokens = clock, lengths, tokens
        self._answers = Answers(tokens)

    def generate(self, requests: Sequence[Any], arrived: Any, *, oldest_version: int) -> list[Any]:
        """The completions. ``arrived`` hears of each, but in the older commit, where it only counts."""
        found = []
        for number, (request, length) in enumerate(zip(requests, self._lengths, strict=True)):
            with self._clock("made up"):
                body = self._answers.body(number, length)
            with self._clock("read"):
                found.append(read_completion(body, request.params))
            if arrived is not None and arrived.__code__.co_argcount > 2:
                with self._clock("grade"):
                    arrived(number, found[-1])
        return found

    def submit(self, work: list[Any]) -> Future[list[Any]]:
        """As the loop: of work that is done."""
        future: Future[list[Any]] = Future()
        future.set_result(work)
        return future


class Model:
    """In place of the policy: log-probs a little off the sampler's, and a loss that clips nobody."""

    optimizer_steps = 100

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def score(self, batches: Sequence[Any], scoring: Any) -> list[torch.Tensor]:
        found = []
        for batch in batches:
            with self._clock("made up"):
                found.append(batch.sampled_log_probs * 1.001)
        return found

    def update(self, batches: Sequence[Any], loss: Any) -> Any:
        """As the older commit asks."""
        metrics = {name: 0.0 for name in self.backward(batches, loss)}
        return SimpleNamespace(metrics=metrics, grad_norm=1.0, learning_rate=1e-6)

    def grad_norm(self) -> float:
        return 1.0

    def step(self, totals: Any, grad_norm: float) -> Update:
        return Update(totals=totals, grad_norm=grad_norm, learning_rate=1e-6)

    def backward(self, batches: Sequence[Any], loss: Any) -> Any:
        for batch in batches:
            count = len(batch.lengths)
            zero, no = torch.zeros(count), torch.zeros(count, dtype=torch.bool)
            terms = LossTerms(
                log_ratio_sum=torch.linspace(-1, 1, count),
                weight=torch.zeros(0),
                ratio=zero,
                objective=torch.zeros(()),
                clipped_low=zero,
                clipped_high=zero,
                dual_clipped=zero,
                out_of_band=no,
                nonfinite=no,
            )
            loss.observer(batch, terms)
        return {"fspo/kl_k3": (0.0, 1.0), "actor/ppo_kl": (0.0, 1.0)}


class Log:
    """Says and writes nothing."""

    @contextmanager
    def phase(self, *about: Any) -> Iterator[Callable[[int], None]]:
        yield lambda number: None

    def say(self, text: str) -> None:
        pass

    def sequences(self, step: int, records: Sequence[Any]) -> None:
        pass


def run_of(inputs: Any, groups: Any, clock: Clock) -> Any:
    """A :class:`Training`, as far as it is asked for anything."""
    return SimpleNamespace(
        inputs=inputs,
        groups=groups,
        policy=Model(clock),
        stopping=lambda: False,
        scoring=None,
        log=Log(),
        loss=inputs.config.loss.start(longest=inputs.config.rollout.max_response_tokens),
        timings={},
        saved=0,
        step=1,
    )


class Clock:
    """Seconds of wall and of CPU of each phase, without those of phases inside it."""

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self._inside = ["other"]
        self._since = (time.perf_counter(), time.process_time())

    def clear(self) -> None:
        self._turn()
        self.wall.clear()
        self.cpu.clear()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._turn()
        self._inside.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._inside.pop()

    def wrap(self, module: Any, name: str, phase: str) -> None:
        """Count what a function takes, as its module calls it."""
        function = getattr(module, name)

        @wraps(function)
        def timed(*positional: Any, **named: Any) -> Any:
            with self(phase):
                return function(*positional, **named)

        setattr(module, name, timed)

    def _turn(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.wall[self._inside[-1]] += wall - self._since[0]
        self.cpu[self._inside[-1]] += cpu - self._since[1]
        self._since = wall, cpu


class Memory:
    """The largest resident set since its making, above the one there was then. Linux only."""

    def __init__(self) -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces() if torch.cuda.is_available() else None
        _trim()
        Path("/proc/self/clear_refs").write_text("5")
        self._base = _status("VmRSS")

    def bytes(self) -> int:
        return _status("VmHWM") - self._base


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found, name
    return int(found[1]) * 1024


def _trim() -> None:
    """Give back to the system what is free, so that the step's use of it is seen."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)


class Traffic:
    """Bytes that this rank receives through collectives."""

    def __init__(self) -> None:
        self.bytes = 0
        self._count("broadcast", lambda tensor, *_, **__: _size(tensor))
        self._count("all_reduce", lambda tensor, *_, **__: _size(tensor))
        self._count("all_gather", lambda tensors, *_, **__: sum(map(_size, tensors)))
        self._count("all_to_all_single", lambda received, *_, **__: _size(received))

    def _count(self, name: str, size: Callable[..., int]) -> None:
        function = getattr(distributed_c10d, name)

        @wraps(function)
        def counted(*positional: Any, **named: Any) -> Any:
            self.bytes += size(*positional, **named)
            return function(*positional, **named)

        # torch's collectives of objects look up the one, callers the other.
        setattr(distributed_c10d, name, counted)
        setattr(dist, name, counted)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
