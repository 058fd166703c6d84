"""No wait without a limit: every call in the package that may block names its limit, or stands in the table
with the reason why it cannot last."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from launch import REPO

BLOCKING = {
    *"result wait join get acquire communicate recv accept exception run check_call check_output".split(),
    *"call wrap_future urlopen create_connection as_completed".split(),
}
LIMITS = {"timeout", "seconds", "timeout_seconds", "limit"}

_DONE = "it is done"
_REASONS: dict[str, dict[str, str]] = {
    "cli/verify_checkpoint.py": {
        "_megatron_scores subprocess.run": "a job, which has the limits of [parallel]"
    },
    "job/remote.py": {"run result.result": "all coroutines that are run have limits; Ctrl-C ends it"},
    "lab/report/follow.py": {"handle_error sys.exception": "not a future's"},
    "lab/sweep/processes.py": {
        "_run process.wait": "a run lasts as long as it lasts; Ctrl-C ends a sweep",
        "make as_completed": "the same",
        "make future.result": _DONE,
        "make process.wait": "a run saves what it has; a second Ctrl-C ends the wait",
    },
    "mcore/passes/decode.py": {"_step dist.recv": "a collective has its own limit"},
    "rewards/grade.py": {"outcome grade.result": _DONE},
    "rewards/pool.py": {
        "__init__ start.result": "START_SECONDS",
        "call self._idle.get": "_Worker.call, which has limits",
    },
    "rewards/process.py": {"_ask self._ready.wait": "until it has started, or could not"},
    "rollout/client/engine.py": {"_collect work.result": _DONE},
    "rollout/client/pool.py": {
        "_ask asyncio.wait": "request_seconds; the second: it is cancelled",
        "_ask sampling.result": _DONE,
        "_reply asyncio.wrap_future": "awaited with the environment's limit",
        "_reply reply.result": _DONE,
        "_wait_for_slot granted.result": _DONE,
        "generate answers.result": _DONE,
        "generate asyncio.wait": "recovery_seconds, and the limits of every request",
        "generate trouble.result": _DONE,
    },
    "rollout/client/send_weights.py": {"send one.exception": _DONE},
    "rollout/embedded.py": {"_replies future.result": _DONE},
    "rollout/server/supervise.py": {
        "supervise_all server.exception": _DONE,
        "supervise_all wait": "servers run until a signal; then they are killed",
    },
    "trainer/sampling.py": {"_awaited grade.result": _DONE, "_awaited pending[number].result": _DONE},
}
"""File → function and call → why it cannot last."""
ALLOWED = {(file, *wait.split()) for file, waits in _REASONS.items() for wait in waits}


def waits(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(function, call) of every call that may wait without a limit."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node): function.name for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and is_wait(node):
            yield inner.get(id(node), "<module>"), ast.unparse(node.func)


def is_wait(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    limited = any(keyword.arg in LIMITS for keyword in call.keywords)
    if name not in BLOCKING or limited:
        return False
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("result", "exception", "accept", "communicate"):
        return not call.args
    if name == "join":
        return not call.args  # str.join and os.path.join have arguments
    if name == "get":
        return not call.args or owner in ("asyncio",)  # dict.get has an argument
    if name == "acquire":
        return not any(
            isinstance(word, ast.Constant) for word in (*call.args, *(k.value for k in call.keywords))
        )
    if name == "wait":
        return len(call.args) < (2 if owner in ("", "asyncio", "futures") else 1)
    if name in ("run", "call", "check_call", "check_output"):
        return owner == "subprocess"
    return True


def test_waits_have_limits() -> None:
    found = Counter(
        (str(path.relative_to(REPO / "megatron_fspo")), *wait)
        for path in sorted((REPO / "megatron_fspo").rglob("*.py"))
        for wait in waits(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert {place: count for place, count in found.items() if place not in ALLOWED} == {}
    assert {place for place in ALLOWED if place not in found} == set(), "these wait no more: remove them"


def test_what_counts_as_a_wait() -> None:
    unlimited = "f.result(); q.get(); t.join(); p.wait(); p.communicate(); lock.acquire(); subprocess.run(x)"
    unlimited += "; wait(fs); asyncio.wait(fs); asyncio.wrap_future(f); e.wait(); s.accept(); urlopen(x)"
    assert len(list(waits(ast.parse(unlimited)))) == 13
    limited = (
        "f.result(5); f.result(timeout=s); q.get(timeout=1); t.join(2); p.wait(3); d.get(k); ','.join(x)"
    )
    limited += "; lock.acquire(blocking=False); subprocess.run(x, timeout=2); wait(fs, 3); q.get_nowait()"
    assert list(waits(ast.parse(limited))) == []
