"""A stand-in of the Hugging Face Hub: the requests that a download makes, answered from folders."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "hf_token"
SHA = "0123456789abcdef0123456789abcdef01234567"


def digest(path: Path) -> str:
    """The id of a file's content."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub(
    models: dict[str, Path], datasets: dict[str, Path], written: dict[str, bytes] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Serve repositories, each a folder; yields the address and the list of requests, which grows. Files of
    commits go to ``written``."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            """What an upload of small files asks."""
            asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.reply(401, b"{}")
            elif self.path == "/api/repos/create":
                repo = json.loads(body)
                url = f"http://{self.headers['Host']}/{repo['organization']}/{repo['name']}"
                self.reply(200, json.dumps({"url": url}).encode())
            elif self.path == "/api/validate-yaml":
                self.reply(200, json.dumps({"errors": [], "warnings": []}).encode())
            elif "/preupload/" in self.path:
                how = {"uploadMode": "regular", "shouldIgnore": False}
                modes = [{"path": file["path"], **how} for file in json.loads(body)["files"]]
                self.reply(200, json.dumps({"files": modes}).encode())
            else:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file" and written is not None:
                        written[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                url = f"http://{self.headers['Host']}/org/mine/commit/{SHA}"
                self.reply(200, json.dumps({"commitUrl": url, "commitOid": SHA}).encode())

        def answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            words = self.path.partition("?")[0].strip("/").split("/")
            api = words[:1] == ["api"]
            words = words[1:] if api else words
            kind, words = (words[0], words[1:]) if words[0] in ("models", "datasets") else ("models", words)
            folder = (datasets if kind == "datasets" else models).get("/".join(words[:2]))
            if folder is None:
                self.reply(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
            elif api:
                paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                names = {str(path.relative_to(folder)): path for path in paths}
                about: object = {
                    "id": "/".join(words[:2]),
                    "sha": SHA,
                    "siblings": [{"rfilename": name} for name in names],
                    "tags": [],
                }
                if words[2:3] == ["tree"]:
                    about = [
                        {"type": "file", "path": name, "size": path.stat().st_size, "oid": digest(path)}
                        for name, path in names.items()
                    ]
                self.reply(200, json.dumps(about).encode())
            else:
                file = folder.joinpath(*words[4:])
                data = file.read_bytes() if file.is_file() else b""
                etag = digest(file) if data else ""
                self.reply(200 if data else 404, data, **{"X-Repo-Commit": SHA, "ETag": f'"{etag}"'})

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
