"""Where an engine reads no cache salt, tenants' requests go elsewhere or are refused."""

import asyncio
import json
from typing import Any

import pytest

from router.endpoint_picker.ext_proc_pb2 import BUFFERED
from router.proxy.isolation import sharing_engines
from router.routing.replica_state import UNNAMED
from tests.endpoint_picker.talk import ENDPOINTS, Talk
from tests.fakes.fake_replica import Hang, Send, Wait, sized
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.router_rig import QUICK_HEALTH, RouterRig, with_router
from tests.fakes.tenants import A, B, code, tenants
from tests.router.test_tenant_salts import FORM, part

EMBED = {"model": "m", "input": "a text"}
MESSAGES = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
EMBEDDINGS = "/v1/embeddings"
REFUSED = (403, "cache_shared")
SGLANG = [{"kind": "sglang"}]
MIXED = [{"kind": "sglang"}, {"kind": "vllm"}]


def seen(rig: Rig | RouterRig) -> list[int]:
    return [len(replica.requests) for replica in rig.replicas]


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v1//Embeddings/",
        "/v1/%65mbeddings",
        "/v1/embeddings;a?b=c",
        "/v1/embeddings#a",
        "/v1/%" + "25" * 9 + "65mbeddings",
    ],
)
def test_where_an_engine_reads_no_salt_a_tenant_is_refused(path: str) -> None:
    async def scenario(rig: Rig) -> None:
        refused = await rig.ask(MESSAGES, path, **A)
        assert code(refused) == REFUSED and refused.error["type"] == "invalid_request_error"
        assert "tenants.isolation: warn" in refused.error["message"]
        assert seen(rig) == [0] and rig.counters.errors == {"cache_shared": 1}
        assert rig.counters.tenants["acme"].turned_away == {"cache_shared": 1}
        for fine in ("/v1/chat/completions", "/v1/messages/count_tokens", "/v1/responses"):
            assert (await rig.ask(CHAT, fine, **A)).status == 200
        assert (await rig.ask(b"", path, method="GET", **A)).status == 200
        assert code(await rig.ask({**EMBED, "model": "other"}, path, **A)) == (404, "model_not_found")

    with_rig(scenario, each=SGLANG, model="m", tenants=tenants())


def test_a_form_carries_no_salt_to_vllms_audio() -> None:
    async def scenario(rig: Rig) -> None:
        form = part(b'name="model"', b"m") + part(b'name="file"; filename="a.wav"') + b"--B--"
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            assert code(await rig.ask(form, path, **FORM, **A)) == REFUSED
        assert (await rig.ask(form, "/v1/files", **FORM, **A)).status == 200
        assert (await rig.ask(EMBED, EMBEDDINGS, **A)).status == 200

    with_rig(scenario, each=[{"kind": "vllm"}], tenants=tenants())


@pytest.mark.parametrize("kind", ["llamacpp", "tgi", "openai"])
def test_an_engine_that_knows_no_salt_gets_no_prompt_of_tenants(kind: str) -> None:
    async def scenario(rig: Rig) -> None:
        assert code(await rig.ask(CHAT, **A)) == REFUSED
        assert (await rig.ask(b"", "/v1/models/m", method="GET", **A)).status == 200

    with_rig(scenario, each=[{"kind": kind}], tenants=tenants())


def test_who_has_one_salt_or_none_shares_nothing_with_others() -> None:
    async def served(rig: Rig) -> None:
        key = A if rig.config.tenants is not None else {}
        assert (await rig.ask(EMBED, EMBEDDINGS, **key)).status == 200

    async def refused(rig: Rig) -> None:
        for key in (A, {"Authorization": "Bearer sk-old"}):
            assert code(await rig.ask(EMBED, EMBEDDINGS, **key)) == REFUSED

    acme, bolt = ({"name": one, "keys": [f"sk-{one[0]}"], "group": "g"} for one in ("acme", "bolt"))
    with_rig(served, each=SGLANG, tenants=tenants(acme))
    with_rig(served, each=SGLANG, tenants=tenants(acme, bolt))
    with_rig(served, each=SGLANG, tenants=tenants(isolation="warn"))
    with_rig(served, each=SGLANG)
    with_rig(refused, each=SGLANG, tenants=tenants(acme, bolt), keys={"public": ["sk-old"]})


# --- mixed fleets ---------------------------------------------------------------------------------


def test_of_a_mixed_fleet_only_those_that_part_the_cache_are_chosen() -> None:
    async def scenario(rig: Rig) -> None:
        for key in (A, B) * 3:
            assert (await rig.ask(EMBED, EMBEDDINGS, **key)).status == 200
        assert seen(rig) == [0, 6]
        for _ in range(4):
            assert (await rig.ask(CHAT, **A)).status == 200
        assert seen(rig) == [2, 8]
        rig.replicas[1].plans.append([Send(sized(b"{}", 500, "Oh"))])
        assert (await rig.ask(EMBED, EMBEDDINGS, **A)).status == 500  # it is not tried on the other
        assert seen(rig) == [2, 9]
        rig.drain(1)
        assert code(await rig.ask(EMBED, EMBEDDINGS, **A)) == (503, "no_replica")
        assert seen(rig) == [2, 9]

    with_rig(scenario, each=MIXED, tenants=tenants())


def test_what_a_replica_turns_out_to_be_counts_while_a_request_waits() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Wait(gate), Send(sized(b"{}"))])
        first, second = [await rig.client() for _ in range(2)]
        await first.post({**EMBED, "prompt": "first " * 20_000}, "/v1/completions", **A)
        await until(lambda: len(rig.replica.requests) == 1)
        await second.post({**EMBED, "input": "second " * 20_000}, EMBEDDINGS, **B)
        await until(lambda: rig.fleet.held == 1)
        rig.fleet.engine_found(0, "sglang")
        gate.set()
        assert (await first.answer()).status == 200 and code(await second.answer()) == REFUSED
        assert seen(rig) == [1]

    with_rig(scenario, each=[{}], tenants=tenants(), policy={"kind": "predicted_finish"})


def test_a_server_that_was_not_asked_yet_gets_no_prompt_of_tenants() -> None:
    async def scenario(rig: Rig) -> None:
        replica = next(iter(rig.fleet.replicas))
        replica.engine = None
        rig.fleet.replicas.changed()
        for path in (EMBEDDINGS, "/v1/chat/completions"):
            assert code(await rig.ask(EMBED, path, **A)) == (503, "no_replica")
        assert (await rig.ask(b"", "/v1/models/m", method="GET", **A)).status == 200
        rig.fleet.engine_found(0, UNNAMED)
        for path in (EMBEDDINGS, "/v1/chat/completions"):
            assert (await rig.ask(EMBED, path, **A)).status == 200

    with_rig(scenario, tenants=tenants())


# --- found out, reloaded, explained -----------------------------------------------------------------


def owned_by(engine: str) -> Any:
    models = json.dumps({"data": [{"id": "m", "owned_by": engine}]}).encode()
    return lambda probe: [Send(sized(models if probe.target == b"/v1/models" else b""))]


def test_an_engine_that_was_found_out_is_known_at_once_and_a_reload_changes_the_rule() -> None:
    def engines(replica: Any) -> None:
        replica.probe = owned_by("sglang")

    async def scenario(rig: RouterRig) -> None:
        assert code(await rig.ask(EMBED, EMBEDDINGS, **A)) == REFUSED
        page = (await rig.admin("/metrics")).body.decode()
        assert 'warmroute_errors_total{code="cache_shared"} 1.0' in page
        assert 'warmroute_tenant_turned_away_total{code="cache_shared",tenant="acme"} 1.0' in page
        await rig.reload(rig.entry(0), tenants=tenants(isolation="warn"))
        assert (await rig.ask(EMBED, EMBEDDINGS, **A)).status == 200
        answer = await rig.try_reload(rig.entry(0), tenants=tenants())
        assert answer.status == 200
        assert code(await rig.ask(EMBED, EMBEDDINGS, **A)) == REFUSED
        await rig.replica.kill()
        await rig.until_health("r0", "ejected")
        rig.replica.probe, before = owned_by("vllm"), len(rig.replica.probes)
        await rig.replica.start()
        await until(lambda: next(iter(rig.router.fleet.replicas)).engine == "vllm")
        asked = [probe.target for probe in rig.replica.probes[before:]]
        assert asked[:2] == [b"/health", b"/v1/models"]  # as soon as it is back
        assert (await rig.ask(EMBED, EMBEDDINGS, **A)).status == 200

    with_router(scenario, before=engines, tenants=tenants())


@pytest.mark.parametrize("models", [Send(sized(b"{}", 503, "Loading")), Hang()], ids=["503", "late"])
def test_a_server_is_unnamed_once_it_answers_for_its_models_and_not_before(models: Any) -> None:
    """llama.cpp is well, and busy: who it is, it will tell."""

    def mute(replica: Any) -> None:
        replica.probe = lambda probe: [models if probe.target == b"/v1/models" else Send(sized(b""))]

    async def scenario(rig: RouterRig) -> None:
        await rig.until_health("r0", "healthy")
        asked = len(rig.replica.probes)
        await until(lambda: len(rig.replica.probes) > asked + 8)
        assert code(await rig.ask(CHAT, **A)) == (503, "no_replica") and not rig.replica.requests
        rig.replica.probe = owned_by("llamacpp")
        (replica,) = rig.router.fleet.replicas
        await until(lambda: replica.engine == "llamacpp")  # at the next probe
        assert code(await rig.ask(CHAT, **A)) == REFUSED
        await rig.reload(rig.entry(1))
        rig.replicas[1].probe = [Send(sized(b"", 404, "Not Found"))]
        await until(lambda: UNNAMED in {one.engine for one in rig.router.fleet.replicas})
        assert (await rig.ask(CHAT, **A)).status == 200

    health = {**QUICK_HEALTH, "timeout_s": 0.2}
    with_router(scenario, replicas=2, known=1, before=mute, tenants=tenants(), health=health)


def test_explain_leaves_out_what_tenants_would_share() -> None:
    async def scenario(rig: RouterRig) -> None:
        body = json.dumps(CHAT).encode()
        await rig.reload(rig.entry(0, kind="llamacpp"), rig.entry(1, kind="vllm"))
        await until(lambda: not rig.router.fleet.forget_departed() and rig.router.fleet.ready)
        told = (await rig.admin("/explain", "POST", body, x_warmroute_tenant="acme")).json()
        assert told["replica"] == "r1"
        assert told["left_out"] == [{"replica": "r0", "reason": "tenants would share its cache"}]
        await rig.reload(rig.entry(0, kind="llamacpp"))
        refused = await rig.admin("/explain", "POST", body, x_warmroute_tenant="acme")
        assert refused.status == 403 and "tenants.isolation" in refused.json()["error"]["message"]

    with_router(scenario, replicas=2, tenants=tenants())


def test_an_endpoint_picker_names_only_replicas_that_part_the_cache() -> None:
    def talk(kinds: list[str], **fields: str) -> Any:
        replicas = [{"url": f"http://{at}", "kind": kind} for at, kind in zip(ENDPOINTS, kinds, strict=True)]
        talk = Talk(replicas=replicas, tenants=tenants())
        talk.head(BUFFERED, authorization="Bearer sk-a", **{":path": EMBEDDINGS})
        (reply,) = talk.body(json.dumps(EMBED).encode())
        if reply.HasField("immediate_response"):
            assert talk.at_rest()
            return reply.immediate_response
        talk.answer()
        assert talk.at_rest()
        named = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
        return sorted(named.split(","))

    assert talk(["sglang", "vllm", "warmroute"]) == sorted(ENDPOINTS[1:])
    assert talk(["vllm", "vllm", "openai"]) == ENDPOINTS[:2]
    refused = talk(["sglang", "openai", "tgi"])
    assert refused.status.code == 403 and b"cache_shared" in refused.body


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isolation", "says"), [("strict", "it gets no tenants' requests"), ("warn", "tenants share its cache")]
)
def test_an_engine_that_parts_nothing_is_told_of(
    isolation: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "warmroute")

    async def scenario(rig: RouterRig) -> None:
        await rig.reload(rig.entry(0, kind="llamacpp"), rig.entry(1, kind="warmroute"))
        await until(lambda: sum("runs" in one for one in caplog.messages) == 2)
        lines = [one for one in caplog.messages if "cache_salt" in one]
        assert len(lines) == 1 and lines[0].startswith("replica r0: llama.cpp knows no cache_salt")
        assert says in lines[0] and "tenants.isolation" in lines[0]

    with_router(scenario, replicas=2, tenants=tenants(isolation=isolation))


@pytest.mark.parametrize(
    ("closed", "shared"),
    [
        ([], "/v1/messages, /v1/embeddings, /v1/classify, /v1/score, /v1/rerank, /v1/decisions, "),
        (
            ["/v1/messages", "POST /v1/*s", "/v1/decisions"],
            "/v1/classify, /v1/score, /v1/rerank, /v1/systemone:",
        ),
        (["/v1/*"], ""),
    ],
)
def test_paths_at_which_an_engine_reads_no_salt_are_told_of_unless_they_are_closed(
    closed: list[str], shared: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang passes over a salt in Anthropic's messages, in embeddings and in what only scores."""
    caplog.set_level("INFO", "warmroute")

    async def scenario(rig: RouterRig) -> None:
        kinds = [rig.entry(0, kind="warmroute"), rig.entry(1, kind="sglang")]
        await rig.reload(*kinds, refused_paths=closed)
        await until(lambda: sum("runs" in one for one in caplog.messages) == 2)
        lines = [one for one in caplog.messages if "reads no cache_salt at" in one]
        assert len(lines) == bool(shared)
        assert all(f"replica r1: SGLang reads no cache_salt at {shared}" in one for one in lines)

    with_router(scenario, replicas=2, tenants=tenants())


def test_paths_are_remembered_and_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        for number in range(300):
            assert (await rig.ask(CHAT, f"/v1/x{number}", **A)).status == 200
        assert code(await rig.ask(EMBED, EMBEDDINGS, **A)) == REFUSED

    with_rig(scenario, each=SGLANG, tenants=tenants())
    for path in (b"/v1/" + b"x" * 5_000, b"/v1/x/../embeddings"):
        assert sharing_engines(path) >= {"sglang", "vllm", None}
