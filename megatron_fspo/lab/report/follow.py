"""``report --follow``: the page of a run in progress, from a small server for browsers on this machine."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.page import render_report
from megatron_fspo.record.rows import METRICS

_HOST = "127.0.0.1"
_SECONDS = 10
"""After which a browser loads the page again."""


def serve_report(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the report at ``http://127.0.0.1:<port>/`` until Ctrl-C; port 0: any that is free.

    Raises:
        InputError: there is no such folder, or the port is taken or none.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder of a run")
    if not 0 <= port < 2**16:
        raise InputError(f"report --port {port}: must be from 0 to 65535")
    try:
        server = report_server(folder, port)
    except OSError as error:
        raise InputError(f"report --port {port}: {error.strerror}; --port 0 takes a free one") from error
    with server:
        say(f"http://{_HOST}:{server.server_port}/ shows {folder}; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def report_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback interface that answers ``GET /`` with the report as it is then."""
    lock = threading.Lock()
    drawn = {"at": -1, "text": ""}

    def page() -> str:
        """Return the page, drawn again only after the run has written a step."""
        with lock:
            path = folder / METRICS
            written = path.stat().st_mtime_ns if path.exists() else 0
            if written != drawn["at"]:
                try:
                    text = render_report(folder)
                except InputError as error:
                    text = f"<!doctype html><p>{html.escape(str(error))}"
                drawn.update(at=written, text=text)
            return str(drawn["text"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site may have its name resolved to this machine; the browser then sends that name.
            if self.path != "/" or self.headers.get("Host", "").partition(":")[0] not in (_HOST, "localhost"):
                return self.send_error(404)
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Refresh", str(_SECONDS))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """Say nothing of requests."""

    return ThreadingHTTPServer((_HOST, port), Handler)
