"""What the benchmarks share: their options, the machine, and processes of their own."""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the text of the script."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as the pages have it."""
    first, *others = (f"| {' | '.join(row)} |" for row in (head, *rows))
    return "\n".join([first.replace("|  |", "| |"), "|---" * len(head) + "|", *others])


def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return models[0] if models else platform.machine()


def machine() -> dict[str, Any]:
    """What figures of one thread were made with."""
    return {"cpu": cpu(), "cpus": os.cpu_count(), "threads": 1, "torch": torch.__version__}


def peak_kib() -> int:
    """Largest resident set of this program so far. (``ru_maxrss`` would include the parent's before exec.)"""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def environment(**more: str) -> dict[str, str]:
    """Of a process that measures: the package of this checkout, whichever one is installed."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, **more}


@contextmanager
def vllm_server(
    model: str,
    port: int,
    log: Path,
    *flags: str,
    in_child: Callable[[], None] | None = None,
    **variables: str,
) -> Iterator[str]:
    """A real server in float32 while the block lasts; gives its address.

    Args:
        flags: further ones of `serve`.
        in_child: called in the new process before it starts.
        variables: of its environment.

    Raises:
        RuntimeError: it did not start; `serve` has said why.
    """
    words = [sys.executable, "-m", "megatron_fspo", "serve", "--model", model, "--port", str(port)]
    server = subprocess.Popen(
        [*words, "--dtype", "float32", "--log", str(log), *flags],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=in_child,
    )
    try:
        assert server.stdout is not None
        if "is ready" not in server.stdout.readline():
            raise RuntimeError(f"the server did not start (exit status {server.wait()})")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()
