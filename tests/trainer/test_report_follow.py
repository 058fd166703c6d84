"""``report --follow``: a browser on this machine sees the run as it is now, and no other program does."""

import http.client
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import environment
from megatron_fspo.cli import main
from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.follow import report_server
from megatron_fspo.lab.report.page import render_report
from report_runs import Page, make_config, write_run


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of a server for the run ``known``, which has not begun."""
    with report_server(tmp_path / "known", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def get(port: int, path: str = "/", host: str | None = None) -> tuple[int, str]:
    """Status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def steps(text: str) -> str:
    (count,) = re.findall(r">(\d+) of 20<", text)
    return count


@pytest.mark.slow
def test_the_page_follows_the_run_and_is_drawn_once_for_each_step(tmp_path: Path, port: int) -> None:
    status, text = get(port)
    assert status == 200 and str(tmp_path / "known") in text and 'http-equiv="refresh"' in text
    assert get(port, "/written") == (200, "0")
    run = write_run(make_config(tmp_path), steps=2)
    assert steps(get(port)[1]) == "2" and not (run / "report").exists()
    # A change without a step is not looked at: the page is the one that was drawn.
    (run / "config.toml").rename(run / "gone")
    assert steps(get(port)[1]) == "2"
    (run / "gone").rename(run / "config.toml")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**json.loads(rows[-1]), "step": 3}) + "\n" + '{"step": 4, "crit')
    text = get(port)[1]
    assert steps(text) == "3", "a row half written is none yet"
    reload = f'at === "{get(port, "/written")[1]}"'
    assert [reload in script for script in Page(text).scripts][-1:] == [True], (
        "again after the next step only"
    )
    assert sum(len(script) > 500_000 for script in Page(text).scripts) == 1, "Vega's script is whole"


def test_the_first_answer_is_there_at_once_and_a_client_may_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, drawn = threading.Event(), threading.Event()

    def slowly(folder: Path) -> str:
        begun.set()
        assert drawn.wait(60)
        return f"<body>{'the page ' * 10**6}</body>"

    monkeypatch.setattr("megatron_fspo.lab.report.follow.render_report", slowly)
    with report_server(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert begun.wait(60) and str(tmp_path) in get(server.server_port)[1]
        drawn.set()
        while "the page the page" not in get(server.server_port)[1]:
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", server.server_port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.recv(1)
        assert get(server.server_port, "/written")[0] == 200
        server.shutdown()
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_only_the_page_is_served_and_only_to_this_machine(port: int) -> None:
    assert get(port, "/metrics.jsonl")[0] == get(port, "/../config.toml")[0] == 404
    assert get(port, host=f"attacker.example:{port}")[0] == 404
    assert get(port, host=f"localhost:{port}")[0] == 200


def test_no_other_machine_reaches_it(tmp_path: Path) -> None:
    with report_server(tmp_path, 0) as server:
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(make_config(tmp_path), steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert main(["report", "--follow", str(run), "--port", str(number)]) == 2
        assert str(number) in capsys.readouterr().err
    for words in (["--compare", str(run)], ["--port", "70000"], ["--port", "-1"]):
        assert main(["report", "--follow", str(run), *words]) == 2
    assert main(["report", str(run), "--port", "0"]) == 2 and not (run / "report").exists()
    run = run.rename(tmp_path / "later")
    words = [
        sys.executable,
        "-m",
        "megatron_fspo",
        "report",
        "--follow",
        str(tmp_path / "known"),
        "--port",
        "0",
    ]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        (number,) = re.findall(r"127\.0\.0\.1:(\d+)/", line)
        assert "not there yet" in line and "waiting for the run" in get(int(number))[1]
        run.rename(tmp_path / "known")
        assert steps(get(int(number))[1]) == "1"
        os.kill(server.pid, signal.SIGINT)
    assert server.returncode == 0


LINES = {
    "metrics.jsonl": [
        *('{"step": 9, "x": "text"}', '{"step": 9, "x": [1]}', '{"step": 9, "x": {}}', '{"step": true}'),
        *('{"step": -5}', '{"step": 99999999999999999999999}', '{"step": 9, "x": 1' + "0" * 400 + "}"),
        *('{"step": 9, "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "\ud8ff", "", "null", '{"x": 1}'),
    ],
    "samples.jsonl": [
        '{"step": 1}',
        '{"step": 1, "prompt": 5, "response": 6, "reward": 1, "answer": 0}',
        '{"step": 1, "prompt": "a", "response": "b", "reward": "x", "answer": 0}',
        '{"step": 1, "prompt": "a", "response": "b", "reward": null, "answer": 0}',
    ],
    "sequences.jsonl": [
        '{"step": 9}',
        '{"step": 9, "length": "x"}',
        '{"step": 9, "length": [1], "update": [1, 2]}',
    ],
    "routers.jsonl": ['{"step": 9, "load": "x"}', '{"step": 9, "load": [[1, 2], [3]]}'],
    "warnings.jsonl": ['{"step": 9}', '{"step": 9, "title": 1, "text": "x"}'],
    "jobs.jsonl": ['{"step": 9}', '{"step": 9, "versions": [], "device": "x"}'],
}


@pytest.mark.parametrize("name", LINES)
def test_rows_of_wrong_types_are_named(tmp_path: Path, name: str) -> None:
    run = write_run(make_config(tmp_path), steps=2)
    path = run / name
    before = path.read_bytes() if path.exists() else b""
    for line in LINES[name]:
        path.write_bytes(before + line.encode("utf-8", "surrogatepass") + b"\n")
        with pytest.raises(InputError, match=f"{name}.*not a row of this trainer"):
            render_report(run)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(InputError, match=f"{name}: not a regular file"):
        render_report(run)


def test_a_long_run_is_drawn_soon(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=2)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({**row, "step": step}) + "\n" for step in range(1, 50_001))
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = render_report(run)
    assert len(text) < 2 * 2**20 and time.process_time() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"
