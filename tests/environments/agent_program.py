"""An agent as users write them, for the tests: it asks an OpenAI-compatible endpoint, and prints a reward."""

from __future__ import annotations

import json
import os
import sys
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


def main(what: str) -> None:
    """Talk about the task for three turns; ``what`` goes wrong, or is special."""
    task = json.load(sys.stdin)
    talk: list[dict[str, Any]] = [{"role": "user", "content": task["fields"]["question"]}]
    if what == "silent":
        return
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
