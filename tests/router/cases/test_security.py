"""Bug cases of the category security that no test beside the proxy's own proves."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from router.config import ControlField, ModelConfig, RouterConfig
from router.proxy.exact_model import load_exact_model
from router.proxy.prompt_reader import PromptReader
from router.routing.block_naming import BlockNaming
from router.routing.control_fields import CONTROL_FIELDS
from router.routing.decision import Decision
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import UNREADABLE
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from tests.fakes.fake_replica import (
    STREAM_HEAD,
    Close,
    FakeReplica,
    Hang,
    Reset,
    Send,
    Step,
    chunk,
    delta,
    head,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import RouterRig, with_router
from tests.router.tokenizer_folder import write_folder

ADMIN_ROUTES = [
    ("GET", "/metrics"),
    ("GET", "/fleet"),
    ("GET", "/config"),
    ("POST", "/explain"),
    ("POST", "/drain/r0"),
    ("DELETE", "/drain/r0"),
    ("POST", "/reload"),
]
TRICKS = ["{}", "/{}", "/v1/..{}", "/v1/%2e%2e{}", "/v1/x/../..{}", "/v1/%2E%2E%2F{}", "/.{}", "/v1/..;{}"]


def test_B013_no_admin_route_is_on_the_public_port_however_it_is_spelt() -> None:
    async def scenario(rig: RouterRig) -> None:
        for method, path in ADMIN_ROUTES:
            for trick in TRICKS:
                answer = await rig.ask(b"", trick.format(path), method=method)
                assert answer.status in (404, 405), (trick, path)
        assert not rig.router.fleet.replicas[0].draining
        assert not rig.replica.requests

    with_router(scenario)


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("Bearer guess", 401), ("Bearer tenant", 403)])
def test_B013_with_keys_every_admin_route_wants_the_operators(key: str | None, status: int) -> None:
    """By each method and spelling; a tenant's key opens nothing there."""

    async def scenario(rig: RouterRig) -> None:
        fields = {} if key is None else {"Authorization": key}
        for _, path in ADMIN_ROUTES:
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                for spelling in (path, "/" + path, path + "/", path + "?key=operator"):
                    answer = await rig.admin(spelling, method, **fields)
                    assert answer.status == status, (method, spelling)
                    assert b"replica" not in answer.body
        assert (await rig.admin("/fleet", Authorization="Bearer operator")).status == 200
        assert not rig.router.fleet.replicas[0].draining

    with_router(scenario, keys={"public": "tenant", "admin": "operator"})


def test_B013_admin_listens_on_loopback_unless_configured() -> None:
    config = RouterConfig.model_validate({"replicas": [{"url": "http://10.0.0.1:8000"}]})
    assert config.admin.startswith("127.0.0.1:")


def test_B013_no_request_chooses_its_upstream() -> None:
    """Neither a header nor the admin port adds a replica; a redirect is not followed with our key."""

    async def scenario(rig: RouterRig) -> None:
        stranger = FakeReplica()
        await stranger.start()
        names = ("X_Base_Url", "X_Upstream", "X_Target", "X_Original_Url", "X_Forwarded_Host", "Forwarded")
        fields = dict.fromkeys(names, stranger.url)
        assert (await rig.ask(CHAT, **fields)).status == 200
        assert len(rig.replica.requests) == 1
        rig.replica.plans.append(
            [Send(sized(b"", 307, "Moved", location=stranger.url + "/v1/chat/completions"))]
        )
        assert (await rig.ask(CHAT)).status == 307
        body = json.dumps({"url": "http://169.254.169.254"}).encode()
        for path in ("/replicas", "/add_worker?url=" + stranger.url, "/fleet", "/register"):
            assert (await rig.admin(path, "POST", body)).status in (403, 404, 405)
        assert not stranger.requests and not stranger.probes
        assert len(rig.router.fleet.replicas) == 1
        await stranger.stop()

    with_router(scenario, api_key="sk-ours")


CANARIES = {
    "key": "canary-of-the-client-key",
    "ours": "canary-of-our-own-key",
    "prompt": "canary-in-the-prompt",
    "cookie": "canary-in-a-cookie",
    "query": "canary-in-the-query",
    "answer": "canary-in-the-answer",
}


def test_B048_no_canary_on_any_page_or_in_any_log_line(caplog: pytest.LogCaptureFixture) -> None:
    answer = chunk(delta(CANARIES["answer"]))
    plans: list[list[Step]] = [
        [Send(b"canary garbage " + CANARIES["answer"].encode() + b"\r\n\r\n")],
        [Send(sized(CANARIES["answer"].encode(), 500, "No"))],
        [Send(sized(CANARIES["answer"].encode(), 400, "No"))],
        [Send(STREAM_HEAD + answer), Reset()],
        [Send(STREAM_HEAD + answer), Hang()],
        [Hang()],
        [Close()],
    ]
    pages: list[str] = []

    async def scenario(rig: RouterRig) -> None:
        body = {**CHAT_STREAM, "messages": [{"role": "user", "content": CANARIES["prompt"] * 100}]}
        fields = {"Authorization": f"Bearer {CANARIES['key']}", "Cookie": CANARIES["cookie"]}
        path = f"/v1/chat/completions?key={CANARIES['query']}"
        for plan in plans:
            rig.replica.plans.append(plan)
            await rig.ask(body, path, **fields)
        await rig.ask({**body, "model": CANARIES["prompt"]}, path, **fields)
        await rig.admin("/explain", "POST", json.dumps(body).encode())
        await rig.admin("/explain", "POST", b"{" + CANARIES["prompt"].encode())
        await rig.admin("/drain/" + CANARIES["query"], "POST")
        await rig.replica.kill()
        await rig.ask(body, path, **fields)
        for page in ("/metrics", "/fleet", "/config"):
            pages.append((await rig.admin(page)).body.decode())

    caplog.set_level(logging.INFO)
    with_router(
        scenario,
        api_key=CANARIES["ours"],
        timeouts={"idle_s": 0.2, "first_byte_s": 0.2},
        retries={"attempts": 1},
        health={"interval_s": 5.0, "failures_to_eject": 100},
    )
    assert "warmroute" in pages[0] and '"api_key":"**********"' in pages[2]
    for canary in CANARIES.values():
        assert canary not in caplog.text
        assert not any(canary in page for page in pages)


def test_B066_the_config_knows_every_control_field() -> None:
    assert set(get_args(ControlField)) == CONTROL_FIELDS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", sorted(CONTROL_FIELDS))
def test_B066_a_field_that_steers_the_engine_is_refused(field: str, stream: bool) -> None:
    async def scenario(rig: Rig) -> None:
        for value in ({"remote_host": "10.0.0.9"}, 0, None, "x"):
            answer = await rig.ask({**CHAT, "stream": stream, field: value})
            assert answer.status == 400
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("control_field", field)
        assert not rig.replica.requests
        assert (await rig.ask(CHAT)).status == 200

    with_rig(scenario)


@pytest.mark.parametrize("field", sorted(CONTROL_FIELDS))
def test_B066_nor_does_one_pass_among_vllms_extra_arguments(field: str) -> None:
    """vLLM's scheduler reads them there as if its own orchestrator had put them in."""

    async def scenario(rig: Rig) -> None:
        answer = await rig.ask({**CHAT, "vllm_xargs": {"mine": 1, field: "x"}})
        assert (answer.status, answer.json()["error"]["param"]) == (400, field)
        assert not rig.replica.requests
        assert (await rig.ask({**CHAT, "vllm_xargs": {"mine": 1}})).status == 200

    with_rig(scenario)


def test_B066_what_the_operator_allows_passes() -> None:
    async def scenario(rig: Rig) -> None:
        body = json.dumps({**CHAT, "priority": -5}).encode()
        assert (await rig.ask(body)).status == 200
        assert rig.replica.requests[0].body == body
        answer = await rig.ask({**CHAT, "priority": 1, "kv_transfer_params": {}})
        assert answer.json()["error"]["param"] == "kv_transfer_params"

    with_rig(scenario, client_control_fields=["priority"])


LENIENT = {
    "NaN": b'{"n":NaN,"kv_transfer_params":{}}',
    "a lone surrogate": b'{"user":"\\ud83d","bootstrap_host":"h"}',
    "a byte order mark": b'\xef\xbb\xbf{"priority":1}',
    "UTF-16": '{"priority":1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"priority":1}'.encode("utf-16-le"),
    "UTF-32": '{"priority":1}'.encode("utf-32"),
    "an escaped name and NaN": b'{"n":NaN,"\\u0070riority":1}',
    "the second of two": b'{"priority":1,"priority":2}',
    "an escaped name": b'{"\\u0070riority":1}',
}


@pytest.mark.parametrize("name", list(LENIENT))
def test_B066_no_json_that_engines_read_and_the_router_does_not_hides_one(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(LENIENT[name])
        assert (answer.status, answer.json()["error"]["code"]) == (400, "control_field")
        assert not rig.replica.requests

    with_rig(scenario)


def test_B066_prompts_may_speak_of_such_fields() -> None:
    async def scenario(rig: Rig) -> None:
        text = 'What does "kv_transfer_params": {} mean? And "priority"?'
        assert (await rig.ask({**CHAT, "messages": [{"role": "user", "content": text}]})).status == 200
        assert (await rig.ask({**CHAT, "metadata": {"priority": "x"}})).status == 200

    with_rig(scenario)


def test_B086_probes_and_requests_carry_our_key_and_never_the_clients() -> None:
    async def scenario(rig: RouterRig) -> None:
        theirs: dict[str, Any] = {"Authorization": "Bearer sk-theirs", "Api_Key": "sk-theirs"}
        rig.replica.plans.append([Send(sized(b"{}", 500, "No"))])
        for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/files"):
            await rig.ask(CHAT, path, **theirs)
        await until(lambda: len({probe.target for probe in rig.replica.probes}) >= 3)
        seen = [*rig.replica.requests, *rig.replicas[1].requests, *rig.replica.probes]
        assert len(seen) >= 7
        assert {request.field("authorization") for request in seen} == {"Bearer sk-ours"}
        assert not any(b"sk-theirs" in request.raw_head for request in seen)

    with_router(scenario, replicas=2, api_key="sk-ours")


def test_B086_a_probe_that_is_redirected_takes_our_key_nowhere() -> None:
    async def scenario(rig: RouterRig) -> None:
        stranger = FakeReplica()
        await stranger.start()
        rig.replica.probe = lambda probe: [
            Send(sized(b"", 302, "Found", location=stranger.url + probe.target.decode()))
        ]
        probes = len(rig.replica.probes)
        await rig.until_health("r0", "ejected")  # elsewhere is not here: it is not well
        assert len(rig.replica.probes) > probes
        assert stranger.connections == 0
        await stranger.stop()

    with_router(scenario, api_key="sk-ours")


FAILURES: dict[str, list[Step]] = {
    "closed": [Close()],
    "reset": [Reset()],
    "garbage": [Send(b"\0\1\2 Traceback (most recent call last): /srv/engine.py\r\n\r\n")],
    "bad length": [Send(head(content_length="x") + b"{}")],
    "silent": [Hang()],
    "broken stream": [Send(STREAM_HEAD + chunk(delta("a"))), Reset()],
    "stalled stream": [Send(STREAM_HEAD + chunk(delta("a"))), Hang()],
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_B140_the_clients_message_is_fixed_and_names_no_insides(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = FAILURES[name]
        answer = await rig.ask(CHAT_STREAM)
        text = answer.body.decode()
        assert '"error"' in text and (answer.field("x-request-id") or "?") in text
        for inside in (
            "127.0.0.1",
            str(rig.replica.port),
            "r0",
            "Errno",
            "Error(",
            "Traceback",
            ".py",
            "asyncio",
        ):
            assert inside not in text

    with_rig(scenario, timeouts={"first_byte_s": 0.1, "idle_s": 0.1})


def test_B140_an_unreachable_replica_is_not_described() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        answer = await rig.ask(CHAT)
        assert answer.error["code"] == "replica_unreachable"
        assert "127.0.0.1" not in answer.body.decode() and "Refused" not in answer.body.decode()

    with_rig(scenario)


class BrokenPolicy:
    """A fault of the router's own, in the deciding half."""

    samples = False

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        raise RuntimeError("secret insides of /srv/router.py")

    assess = copy = choose


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("size", [2, 5_000, 300_000])
def test_B140_a_fault_of_the_routers_own_is_not_described(size: int, by_token: bool, tmp_path: Path) -> None:
    """It gets 500 and an id, the log the rest; also where the prompt is read later or in a thread."""
    body = {**CHAT, "messages": [{"role": "user", "content": "a" * size}]}

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        if by_token:
            model = load_exact_model("m", ModelConfig(tokenizer=str(write_folder(tmp_path))))
            naming = BlockNaming("warmroute", 16)
            rig.plane.service.prompt_reader = PromptReader({"m": model}, lambda: [naming], rig.counters)
        rig.fleet.reconfigured(BrokenPolicy(), {}, rig.fleet.settings)  # type: ignore[arg-type]
        await client.post(body)
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert "secret" not in answer.body.decode()

    with pytest.raises(AssertionError, match="a fault of the router's own"):  # the rig holds it against us
        with_rig(scenario, replicas=2)


class Released:
    """Stands for a request that was held and is sent now."""

    def __init__(self, *, faulty: bool) -> None:
        self.faulty = faulty
        self.told: list[str] = []

    def hold_ended(self, flight: InFlight | None, now: float) -> None:
        if self.faulty:
            raise RuntimeError("of the router's own")
        self.told.append("sent")

    def failed_inside(self) -> None:
        self.told.append("failed")


def test_B140_a_fault_in_a_request_that_was_held_strikes_nobody_else() -> None:
    """Whoever let it go, and those behind it, go on; what was booked for it is free again."""

    async def scenario(rig: Rig) -> None:
        faulty, fine = Released(faulty=True), Released(faulty=False)
        for released in (faulty, fine):
            held = Held(None, None, 0.1, 9.0, context=released)
            held.flight = rig.fleet.sent(UNREADABLE, rig.fleet.decide(UNREADABLE, 0.0), 0.0)
            rig.fleet.outbox.append(held)
            if released is fine:
                rig.fleet.cancelled(held.flight, 0.0)  # nobody carries it here
        rig.plane.service.send_released(0.0)
        assert (faulty.told, fine.told) == (["failed"], ["sent"])
        assert not rig.fleet.replicas[0].ledger.in_flight

    with pytest.raises(AssertionError, match="a fault of the router's own"):
        with_rig(scenario)
