"""Nodes on one machine: network namespaces with addresses and host names of their own, on one bridge.

A process on a node reaches the other nodes by name or address, and nothing else; 127.0.0.1 is the node
itself. Files, processors and process numbers are the machine's. Needs root and ``ip``.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_bridges = itertools.count()

_ENTER = """\
hostname "$1"; mount --make-rprivate /; mount --bind "$2" /etc/hosts; shift 2
exec "$@"
"""


def why_not() -> str | None:
    """The reason why there can be no nodes here, if there is one."""
    for program in ("ip", "ss", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"nodes are network namespaces, which need `{program}`"
    if os.geteuid() != 0:
        return "nodes are network namespaces, which only root may make"
    try:
        with Nodes(["trial"], Path("/dev/null")):
            return None
    except subprocess.CalledProcessError as error:
        return f"nodes are network namespaces, and they are not allowed here: {error.stderr.strip()}"


class Nodes:
    """Nodes ``names``, at 10.77.0.1, 10.77.0.2, …; all of it is gone at the end, processes included.

    Args:
        hosts: where their common ``/etc/hosts`` is written; /dev/null for none.

    Raises:
        subprocess.CalledProcessError: the machine does not allow it; ``stderr`` says why.
    """

    def __init__(self, names: Sequence[str], hosts: Path) -> None:
        self._names = tuple(names)
        self._hosts = hosts
        self._bridge = f"fspo{os.getpid() % 100000}{next(_bridges)}"
        self._undo = ExitStack()

    def __enter__(self) -> Nodes:
        with ExitStack() as undo:
            # The bridge is in a namespace of its own: the machine's own network stays as it is.
            self._make_namespace(self._bridge, undo)
            _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "bridge", "up")
            for number, name in enumerate(self._names):
                self._add(number, name, undo)
            if self._hosts != Path("/dev/null"):
                lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self._names)]
                self._hosts.write_text("\n".join(lines) + "\n")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._undo.close()

    def address(self, name: str) -> str:
        """The address of a node, as all of them see it."""
        return f"10.77.0.{self._names.index(name) + 1}"

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """A process on a node, in a session of its own; ``options`` as of ``Popen``."""
        words = ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts", "--mount"]
        words += ["sh", "-c", _ENTER, "sh", name, str(self._hosts), *command]
        return subprocess.Popen(words, text=True, start_new_session=True, **options)

    def listening(self, name: str) -> set[str]:
        """The addresses at which a node's processes accept TCP connections."""
        lines = _ip("netns", "exec", self._namespace(name), "ss", "-ltnH").splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def cut(self, name: str) -> None:
        """Nobody reaches the node any more, and it reaches nobody, as if its cable were pulled."""
        _ip("-n", self._bridge, "link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Undo :meth:`cut`."""
        _ip("-n", self._bridge, "link", "set", self._port(name), "up")

    def _namespace(self, name: str) -> str:
        return f"{self._bridge}-{name}"

    def _port(self, name: str) -> str:
        return f"port{self._names.index(name)}"

    def _make_namespace(self, namespace: str, undo: ExitStack) -> None:
        _ip("netns", "add", namespace)
        undo.callback(_ip, "netns", "delete", namespace)
        undo.callback(_end_all, namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _add(self, number: int, name: str, undo: ExitStack) -> None:
        namespace, port = self._namespace(name), f"port{number}"
        self._make_namespace(namespace, undo)
        _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "eth0", "netns", namespace)
        _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")


def environment_of_a_node(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that a process on a node starts with: without a launcher's and a proxy's variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    return {
        key: value
        for key, value in environment.items()
        if key not in launcher and not key.lower().endswith("_proxy")
    }


def _end_all(namespace: str) -> None:
    for process in _ip("netns", "pids", namespace).split():
        subprocess.run(["kill", "-9", process], capture_output=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
