"""Exit status, one-line errors and progress bars, for all command lines."""

from __future__ import annotations

import argparse
import difflib
import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from megatron_fspo.errors import InputError, TrainingError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors that a user can fix: a full disk, missing write permission."""


def exit_status(work: Callable[[], int], program: str) -> int:
    """Run ``work`` and return its result, or an exit status: 1 if it failed, 2 after invalid input, 130 after
    Ctrl-C. Rank 0 prints the error as one line on stderr."""
    try:
        return work()
    except (InputError, TrainingError) as error:
        say(f"{program}: {error}")
        return 2 if isinstance(error, InputError) else 1
    except OSError as error:
        if error.errno not in _DISK_ERRORS or error.filename is None:
            raise
        say(f"{program}: {error.filename}: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        say(f"{program}: interrupted")
        return 130


def say(message: str, *, error: bool = True) -> None:
    """Print a line, on rank 0 only: on stderr, or stdout if it is not an error."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr if error else sys.stdout, flush=True)


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports wrong arguments in one line without the usage, once per job.

    It reports an unknown flag before a missing one, which it may be, misspelt. Flags with dots are
    configuration keys, which are parsed later.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        flags = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else None]]
        for flag in flags if self._subparsers is None else ():
            if flag.startswith("--") and "." not in flag and flag not in self._option_string_actions:
                keys = self._keys_named(flag) if self.get_default("keys") else []
                close = keys or difflib.get_close_matches(flag, self._option_string_actions, n=1)
                meant = f"did you mean {' or '.join(close)}?" if close else ""
                legal = meant or "configuration keys are --section.key value"
                self.error(f"unexpected argument {flag!r}: {legal}")
        return super().parse_known_args(words, namespace)

    @staticmethod
    def _keys_named(flag: str) -> list[str]:
        """Return the flags of configuration keys with this name and any section."""
        from megatron_fspo.config.loading import legal_keys

        keys = {key for key, *_ in legal_keys() if key.partition(".")[2] == flag[2:].replace("-", "_")}
        return sorted(f"--{key.replace('_', '-')}" for key in keys)

    def format_help(self) -> str:
        """Return the help; on a terminal, unless NO_COLOR is set, with bold headings and flags."""
        text = super().format_help()
        plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return (
            text if plain else re.sub(r"^\S.*:$|^ +--?\S+", "\033[1m\\g<0>\033[0m", text, flags=re.MULTILINE)
        )

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}; see {self.prog} --help")
        raise SystemExit(2)


@contextmanager
def progress_bar(total_bytes: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on stderr; call the yielded function with the number of further bytes done."""
    from tqdm import tqdm  # missing in other trainers' environments, where `explain` and `doctor` run

    with tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


def quiet_megatron() -> None:
    """HeartbeatTimer Megatron's warnings about missing optional packages, which `doctor` reports."""
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # torch deprecates functions that Megatron calls.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*deprecat")
    # megatron-core 0.19 warns in every run that GPTModel, which we use, gets no new features.
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
        lambda record: "IS DEPRECATED" not in record.getMessage()
    )


def import_megatron() -> None:
    """Import Megatron without its warnings and, on a CPU, without its compilation at import."""
    quiet_megatron()
    from megatron_fspo.mcore import leave_uncompiled

    leave_uncompiled()
