"""Bug cases of the category proxy-protocol that no test beside the proxy's own proves."""

import asyncio
import json
from typing import Any

import pytest

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    Hang,
    SeenRequest,
    Send,
    Wait,
    completion,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawClient
from tests.fakes.router_rig import RouterRig, with_router

PREFIX_AWARE = {"kind": "predicted_finish"}


async def _post(rig: Rig, body: bytes, path: str = "/v1/chat/completions") -> int:
    answer = await rig.ask(body, path)
    return answer.status


def test_B019_health_probes_are_not_starved_by_traffic() -> None:
    """600 requests under way on one replica, all at once, and each probe is answered beside them."""

    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        asks = [asyncio.create_task(rig.ask()) for _ in range(600)]
        await until(lambda: rig.replica.answering == 600)
        probes = len(rig.replica.probes)
        await until(lambda: len(rig.replica.probes) >= probes + 6)
        assert rig.router.fleet.replicas[0].health.state is HealthState.HEALTHY
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*asks)} == {200}

    with_router(scenario)


def test_B036_lengths_match_the_bytes_on_both_legs() -> None:
    """Odd white space and non-ASCII: nothing is written anew, so no length is stale."""
    answer_body = '{ "a":\t"é 漢 🎉",\r\n "b" : [ ] }  '.encode()
    request_body = '{"model":"m", "messages":[ {"role":"user","content":"é 🎉"} ] }\n'.encode()

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(answer_body))]
        answer = await rig.ask(request_body)
        assert answer.body == answer_body
        assert answer.field("content-length") == str(len(answer_body))
        seen = rig.replica.requests[0]
        assert seen.body == request_body
        assert seen.field("content-length") == str(len(request_body))

    with_rig(scenario, policy=PREFIX_AWARE)


SURROGATES = {
    "content string": '{"messages":[{"role":"user","content":"x \\ud83d"}]%s}',
    "content list": '{"messages":[{"role":"user","content":[{"type":"text","text":"x \\ud83d"}]}]%s}',
    "tool arguments": '{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"a",'
    '"type":"function","function":{"name":"f","arguments":"{\\"a\\":\\"\\ud83d\\"}"}}]}]%s}',
    "completion prompt": '{"prompt":"x \\ud83d"%s}',
    "model": '{"model":"m\\ud83d","messages":[{"role":"user","content":"x"}]%s}',
    "a proper pair": '{"messages":[{"role":"user","content":"x \\ud83d\\ude00"}]%s}',
}


@pytest.mark.parametrize("kind", ["predicted_finish", "bounded_hash"])
@pytest.mark.parametrize("name", list(SURROGATES))
def test_B069_an_unpaired_surrogate_passes_unchanged(name: str, kind: str) -> None:
    async def scenario(rig: Rig) -> None:
        for more in ("", ',"stream":true'):
            body = (SURROGATES[name] % more).encode()
            assert await _post(rig, body) == 200
            assert rig.replica.requests[-1].body == body

    with_rig(scenario, replicas=1, policy={"kind": kind})


STRANGE_BUT_THE_REPLICAS_TO_JUDGE = [
    {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    {"messages": [{"role": "user", "content": "x"}], "tools": [{}], "vendor": {"z": 1, "a": [None, 1e400]}},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"prompt": ["a", "b"]},
    {"messages": [{"role": "user", "content": [{"type": "hologram", "hologram": {"x": 1.50}}]}]},
    {"messages": "not a list", "temperature": "hot", "max_tokens": -1, "n": 10**30},
]


def test_B074_the_router_judges_no_field_and_writes_no_body_anew() -> None:
    async def scenario(rig: Rig) -> None:
        for value in STRANGE_BUT_THE_REPLICAS_TO_JUDGE:
            body = json.dumps(value, indent=1).replace("1.5", "1.50e0").encode()
            for path in ("/v1/chat/completions", "/v1/completions"):
                assert await _post(rig, body, path) == 200
                assert rig.replica.requests[-1].body == body

    with_rig(scenario, policy=PREFIX_AWARE)


BAD_JSON: dict[str, bytes] = {
    "truncated": b'{"model":"m","messages":[{"role"',
    "empty": b"",
    "a list": b"[1,2]",
    "a string": b'"x"',
    "invalid UTF-8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a byte order mark": b'\xef\xbb\xbf{"messages":[]}',
    "NaN": b'{"n":NaN,"messages":[{"role":"user","content":"x"}]}',
    "a very long integer": b'{"n":' + b"9" * 5000 + b',"messages":[{"role":"user","content":"x"}]}',
    "deep nesting": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"messages":[{"role":"user","content":'
    + b'{"a":' * 50_000
    + b"1"
    + b"}" * 50_000
    + b"}]}",
    "two models": b'{"model":"m","model":"n","messages":[{"role":"user","content":"x"}]}',
    "model null": b'{"model":null,"messages":[{"role":"user","content":"x"}]}',
    "model a number": b'{"model":7,"messages":[{"role":"user","content":"x"}]}',
    "no model": b'{"messages":[{"role":"user","content":"x"}]}',
    "messages of nulls": b'{"messages":[null,7,[],{"role":7,"content":7}]}',
}


@pytest.mark.parametrize("kind", ["predicted_finish", "round_robin"])
@pytest.mark.parametrize("name", list(BAD_JSON))
def test_B097_bad_json_is_passed_on_once_and_its_400_comes_back(name: str, kind: str) -> None:
    refusal = b'{"error":{"message":"bad","type":"x","code":null,"param":null}}'

    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(sized(refusal, 400, "Bad Request"))]
        answer = await rig.ask(BAD_JSON[name], content_type="text/plain")
        assert (answer.status, answer.body) == (400, refusal)
        assert [request.body for replica in rig.replicas for request in replica.requests] == [BAD_JSON[name]]
        assert all(replica.health.state is HealthState.HEALTHY for replica in rig.fleet.replicas)

    with_rig(scenario, replicas=2, policy={"kind": kind})


def test_B099_the_model_list_is_the_union_of_what_is_well() -> None:
    """One replica dead, one hanging, two of one model: 200 at once; with nobody left an explicit 503."""

    def serving(*models: str) -> Any:
        listed = json.dumps({"object": "list", "data": [{"id": model} for model in models]}).encode()

        def probe(request: SeenRequest) -> Any:
            return [Send(sized(listed if request.target == b"/v1/models" else b""))]

        return probe

    async def ids(rig: RouterRig) -> list[str]:
        return [model["id"] for model in (await rig.get("/v1/models")).json()["data"]]

    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].probe = serving("a", "both")
        rig.replicas[1].probe = serving("both")
        rig.replicas[2].probe = serving("c")
        fleet = rig.router.fleet
        for index in range(3):
            fleet.replicas[index].models = None  # ask again
        await until(lambda: all(replica.models is not None for replica in fleet.replicas))
        assert await ids(rig) == ["a", "both", "c"]
        await rig.replicas[0].kill()
        rig.replicas[2].probe = [Hang()]
        await rig.until_health("r0", "ejected")
        await rig.until_health("r2", "ejected")
        assert await ids(rig) == ["both"]
        await rig.replicas[1].kill()
        await rig.until_health("r1", "ejected")
        answer = await rig.get("/v1/models")
        assert (answer.status, answer.error["code"]) == (503, "no_replica")

    with_router(scenario, replicas=3)


async def _raise_all(rig: RouterRig) -> dict[int, str]:
    """Meet the router's own errors through the OpenAI SDK: status -> what it raised."""
    openai = pytest.importorskip("openai")
    met: dict[int, str] = {}
    url = f"http://{rig.router.data_plane.address}/v1"
    client = openai.AsyncOpenAI(base_url=url, api_key="tenant", max_retries=0)

    async def meet(**body: Any) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                **{"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
            )
        error = caught.value
        assert set(error.body) == {"message", "type", "code", "param"}
        assert error.response.headers["content-type"] == "application/json"
        assert error.request_id and error.request_id in error.body["message"]
        met[error.status_code] = error.body["code"]

    async with client:
        await meet(model="unknown")
        await meet(user="x" * 3000)  # over the limit
        rig.replica.default = [Hang()]
        await meet()
        rig.replica.default = [Send(b"garbage\r\n\r\n")]
        await meet()
        await rig.admin("/drain/r0", "POST")
        await meet()
        client.api_key = "guess"
        await meet()
    return met


def test_B138_the_sdk_reads_every_error_that_the_router_makes() -> None:
    async def scenario(rig: RouterRig) -> None:
        met = await _raise_all(rig)
        assert met == {
            401: "invalid_api_key",
            404: "model_not_found",
            413: "body_too_large",
            504: "first_byte_timeout",
            502: "replica_garbage",
            503: "no_replica",
        }

    with_router(
        scenario, keys={"public": "tenant"}, limits={"body_bytes": 2000}, timeouts={"first_byte_s": 0.1}
    )


def test_B138_bad_http_and_overload_have_the_same_shape() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST /v1/x HTTP/1.1\r\nbad header\r\n\r\n")
        assert (await client.answer()).error["code"] == "bad_http"
        rig.replica.default = [Hang()]
        waiting = [await _sent(rig) for _ in range(2)]  # one runs, one is held
        await until(lambda: rig.fleet.held == 1)
        answer = await rig.ask(CHAT_STREAM)
        assert answer.status == 429
        assert answer.error["code"] == "hold_full"
        assert int(answer.field("retry-after") or 0) > 0
        for one in waiting:
            one.leave()

    with_rig(scenario, policy=PREFIX_AWARE, hold={"max_requests": 1})


async def _sent(rig: Rig) -> RawClient:
    client = await rig.client()
    await client.post({**CHAT_STREAM, "messages": [{"role": "user", "content": "x" * 100_000}]})
    return client


def test_B016_a_refused_body_costs_no_dispatch_and_no_health() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(b"{" + b" " * 2_000 + b"}")
        assert answer.status == 413
        assert answer.error["code"] == "body_too_large"
        assert not rig.replica.requests
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY
        assert (await rig.ask(CHAT)).status == 200

    with_rig(scenario, limits={"body_bytes": 1_000})


def test_B018_a_request_cut_by_a_limit_is_aborted_on_the_replica() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        assert (await rig.ask(CHAT)).error["code"] == "total_timeout"
        await until(lambda: rig.replica.aborted == 1)

    with_rig(scenario, timeouts={"total_s": 0.1})
