"""The locust users see tokens as they come and count every incomplete answer as a failure."""

import doctest
import json
import os
import re
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

from tests.load import user_counts

ROOT = Path(__file__).resolve().parents[1]
GAP_S = 0.2
TOKENS = 4
USERS = 4
Answer = Callable[["_Server"], None]


class _Server(BaseHTTPRequestHandler):
    """A chat server whose answers are scripted by the test."""

    protocol_version = "HTTP/1.1"
    answers: Iterator[Answer]
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
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
def _serving(*answers: Answer, bodies: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """``bodies``: where what is asked goes."""
    bodies = [] if bodies is None else bodies
    handler = type("Scripted", (_Server,), {"answers": cycle(answers), "bodies": bodies})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _locust(
    url: str, *arguments: str, kind: str = "ChatUser", seconds: int = 3, **variables: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, entries by name and output of a short run."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "tests/load/locustfile.py"), "--headless"),
            *("--host", url, "--stop-timeout", "10", "--only-summary"),
            *(() if "LOAD_SHAPE" in variables else ("-u", str(USERS), "-r", str(USERS), "-t", f"{seconds}s")),
            *("--json", *arguments, kind),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
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


def test_B115_whole_answers_are_counted_token_by_token() -> None:
    with _serving(whole) as url:
        code, entries, output = _locust(url)
    assert code == 0, output
    assert set(entries) == {"answer", "TTFT", "inter-token"}
    answers = entries["answer"]
    assert answers["num_requests"] >= USERS
    assert answers["num_failures"] == 0
    assert "CLUMPED" not in output
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


def quick(server: _Server) -> None:
    """A whole answer at once, in one piece, half of whose prompt was cached."""
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 50}}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    said = [{"choices": [{"delta": {"content": part}}]} for part in ("fi", "ne")]
    events = [json.dumps(one) for one in (role, *said, {"choices": [], "usage": usage})]
    data = "".join(f"data: {one}\n\n" for one in (*events, "[DONE]")).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    server.wfile.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))


def test_B029_every_run_has_an_id_in_its_prompts_and_tells_its_hit_share() -> None:
    said = []
    for run in ({}, {"LOAD_RUN": "mine"}):
        bodies: list[dict[str, Any]] = []
        with _serving(quick, bodies=bodies) as url:
            code, _, output = _locust(url, seconds=1, **run)
        assert code == 0 and "50.0%" in output and "seed 1" in output
        assert "CLUMPED: 50% of events" in output  # B131: the second of two, in one piece with the first
        systems = {body["messages"][0]["content"].split("]")[0] for body in bodies}
        assert len(systems) == 1, "one run, one id"
        said.append(systems.pop())
        assert f"{said[-1][1:]}, seed" in output
    assert said[1] == "[run mine" != said[0]


@pytest.mark.parametrize("variables", [{}, {"LOAD_TOOLS": "1"}])
def test_agents_go_on_with_all_before_and_what_the_tool_printed(variables: dict[str, str]) -> None:
    bodies: list[dict[str, Any]] = []
    with _serving(quick, bodies=bodies) as url:
        code, entries, output = _locust(url, kind="AgentUser", seconds=1, LOAD_THINK="0.1", **variables)
    assert code == 0, output
    assert set(entries) == {"answer", "TTFT"}  # of one token: no time between tokens
    longest = max((body["messages"] for body in bodies), key=len)
    assert len(longest) >= 2 + 2 * 2
    assert any(body["messages"] == longest[:-2] for body in bodies), (
        "each step has the one before as its prefix"
    )
    assert {body.get("tools") is not None for body in bodies} == {bool(variables)}
    assert longest[3]["role"] == ("tool" if variables else "user")


def test_rag_users_share_popular_documents_and_no_history() -> None:
    bodies: list[dict[str, Any]] = []
    with _serving(quick, bodies=bodies) as url:
        code, _, output = _locust(url, kind="RagUser", seconds=1, LOAD_THINK="0.1")
    assert code == 0, output
    assert {len(body["messages"]) for body in bodies} == {2}
    first = [body["messages"][1]["content"].split(".")[0] for body in bodies]
    assert len(set(first)) > 1 and first.count("Document 0") >= 1
    assert len({body["messages"][1]["content"] for body in bodies}) == len(bodies)


def test_ramps_and_spikes_are_what_their_examples_say() -> None:
    assert doctest.testmod(user_counts).attempted == 2
    assert doctest.testmod(user_counts).failed == 0


def test_a_spike_comes_and_goes_and_reports_are_kept(tmp_path: Path) -> None:
    with _serving(quick) as url:
        code, _, output = _locust(
            url,
            *("--csv", str(tmp_path / "run"), "--csv-full-history", "--html", str(tmp_path / "run.html")),
            LOAD_SHAPE="spike",
            LOAD_USERS="8",
            LOAD_SECONDS="7",
        )
    assert code == 0, output
    changes = [int(users) for users in re.findall(r"Shape test updating to (\d+) users", output)]
    assert changes == [2, 8, 2], output  # locust looks once a second; the spike is a fifth of seven
    assert "answer" in (tmp_path / "run_stats_history.csv").read_text()
    assert "TTFT" in (tmp_path / "run.html").read_text()
    assert "answer" in (tmp_path / "run_stats.csv").read_text()


def test_B050_a_client_that_is_busy_itself_is_marked() -> None:
    """A server that answers at once, and users that never wait: the client is the limit."""
    with _serving(quick) as url:
        _, _, idle = _locust(url, seconds=2, LOAD_CLIENT_LIMIT="0.1")
        _, _, busy = _locust(url, seconds=2, LOAD_CLIENT_LIMIT="0.1", LOAD_THINK="0")
    assert "MARKED" not in idle and "the client used" in idle
    assert "MARKED: over 10%" in busy, busy
