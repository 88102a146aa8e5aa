"""The locust users see tokens as they come and count every incomplete answer as a failure."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
GAP_S = 0.2
TOKENS = 4
USERS = 4
Answer = Callable[["_Server"], None]


class _Server(BaseHTTPRequestHandler):
    """A chat server whose answers are scripted by the test."""

    protocol_version = "HTTP/1.1"
    answers: Iterator[Answer]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        next(self.answers)(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def send_event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        event = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def send_tokens(self, count: int) -> None:
        for number in range(count):
            if number:
                time.sleep(GAP_S)
            self.send_event({"choices": [{"delta": {"content": f"word{number} "}}]})

    def end_body(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


def whole(server: _Server) -> None:
    server.begin()
    server.send_tokens(TOKENS)
    # Twice as many tokens as events: the time per token must be taken from this.
    server.send_event({"choices": [], "usage": {"completion_tokens": 2 * TOKENS - 1}})
    server.send_event("[DONE]")
    server.end_body()


def cut_off(server: _Server) -> None:
    server.begin()
    server.send_tokens(1)
    server.close_connection = True


def ends_cleanly_without_done(server: _Server) -> None:
    server.begin()
    server.send_tokens(1)
    server.end_body()


def error_event(server: _Server) -> None:
    server.begin()
    server.send_tokens(1)
    server.send_event({"error": {"message": "the engine died"}})
    server.end_body()


def refused(server: _Server) -> None:
    body = b'{"error":{"message":"busy"}}'
    server.send_response(503)
    server.send_header("content-length", str(len(body)))
    server.end_headers()
    server.wfile.write(body)


@contextmanager
def _serving(*answers: Answer) -> Iterator[str]:
    handler = type("Scripted", (_Server,), {"answers": cycle(answers)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _locust(url: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, entries by name and output of a short run."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "tests/load/locustfile.py"), "--headless"),
            *(
                "--host",
                url,
                "-u",
                str(USERS),
                "-r",
                str(USERS),
                "-t",
                "3s",
                "--stop-timeout",
                "10",
                "--only-summary",
            ),
            "--json",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    output = ran.stdout + ran.stderr
    entries, _ = json.JSONDecoder().raw_decode(ran.stdout, ran.stdout.index("[\n"))
    return ran.returncode, {entry["name"]: entry for entry in entries}, output


# Importing locust here would patch this process's sockets, and other tests with them.
pytestmark = pytest.mark.skipif(find_spec("locust") is None, reason="the extra [dev] is not installed")


def test_whole_answers_are_counted_token_by_token() -> None:
    with _serving(whole) as url:
        code, entries, output = _locust(url)
    assert code == 0, output
    assert set(entries) == {"answer", "TTFT", "inter-token"}
    answers = entries["answer"]
    assert answers["num_requests"] >= USERS
    assert answers["num_failures"] == 0
    assert entries["inter-token"]["num_requests"] == answers["num_requests"]
    # At the end locust may kill a user between its first token and its last.
    assert 0 <= entries["TTFT"]["num_requests"] - answers["num_requests"] <= USERS
    # 3 gaps over 2 * 4 - 2 later tokens: half a gap per token, after the first token was seen. A client that
    # reads in bulk sees next to nothing of them; one that starves on a busy machine sees them shortened.
    per_token_ms = entries["inter-token"]["total_response_time"] / entries["inter-token"]["num_requests"]
    assert per_token_ms >= 0.2 * GAP_S * 1_000 / 2
    ttft_ms = entries["TTFT"]["total_response_time"] / entries["TTFT"]["num_requests"]
    answer_ms = answers["total_response_time"] / answers["num_requests"]
    assert answer_ms - ttft_ms >= 0.2 * 3 * GAP_S * 1_000


def test_incomplete_answers_are_failures() -> None:
    with _serving(cut_off, ends_cleanly_without_done, error_event, refused) as url:
        code, entries, output = _locust(url)
    assert code == 1, output
    assert entries["answer"]["num_requests"] >= 4
    assert entries["answer"]["num_failures"] == entries["answer"]["num_requests"]
    assert "the engine died" in output
    assert "status 503" in output
    assert "without [DONE]" in output


def test_a_run_without_answers_fails() -> None:
    with _serving(whole) as url:
        pass  # nobody listens there any more
    code, entries, output = _locust(url)
    assert code == 1, output
    assert entries["answer"]["num_failures"] == entries["answer"]["num_requests"]
