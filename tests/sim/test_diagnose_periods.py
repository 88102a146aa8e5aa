"""Counters between two pages, two periods compared, and a live router asked over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.diagnose.live_router import LiveRouter, router_findings
from sim.diagnose.metrics_page import MetricsError, parse_counters
from sim.diagnose.periods import Period, change
from tests.fakes.fake_replica import Send, completion, sized
from tests.fakes.router_rig import RouterRig, with_router
from tests.sim.commands import exit_code
from tests.sim.diagnose_logs import Row, chats, system_prompt, write
from warmroute import main

VLLM = """vllm:prefix_cache_queries_total{{engine="0"}} {queried}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:time_to_first_token_seconds_sum{{engine="0"}} {ttft_s}
vllm:time_to_first_token_seconds_count{{engine="0"}} {requests}
vllm:request_queue_time_seconds_sum{{engine="0"}} {queue_s}
vllm:num_preemptions_total{{engine="0"}} 0
"""
SGLANG = """sglang:prompt_tokens_total{model_name="m"} 1000
sglang:cached_tokens_total{cache_source="device",model_name="m"} 300
sglang:cached_tokens_total{cache_source="host",model_name="m"} 200
"""


def page(folder: Path, name: str, **values: float) -> str:
    path = folder / name
    path.write_text(
        VLLM.format(**{"queried": 0, "hits": 0, "ttft_s": 0, "requests": 0, "queue_s": 0, **values})
    )
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["diagnose", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_hit_rate_between_two_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = page(tmp_path, "a", queried=1_000, hits=900, ttft_s=1, requests=10)
    last = page(tmp_path, "b", queried=3_000, hits=1_400, ttft_s=5, requests=30)
    code, out, _ = run(capsys, "--metrics", first, last)
    assert code == 0
    assert "25.0% of 2,000 prompt tokens were hits" in out


def test_engines_name_counters_in_their_own_way() -> None:
    assert parse_counters(SGLANG, "page").hit_share == 0.5
    with pytest.raises(MetricsError, match="no prefix cache counters"):
        parse_counters("process_cpu_seconds_total 1\n", "page")
    with pytest.raises(MetricsError, match="no page of Prometheus metrics"):
        parse_counters("<html>{", "page")


def test_measured_by_counters_when_the_log_does_not_tell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first = page(tmp_path, "a", requests=1)
    last = page(tmp_path, "b", queried=1_000, hits=250, requests=2)
    code, out, _ = run(capsys, write(tmp_path, chats()), "--metrics", first, last, "--json")
    made = orjson.loads(out)
    assert code == 0
    assert made["cached_share"]["measured"] == pytest.approx(0.25, abs=1e-4)
    assert made["prompt_tokens"] - made["cached_tokens"] == sum(made["lost_tokens"].values())


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ({"queried": 10_000, "hits": 2_000, "ttft_s": 8.5}, "fewer hits: 75.0% to 20.0% cached"),
        ({"queried": 40_000, "hits": 30_000, "ttft_s": 10.5}, "longer prompts: 1,000 to 4,000 tokens"),
        (
            {"queried": 10_000, "hits": 7_500, "ttft_s": 6.0, "queue_s": 3.5},
            "a longer queue: 50.0 to 350.0 ms",
        ),
        ({"queried": 10_000, "hits": 7_500, "ttft_s": 6.0}, "slower prefill"),
        ({"queried": 10_000, "hits": 7_500, "ttft_s": 3.1}, "no regression"),
        ({"queried": 10_000, "hits": 9_500, "ttft_s": 1.0}, "more hits: 75.0% to 95.0% cached"),
    ],
)
def test_the_verdict_on_two_periods(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, second: dict[str, float], verdict: str
) -> None:
    one = {"queried": 10_000, "hits": 7_500, "ttft_s": 3.0, "requests": 10, "queue_s": 0.5}
    end = {name: one[name] + {"requests": 10, "queue_s": 0.5, **second}[name] for name in one}
    pages = [page(tmp_path, "a"), page(tmp_path, "b", **one), page(tmp_path, "c", **end)]
    code, out, _ = run(capsys, "--metrics", *pages)
    assert code == 0
    assert f"Verdict: {verdict}" in out
    assert "the prompts of both periods" in out, "what is missing is told"


FIGURES = st.builds(
    Period,
    requests=st.just(10.0),
    prompt_tokens=st.floats(1, 1e5),
    cached_share=st.floats(0, 0.99),
    ttft_ms=st.floats(1, 1e5),
    queue_ms=st.none() | st.floats(0, 1e4),
)


@given(FIGURES, FIGURES)
def test_parts_of_a_change_add_up(first: Period, second: Period) -> None:
    made = change(first, second)
    assert made is not None
    size = max(abs(ms) for _, ms in made.parts)
    assert sum(ms for _, ms in made.parts) == pytest.approx(made.ttft_ms, abs=1e-6 * max(1.0, size))


def timed(system: str, ttft_ms: float, shift: int = 0) -> list[Row]:
    rows = []
    for number, body in enumerate(chats(system=lambda number: system)):
        text = "".join(message["content"] for message in body["messages"])
        ids = [ord(letter) + shift for letter in text]
        rows.append({"body": body, "prompt_token_ids": ids, "ttft_ms": ttft_ms, "time": float(number)})
    return rows


def test_prompts_of_two_periods_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = write(tmp_path, timed(system_prompt(), 50.0), "before.jsonl")
    after = write(tmp_path, timed(f"New rule.\n{system_prompt()}", 90.0), "after.jsonl")
    code, out, _ = run(capsys, after, "--before", before)
    assert code == 0
    assert "prompts of all apps begin otherwise" in out
    assert "after:  system New rule" in out
    other_tokens = write(tmp_path, timed(system_prompt(), 50.0, shift=1), "tokens.jsonl")
    _, out, _ = run(capsys, other_tokens, "--before", before, "--json")
    assert any("equal texts became other tokens" in one["title"] for one in orjson.loads(out)["findings"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give FILE, --url ADMIN_URL or --metrics"),
        (("--before", "x"), "--before is compared with FILE"),
        (("--metrics", "{a}"), "expected two"),
        (("--metrics", "{a}", "/no/such/page"), "/no/such/page: cannot be read"),
        (("--metrics", "{b}", "{a}"), "fell from"),
        (("--metrics", "{a}", "{a}", "{b}"), "no request between two pages"),
        (("mooncake", "--metrics", "{a}", "{a}", "{b}"), "--before"),
        (("mooncake", "--before", "mooncake", "--metrics", "{a}", "{b}"), "three or four pages"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    pages = {"a": page(tmp_path, "a"), "b": page(tmp_path, "b", queried=10, requests=2)}
    code, out, err = run(capsys, *(argument.format(**pages) for argument in arguments))
    assert (code, out) == (2, "")
    assert expected in err


def test_a_router_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["diagnose", "--url", "127.0.0.1:1"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err
    code, _, err = run(capsys, "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "cannot be reached" in err


def test_a_live_router_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bodies = chats(requests=6, conversations=1)

    async def scenario(rig: RouterRig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(sized(completion(prompt=900, cached=450)))]
        for body in bodies:
            assert (await rig.ask(body)).status == 200
        url = f"http://{rig.router.admin.address}"
        code, out, _ = await asyncio.to_thread(run, capsys, "--url", url)
        assert code == 0
        assert "50.0% of 5,400 prompt tokens were cached" in out
        assert "r0" in out and "r1" in out
        code, out, _ = await asyncio.to_thread(
            run, capsys, write(tmp_path, bodies), "--url", url, "--policy", "round_robin"
        )
        assert code == 0
        assert "2 replicas of 1,0" in out and "KV tokens (assumed)" in out, "not the default of 3,000,000"
        assert "index.default_capacity_tokens" in out, "which is the router's"
        assert "where the router would send the latest prompts now" in out
        _, out, _ = await asyncio.to_thread(run, capsys, "--url", url, "--json")
        assert orjson.loads(out)["tables"][0]["title"] == "Replicas"
        public = f"http://{rig.router.data_plane.address}"
        code, _, err = await asyncio.to_thread(run, capsys, "--url", public)
        assert code == 1 and "admin port" in err

    with_router(scenario, replicas=2)


def live(**changes: Any) -> LiveRouter:
    replica: dict[str, Any] = {
        "name": "r0",
        "url": "http://r0",
        "health": "healthy",
        "draining": False,
        "usable": True,
        "requests": 10,
        "reported": None,
        "index": {"tokens": 10, "capacity_tokens": 1_000},
        "cache": {
            "predicted_tokens": 5_000,
            "cached_tokens": 4_900,
            "block_size": {"configured": None, "reported": 16},
        },
    }
    for key, value in changes.pop("replica", {}).items():
        replica[key] = {**replica[key], **value} if isinstance(value, dict) else value
    given = {"decisions": {"warm": 10.0}, "fallbacks": {}, "counters": {}, **changes}
    return LiveRouter(url="http://r", fleet={"replicas": [replica]}, **given)


@pytest.mark.parametrize(
    ("router", "headline"),
    [
        (live(replica={"cache": {"cached_tokens": 0}}), "never reported a hit"),
        (live(replica={"cache": {"cached_tokens": 2_000}}), "had 40% of what was believed"),
        (live(replica={"index": {"tokens": 990}}), "the index of r0 is full"),
        (live(replica={"cache": {"block_size": {"configured": 32, "reported": 16}}}), "block_size 32"),
        (live(replica={"usable": False, "health": "ejected"}), "takes no traffic: ejected"),
        (live(decisions={"warm": 8.0, "spill": 2.0}), "20% of requests left a warmer replica"),
        (live(fallbacks={"template": 3.0}), "read as text"),
    ],
)
def test_what_stands_out_in_a_router(router: LiveRouter, headline: str) -> None:
    ((title, lines),) = router_findings(router)
    assert headline in title
    assert lines


def test_a_healthy_router_has_no_findings() -> None:
    assert not router_findings(live())
