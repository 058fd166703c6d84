"""``report --follow``: the page of a run in progress, from a small server for browsers on this machine."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.page import render_report
from megatron_fspo.record.rows import METRICS

_HOST = "127.0.0.1"
_RELOAD = """<script>
const look = () => fetch("/written").then(one => one.text());
setInterval(() => look().then(at => at === "{at}" || location.reload(), () => 0), 5000);
</script></body>"""
"""Loads the page again once the run has written a step: what a reader zoomed or typed stays until then."""


def serve_report(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the report at ``http://127.0.0.1:<port>/`` until Ctrl-C; port 0: any that is free. The run need
    not have begun.

    Raises:
        InputError: the port is taken or none.
    """
    if not 0 <= port < 2**16:
        raise InputError(f"report --port {port}: must be from 0 to 65535")
    try:
        server = report_server(folder, port)
    except OSError as error:
        raise InputError(f"report --port {port}: {error.strerror}; --port 0 takes a free one") from error
    with server:
        waiting = "" if folder.is_dir() else ", which is not there yet"
        say(f"http://{_HOST}:{server.server_port}/ shows {folder}{waiting}; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a browser that left before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def report_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback interface that answers ``GET /`` with the report as it is then, or
    while the first one is made, or the run has not begun, with a line about that."""
    lock = threading.Lock()
    drawn = {"at": "", "text": ""}

    def written() -> str:
        path = folder / METRICS
        return str(path.stat().st_mtime_ns if path.exists() else 0)

    def draw() -> None:
        """Draw the page again if the run has written a step."""
        with lock:
            if (at := written()) != drawn["at"]:
                try:
                    page, _, end = render_report(folder).rpartition("</body>")  # Vega's script has one, too
                    text = page + _RELOAD.replace("{at}", at) + end
                except InputError as error:
                    text = _line(f"waiting for the run: {error}")
                drawn.update(at=at, text=text)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site may have its name resolved to this machine; the browser then sends that name.
            ours = self.headers.get("Host", "").partition(":")[0] in (_HOST, "localhost")
            if self.path not in ("/", "/written") or not ours:
                return self.send_error(404)
            if self.path == "/" and (drawn["text"] or not lock.locked()):
                draw()
            text = drawn["text"] or _line(f"reading {folder}; the page follows in seconds")
            body = (written() if self.path == "/written" else text).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """Say nothing of requests."""

    server = _Server((_HOST, port), Handler)
    threading.Thread(target=draw, daemon=True).start()
    return server


def _line(words: str) -> str:
    """Return a page with one line, which a browser loads again after 2 seconds."""
    return f'<!doctype html><meta http-equiv="refresh" content="2"><p>{html.escape(words)}'
