"""Writes docs/faults.md from the tests: ``python docs/make_faults.py``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(__file__).with_name("faults.md")
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/verify")]

HEAD = """\
# What verify catches

For anyone who asks what `megatron-fspo verify` detects, and what a cause that it names can mean.

The tests put each of these {all} faults into the production code, one at a time, on four gloo processes, in
float64 and float32 ({one} show in only one). `verify` must name this cause first, and pass without the
fault:

```
make test PYTEST_ARGS=tests/verify/test_faults.py
```

| cause named first | fault |
|---|---|
"""
TAIL = """
**Next**: [Parallelism](parallelism.md)
"""


def render() -> str:
    """The page."""
    from faults import FAULTS

    by_cause: dict[str, list[str]] = {}
    for fault in FAULTS.values():
        text = (inspect.getdoc(fault.patch) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")
        by_cause.setdefault(fault.cause, []).append(text)
    rows = [
        f"| {'' if number else f'`{cause}`'} | {text} |"
        for cause, texts in by_cause.items()
        for number, text in enumerate(texts)
    ]
    one = sum(len(fault.dtypes) == 1 for fault in FAULTS.values())
    return HEAD.format(one=one, all=len(FAULTS)) + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
