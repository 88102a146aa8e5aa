"""Browsers: preflights need no key and reach no replica; pages may read what they are allowed to."""

from typing import Any

import pytest
from aiohttp import web

from router.config import parse_config
from router.config_errors import ConfigError
from tests.fakes.chromium import chromium, needs_chromium
from tests.fakes.fake_replica import Send, completion, sized
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, with_rig
from tests.fakes.raw_client import RawAnswer

PAGE = "https://app.example"
KEY = {"Authorization": "Bearer sk-a"}
ASKS = {
    "Origin": PAGE,
    "Access_Control_Request_Method": "POST",
    "Access_Control_Request_Headers": "authorization,content-type",
}
WITH_KEYS: dict[str, Any] = {"keys": {"public": ["sk-a"]}}


async def preflight(rig: Rig, path: str = "/v1/chat/completions", **fields: str) -> RawAnswer:
    return await rig.ask(b"", path, method="OPTIONS", **{**ASKS, **fields})


def allowed(answer: RawAnswer) -> str | None:
    return answer.field("access-control-allow-origin")


@pytest.mark.parametrize(
    "keys", [WITH_KEYS, {"tenants": {"salt_secret": "x" * 16, "members": [{"name": "a", "keys": ["sk-a"]}]}}]
)
def test_where_a_key_is_wanted_any_page_may_ask_and_read(keys: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
            answer = await preflight(rig, path)
            assert (answer.status, answer.body, allowed(answer)) == (204, b"", "*")
            assert answer.field("access-control-allow-headers") == "authorization,content-type"
            assert "POST" in (answer.field("access-control-allow-methods") or "")
            assert answer.field("access-control-max-age") == "600"
            assert answer.field("content-length") is None
        assert not rig.replica.requests
        for body in (CHAT, CHAT_STREAM):
            answer = await rig.ask(body, Origin=PAGE, **KEY)
            assert (answer.status, allowed(answer)) == (200, "*")
            assert "x-request-id" in (answer.field("access-control-expose-headers") or "")
        assert all(one.field("origin") is None for one in rig.replica.requests)
        refused = await rig.ask(CHAT, Origin=PAGE)
        assert (refused.status, allowed(refused)) == (401, "*"), "a page is to see why"
        assert allowed(await rig.ask(CHAT, **KEY)) is None, "nobody asked"
        plain = await rig.ask(b"", method="OPTIONS", Origin=PAGE)
        assert plain.status == 401, "OPTIONS alone is no preflight"

    with_rig(scenario, **keys)


def test_only_the_origins_that_are_listed() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await preflight(rig)
        assert (answer.status, allowed(answer), answer.field("vary")) == (204, PAGE, "Origin")
        other = await preflight(rig, Origin="https://evil.example")
        assert (other.status, other.error["code"], allowed(other)) == (403, "origin_not_allowed", None)
        for origin, told in ((PAGE, PAGE), ("https://evil.example", None), ("null", None)):
            answer = await rig.ask(CHAT, Origin=origin)
            assert (answer.status, allowed(answer), answer.field("vary")) == (200, told, "Origin")
        assert len(rig.replica.requests) == 3

    with_rig(scenario, cors={"origins": [PAGE]})


def test_a_replicas_own_words_on_origins_are_replaced_where_the_router_speaks() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [
            Send(sized(completion(), access_control_allow_origin="https://other", x_a="b"))
        ]
        answer = await rig.ask(CHAT, Origin=PAGE, **KEY)
        assert (allowed(answer), answer.field("x-a")) == ("*", "b")

    with_rig(scenario, **WITH_KEYS)


@pytest.mark.parametrize("keys", [{}, {"keys": {"public": ["sk-a"]}, "cors": {"origins": []}}])
def test_without_them_replicas_answer_for_themselves(keys: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b"", access_control_allow_origin=PAGE))]
        answer = await preflight(rig, **KEY)
        assert (answer.status, allowed(answer)) == (200, PAGE)
        assert rig.replica.requests[0].field("origin") == PAGE

    with_rig(scenario, **keys)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/x", "https://a, https://b", ""])
def test_what_is_no_origin_is_an_error(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"x: cors\.origins: expected \* or SCHEME://HOST"):
        parse_config({"replicas": [{"url": "http://h:1"}], "cors": {"origins": [origin]}}, "x")


CHATS = """(async () => {
    const ask = async (key) => {
        const answer = await fetch("http://ROUTER/v1/chat/completions", {
            method: "POST",
            headers: {"content-type": "application/json", "authorization": "Bearer " + key},
            body: JSON.stringify({model: "m", messages: []}),
        });
        return [answer.status, await answer.json(), answer.headers.get("x-request-id")];
    };
    return [await ask("sk-a"), await ask("sk-b")];
})()"""


async def empty_page(request: web.Request) -> web.Response:
    return web.Response(text="<p>", content_type="text/html")


@needs_chromium
def test_a_page_in_a_real_browser_chats() -> None:
    async def scenario(rig: Rig) -> None:
        app = web.Application()
        app.router.add_get("/", empty_page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with chromium(f"http://127.0.0.1:{runner.addresses[0][1]}/") as page:
                said = await page.evaluate(CHATS.replace("ROUTER", rig.plane.address))
            (good, answer, request_id), (bad, refusal, _) = said
            assert (good, answer["choices"][0]["message"]["content"]) == (200, "hello") and request_id
            assert (bad, refusal["error"]["code"]) == (401, "invalid_api_key")
            assert [one.method for one in rig.replica.requests] == [b"POST"]
        finally:
            await runner.cleanup()

    with_rig(scenario, **WITH_KEYS)
