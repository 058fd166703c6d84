"""An agent as users write them, for the tests: it asks an OpenAI-compatible endpoint, and prints a reward."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any


def ask(
    messages: list[dict[str, Any]], path: str = "/chat/completions", length: str | None = None, **more: Any
) -> str:
    """The policy's answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        data=json.dumps({"model": "policy", "messages": messages, **more}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
            **({"Content-Length": length} if length else {}),
        },
    )
    with urllib.request.urlopen(request) as response:
        said: str = json.load(response)["choices"][0]["message"]["content"]
    return said


def refused(messages: list[dict[str, Any]], path: str = "/chat/completions", **more: Any) -> int:
    """The status of a request that is none."""
    try:
        ask(messages, path, **more)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def hostile(what: str, talk: list[dict[str, Any]]) -> None:
    """Ask once, and end in another way than by a reward."""
    ask(talk)
    if what == "lengths":  # while another request waits
        other = threading.Thread(target=ask, args=(talk,), daemon=True)
        other.start()
        time.sleep(0.3)
        statuses = [refused(talk)] + [
            status_of(length) for length in ("-1", "99999999999999999999", "1e3", "")
        ]
        assert statuses == [429, *[400] * 4], statuses
        with open(os.environ["TMPDIR"] + "/asked", "w"):
            other.join(20)
    if what in ("child in the group", "daemon"):
        env = os.environ if what == "daemon" else {"PATH": os.environ["PATH"]}
        subprocess.Popen(["sleep", f"861.{os.getppid()}"], start_new_session=what == "daemon", env=env)
    if what == "flood":
        for _ in range(300):
            sys.stdout.write("x" * 2**20)
    if what == "keys":
        keys = ("VLLM_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "ANOTHER")
        print(1.0 + sum(key in os.environ for key in keys))
    print({"flood": "\n0.5", "infinite": "1e999", "large": "1e7", "keys": ""}.get(what, "1.0"), flush=True)
    if what == "binary":
        sys.stdout.buffer.write(b"\xff\x00\xfe 0.5 \xff 0.25")
    if what == "closed":
        print("no reward", flush=True)
        os.close(1)
        time.sleep(0.5)
        os._exit(0)


def status_of(length: str) -> int:
    """The status of a request that gives this as its length, and has no body."""
    host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    head = f"Host: x\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Length: {length}"
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
        return int(connection.recv(100).split()[1])


def main(what: str) -> None:
    """Talk about the task for three turns; ``what`` goes wrong, or is special."""
    task = json.load(sys.stdin)
    talk: list[dict[str, Any]] = [{"role": "user", "content": task["fields"]["question"]}]
    if what in ("child in the group", "daemon", "keys", "lengths"):
        hostile(what, talk)
        return
    if what in ("flood", "infinite", "large", "binary", "closed"):
        hostile(what, talk)
        return
    if what == "silent":
        return
    if what == "child":
        subprocess.Popen(["sleep", f"862.{os.getppid()}"], start_new_session=True)
        threading.Thread(target=time.sleep, args=(600,)).start()  # does not end when its requests fail
    if what == "other":
        talk[0]["content"] = "another question"
    if what == "refused":
        assert [refused(talk, "/embeddings"), refused(talk, stream=True), refused(talk, n=2)] == [400] * 3
        assert refused(talk, tools=[{}]) == refused([{"role": "user", "content": [{"type": "image"}]}]) == 400
        os.environ["OPENAI_API_KEY"], key = "none", os.environ["OPENAI_API_KEY"]
        assert refused(talk) == 401
        os.environ["OPENAI_API_KEY"] = key
        assert refused(talk, length="many") == 400
    for turn in range(3):
        said = ask(talk)
        if what == "hang" and turn == 1:
            time.sleep(1000)
        if what == "crash" and turn == 1:
            sys.exit(3)
        talk += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{turn} <|im_end|> {said}"},
        ]
        if what == "summary" and turn == 1:
            talk = [{"role": "user", "content": [{"type": "text", "text": f"so far: {said}"}]}]
    print("the reward is\n" + task["answer"])


if __name__ == "__main__":
    main(sys.argv[1])
