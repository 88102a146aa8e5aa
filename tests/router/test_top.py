"""``warmroute top`` against a router with fake replicas: JSON, lines, a picture, and errors."""

import asyncio
import io
import json
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from router.fleet_figures import fleet_figures
from router.top_command import Watch
from router.top_view import lines, picture
from sim.first_model import first_model
from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Send, chunk, delta, event
from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.router_rig import RouterRig, with_router
from warmroute import main

USAGE = {"prompt_tokens": 1_000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 750}}
ANSWER = [
    Send(
        STREAM_HEAD
        + chunk(delta("hi"))
        + chunk(event({"choices": [], "usage": USAGE}))
        + chunk(DONE_EVENT)
        + LAST_CHUNK
    )
]
HOSTILE = "gpu\x1b[2J[bold red]"


def _shown(figures: dict[str, Any], width: int = 200) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(picture(figures))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tells_the_fleet_once_as_json_and_as_lines(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = ANSWER
        await rig.ask(CHAT_STREAM)
        url = f"http://{rig.router.admin.address}/"
        assert await asyncio.to_thread(main, ["top", "--url", url, "--once", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["traffic"]["requests"] == 1 and told["traffic"]["hit_share"] == 0.75
        assert 0.0 < told["traffic"]["ttft_s"]["p50"] <= told["traffic"]["ttft_s"]["p99"]
        (replica,) = told["replicas"]
        assert (replica["replica"], replica["health"], replica["hit_share"]) == ("r0", "healthy", 0.75)
        assert replica["decisions"] == {"only": 1} and replica["errors"] == 0
        assert await asyncio.to_thread(main, ["top", "--url", url, "--once"]) == 0
        (decision,) = told["decisions"]
        assert (decision["reason"], decision["status"], decision["replica"]) == ("only", 200, "r0")
        traffic, row, shown, state = capsys.readouterr().out.splitlines()
        assert "only     r0: saves 0 ms, waits 0 ms; 200, first token" in shown
        assert "1 requests, 0 in flight" in traffic and "(only 1)" in traffic
        assert "replica: r0  health: healthy" in row and "hit share: 75.0%" in row
        assert state == "one router: state is shared with nobody"

    with_router(scenario)


class _Left(io.StringIO):
    """A reader that has seen enough, as ``head``."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_who_reads_no_more_is_not_complained_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(rig: RouterRig) -> None:
        url = f"http://{rig.router.admin.address}/"
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", _Left())
            assert await asyncio.to_thread(main, ["top", "--url", url, "--once", "--json"]) == 1
        assert capsys.readouterr().err == ""

    with_router(scenario)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_narrow_terminal_shows_who_and_how_well_before_all_else(
    width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(rig: RouterRig) -> None:
        url = f"http://{rig.router.admin.address}"
        assert await asyncio.to_thread(main, ["top", "--url", url, "--once", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        (row,) = told["replicas"]
        told["replicas"] = [row, {**row, "replica": "a-" + "long-" * 8 + "Z", "health": "ejected"}]
        shown = _shown(told, width)
        assert "r0" in shown and "Z" in shown and "healthy" in shown and "ejected" in shown
        assert "…" not in shown and (width < 200 or "index / capacity" in shown)
        assert all(cell_len(Text.from_ansi(line).plain) <= width for line in shown.splitlines())

    with_router(scenario)


def test_rate_and_ttft_are_of_what_it_has_seen() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = ANSWER
        await rig.ask(CHAT_STREAM)
        watch = Watch(f"http://{rig.router.admin.address}")
        first = (await asyncio.to_thread(watch.look))["traffic"]
        assert first["requests_per_s"] is None and first["ttft_s"]["p50"] is not None
        second = (await asyncio.to_thread(watch.look))["traffic"]
        assert second["requests_per_s"] == 0.0 and second["ttft_s"]["p50"] is None
        await rig.ask(CHAT_STREAM)
        third = (await asyncio.to_thread(watch.look))["traffic"]
        assert third["requests_per_s"] > 0.0 and third["ttft_s"]["p50"] is not None

    with_router(scenario)


def test_tenants_and_hot_prefixes_are_told() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = ANSWER
        watch = Watch(f"http://{rig.router.admin.address}")
        await asyncio.to_thread(watch.look)
        body = {**CHAT_STREAM, "messages": [{"role": "user", "content": "word " * 1_000}]}
        for _ in range(3):
            await rig.ask(body, Authorization="Bearer sk-a")
        assert (await rig.ask(body, Authorization="Bearer sk-a")).status == 429
        figures = await asyncio.to_thread(watch.look)
        tenant = next(one for one in figures["tenants"] if one["tenant"] == "acme")
        assert sum(tenant["turned_away"].values()) == 1
        assert tenant["requests_per_s"] > 0 and tenant["hit_share"] == 0.75
        (prefix,) = figures["prefixes"]
        assert prefix["requests"] == 3
        shown = "\n".join(lines(figures))
        assert "tenant acme: 0 in flight, 0 held, " in shown and f"prefix {prefix['prefix']}: 3 of" in shown
        assert "tenant acme" in _shown(figures)

    members = [{"name": "acme", "keys": ["sk-a"], "limits": {"requests_per_s": 3}}]
    with_router(scenario, tenants={"salt_secret": "a-secret-of-more-than-16", "members": members})


def test_the_public_port_is_told_from_the_admin_port() -> None:
    async def scenario(rig: RouterRig) -> None:
        url = f"http://{rig.router.data_plane.address}"
        with pytest.raises(OSError, match=r"404.*is it the router's public port.*needs its admin port"):
            await asyncio.to_thread(Watch(url).look)
        assert (await first_model(url)).of_router
        fake = await first_model(rig.replica.url)
        assert fake.name == "m" and not fake.of_router

    with_router(scenario)


def test_a_restarted_router_is_looked_at_anew() -> None:
    async def scenario(rig: RouterRig) -> None:
        watch = Watch(f"http://{rig.router.admin.address}")
        for requests, known in ((2, False), (3, True), (1, False), (4, True)):
            rig.router.counters.forget_replica("r0")
            for _ in range(requests):
                rig.router.counters.answered("r0", 200)
            rate = (await asyncio.to_thread(watch.look))["traffic"]["requests_per_s"]
            assert (rate is not None) == known
            assert rate is None or rate > 0.0

    with_router(scenario)


def test_names_steer_neither_terminal_nor_markup() -> None:
    async def scenario(rig: RouterRig) -> None:
        figures = fleet_figures((await rig.admin("/fleet")).json())
        figures["replicas"][0] |= {"replica": HOSTILE, "cache_alert": True, "cache_credit": 0.2}
        figures["state"] |= {"kind": "redis", "state": "cut_off", "fault": "no\x1b answer", "peers": [
            {"router": HOSTILE, "heard_s_ago": 1.0, "outstanding": 3, "gaps": 0}]}  # fmt: skip
        for text in ("\n".join(lines(figures)), _shown(figures)):
            assert "\x1b[2J" not in text and "gpu\ufffd[2J[bold red]" in text
            assert "! 20.0%" in text and "cut_off" in text and "3 outstanding" in text
        assert "● healthy" in _shown(figures)

    with_router(scenario)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--url", "127.0.0.1:9"], 2, "--url: expected http://HOST:PORT"),
        (["--url", "http://127.0.0.1:9", "--interval", "0"], 2, "--interval: expected seconds above 0"),
        (["--url", "http://127.0.0.1:9", "--once"], 1, "cannot be reached"),
    ],
)
def test_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert main(["top", *arguments]) == code
    assert says in capsys.readouterr().err
