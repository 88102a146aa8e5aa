"""Reading traces: what is accepted, and what is refused with file, line and reason."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sim.workload.prompt_text import PromptText
from sim.workload.sources import open_trace
from sim.workload.trace import TraceError
from sim.workload.trace_file import read_trace
from tests.sim.commands import exit_code


def row(at: float = 0, tokens: float = 1000, ids: Any = (1, 2), **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 5, "hash_ids": list(ids), **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_the_shipped_slice_is_read_whole() -> None:
    trace = open_trace("mooncake")
    assert (len(trace.requests), trace.block_tokens, trace.in_sessions) == (1000, 512, False)
    first = trace.requests[0]
    assert (first.prompt_tokens, first.output_tokens, first.timestamp_ms) == (6758, 500, 0.0)
    assert first.block_ids == tuple(range(13))  # 14 ids in the file; the last block is partial
    assert len(open_trace("mooncake", requests=10).requests) == 10


def test_B087_gzip_blank_lines_and_64_bit_ids(tmp_path: Path) -> None:
    ids = [2**64 - 1, 2**63]
    text = "\n" + json.dumps(row(ids=ids)) + "\n\n" + json.dumps(row(at=1, ids=ids)) + "\n"
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path)
    assert [request.block_ids for request in trace.requests] == [(2**64 - 1,)] * 2
    negative = write(tmp_path / "negative.jsonl", [row(ids=[-1, 5])])
    assert read_trace(negative).requests[0].block_ids == (2**64 - 1,)  # the same 64 bits


def test_a_byte_order_mark_before_the_first_row_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row()).encode() + b"\r\n")
    assert len(read_trace(path).requests) == 1


def test_B051_unsorted_timestamps_are_sorted_and_ties_keep_their_order(tmp_path: Path) -> None:
    rows = [row(at=9, tokens=600, ids=[1]), row(at=3, tokens=601, ids=[1]), row(at=3, tokens=602, ids=[1])]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert [request.prompt_tokens for request in trace.requests] == [601, 602, 600]


def test_B051_what_is_read_otherwise_than_it_stands_is_said(tmp_path: Path) -> None:
    seconds = [row(at=0.0), row(at=2.5, ids=[1, 3]), row(at=1.5, ids=[1, 4]), row(at=4.0, ids=[1, 5])]
    sorted_, unit = read_trace(write(tmp_path / "seconds.jsonl", seconds)).remarks
    assert sorted_ == "2 rows are not in order, the first in line 2: sorted by timestamp"
    assert unit.startswith(
        "4 requests in 0.004 s, as timestamps are read as milliseconds: if they are seconds"
    )
    in_ms = [{**one, "timestamp": 1e3 * one["timestamp"]} for one in seconds]
    assert read_trace(write(tmp_path / "ms.jsonl", in_ms)).remarks == (sorted_,)
    in_order = sorted(in_ms, key=lambda one: float(one["timestamp"]))
    assert read_trace(write(tmp_path / "fine.jsonl", in_order)).remarks == ()
    (silent,) = read_trace(write(tmp_path / "silent.jsonl", [row(), row(at=900, output_length=0)])).remarks
    assert silent == "output_length is 0 in 1 rows, the first in line 2: read as 1 token"
    turns = [row(session_id="a", turn=1), row(session_id="a", turn=0)]
    (moved,) = read_trace(write(tmp_path / "turns.jsonl", turns)).remarks
    assert moved == "2 rows are not in order, the first in line 1: sorted within their sessions"
    assert open_trace("mooncake").remarks == ()


def test_B051_commands_say_it_beside_their_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "seconds.jsonl", [row(at=at / 10) for at in (0, 9, 5, 7)])
    assert exit_code(["simulate", "--trace", str(path), "--policy", "round_robin", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["requests"] > 0
    assert "seconds.jsonl: 3 rows are not in order" in said.err
    assert "seconds.jsonl: 4 requests in 0.0009 s" in said.err


def test_B051_same_ids_are_the_same_text_and_differ_after_what_they_share(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", [row(tokens=1030), row(tokens=1030, ids=[1, 3])]))
    words = PromptText(trace.block_tokens, salt="s")
    one, other = (words.prompt(each.block_ids, 1030, "rest") for each in trace.requests)
    assert one[: 512 * 4] == other[: 512 * 4]
    assert one[512 * 4 : 513 * 4] != other[512 * 4 : 513 * 4]


def test_B051_the_block_size_is_found_or_given(tmp_path: Path) -> None:
    rows = [row(tokens=40, ids=[1, 2]), row(at=1, tokens=48, ids=[1, 2, 3])]
    path = write(tmp_path / "t.jsonl", rows)
    assert read_trace(path).block_tokens == 16
    assert read_trace(path, block_tokens=20).block_tokens == 20
    with pytest.raises(
        TraceError, match=r"t\.jsonl, line 1: 2 hash_ids, but 40 tokens in blocks of 512 need 0"
    ):
        read_trace(path, block_tokens=512)


def test_sessions_follow_turn_by_turn(tmp_path: Path) -> None:
    rows = [
        row(session_id="a", turn=1, tokens=1100),
        row(session_id=7, turn=0, tokens=1200, delay=1500),
        row(session_id="a", turn=0, tokens=1000),
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.in_sessions
    assert [(request.session, request.prompt_tokens) for request in trace.requests] == [
        ("a", 1000),
        ("a", 1100),
        ("7", 1200),
    ]
    assert trace.requests[2].think_ms == 1500


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty; expected one JSON object per line"),
        ([[1, 2]], "line 1: a JSON list, expected an object"),
        ([row(), {"timestamp": 1, "input_length": 5}], "line 2: output_length, hash_ids missing"),
        (
            [{"input_length": 5, "output_length": 1, "hash_ids": [1]}],
            r"line 1: timestamp \(or session_id\) missing",
        ),
        ([row(tokens=600, hash_ids=[])], "hash_ids is empty in every row; expected ids, or the block size"),
        ([row(tokens=0)], "line 1: input_length is 0, expected a whole number of tokens, 1 or more"),
        ([row(tokens=1.5)], "line 1: input_length is 1.5"),
        ([row(output_length=-1)], "line 1: output_length is -1"),
        ([row(ids=["a", "b"])], "line 1: block id 'a' in hash_ids, expected a whole number of 64 bits"),
        ([row(ids=[True, 2])], "line 1: block id True"),
        ([row(ids=[2**64, 2])], r"line 1: block id 1\.8446744073709552e\+19"),
        (
            [row(), row(ids=[1])] * 2 + [row(ids=[])],
            "line 5: 0 hash_ids, but 1000 tokens in blocks of 512 need 1",
        ),
        (
            [row(), row(ids=[1, 2, 3])],
            r"line 2: 3 hash_ids, but 1000 tokens in blocks of 512 need 1 \(full blocks\) or 2",
        ),
        ([row(timestamp="soon")], "line 1: timestamp is 'soon'"),
        ([row(), row(session_id="a")], "line 1: session_id is None, expected text or a number"),
        ([row(session_id="a", turn=0)] * 2, "line 2: session a has turn 0 already in line 1"),
        ([row(session_id="a", turn="x")], "line 1: turn is 'x'"),
        ([row(session_id="a", delay=-1)], "line 1: delay is -1"),
        (
            [row(tokens=2000, ids=[1, 2, 3, 4]), row(at=1, tokens=2000, ids=[1, 9, 3, 5])],
            "line 2: block id 3 follows 9 here and 2 in line 1",
        ),
        ([row(tokens=2000, ids=[5, 5, 5, 6])], "line 1: block id 5 follows 5 here and nothing in line 1"),
    ],
)
def test_B051_what_does_not_add_up_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(TraceError, match=message) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row()) + "\n{not json\n")
    with pytest.raises(TraceError, match=r"bad\.jsonl, line 2: not JSON"):
        read_trace(path)
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(TraceError, match=r"bad\.gz: cannot be read"):
        read_trace(tmp_path / "bad.gz")
    with pytest.raises(TraceError, match="no file 'nowhere'; expected a trace file"):
        open_trace("nowhere")
