"""Tenants: whose key it is, what it may use, what replicas see of it, and what is counted."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from replica.contract.cache_salt import derived_salt, is_signed
from router.config import ConfigError, RouterConfig, parse_config
from router.tenants_file import read_tenants
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Send,
    Wait,
    chunk,
    delta,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawAnswer
from tests.fakes.router_rig import RouterRig, with_router
from warmroute import main

SECRET = "a secret of more than 16".replace(" ", "-")
REST = chunk(delta(None, finish="stop")) + chunk(DONE_EVENT) + LAST_CHUNK
A, B = {"Authorization": "Bearer sk-a"}, {"Authorization": "Bearer sk-b"}


def tenants(*members: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """``tenants:`` with acme (sk-a) and bolt (sk-b), unless others are given."""
    usual = ({"name": "acme", "keys": ["sk-a"]}, {"name": "bolt", "keys": ["sk-b"]})
    return {"salt_secret": SECRET, "members": [*(members or usual)], **keys}


def limited(**limits: Any) -> dict[str, Any]:
    return tenants({"name": "acme", "keys": ["sk-a"], "limits": limits}, {"name": "bolt", "keys": ["sk-b"]})


def code(answer: RawAnswer) -> tuple[int, str]:
    return answer.status, answer.error["code"]


def salts(rig: Rig | RouterRig) -> list[str | None]:
    return [json.loads(request.body).get("cache_salt") for request in rig.replica.requests]


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_a_tenants_or_a_public_one_or_refused() -> None:
    async def scenario(rig: Rig) -> None:
        for given in (A, B, {"Authorization": "bearer sk-old"}):
            assert (await rig.ask(**given)).status == 200
        for given, expected in (
            ({}, (401, "missing_api_key")),
            ({"Authorization": "Bearer sk-c"}, (401, "invalid_api_key")),
            ({"Authorization": "Bearer sk-admin"}, (403, "wrong_port")),
        ):
            assert code(await rig.ask(**given)) == expected
        assert all(b"sk-" not in one.raw_head for one in rig.replica.requests)
        counted = {name: one.statuses for name, one in rig.counters.tenants.items()}
        assert counted == {"public": {200: 1}, "acme": {200: 1}, "bolt": {200: 1}}

    with_rig(scenario, tenants=tenants(), keys={"public": ["sk-old"], "admin": ["sk-admin"]})


def test_models_of_others_are_neither_listed_nor_served() -> None:
    async def scenario(rig: RouterRig) -> None:
        async def listed(given: dict[str, str]) -> list[str]:
            answer = await rig.get("/v1/models", **given)
            return [one["id"] for one in answer.json()["data"]]

        assert (await listed(A), await listed(B)) == (["m"], [])
        assert (await rig.ask(**A)).status == 200
        refused = await rig.ask(**B)
        assert code(refused) == (403, "model_not_allowed")
        assert refused.error["type"] == "invalid_request_error" and refused.error["param"] == "model"
        unnamed = {key: value for key, value in CHAT.items() if key != "model"}
        assert code(await rig.ask(unnamed, **B)) == (403, "model_not_allowed")
        assert code(await rig.ask({**CHAT, "model": "other"}, **B)) == (404, "model_not_found")
        assert code(await rig.get("/v1/models/m", **B)) == (403, "model_not_allowed")
        assert len(rig.replica.requests) == 1

    with_router(
        scenario,
        tenants=tenants(
            {"name": "acme", "keys": ["sk-a"], "models": ["m"]},
            {"name": "bolt", "keys": ["sk-b"], "models": ["other"]},
        ),
    )


# --- salts ----------------------------------------------------------------------------------------


def test_B007_a_client_never_chooses_its_salt() -> None:
    """As a field, twice, by an escape, in a vendor's object, in a header: the replica sees ours alone."""

    async def scenario(rig: Rig) -> None:
        await rig.ask(**A)
        (victim,) = salts(rig)
        assert victim == derived_salt(SECRET.encode(), "acme")
        usual = json.dumps(CHAT)[1:].encode()
        tried: list[bytes] = [
            b'{"cache_salt":"%b",' % victim.encode() + usual,
            b'{"cache_salt":"x","cache_salt":"%b",' % victim.encode() + usual,
            b'{"cache\\u005fsalt":"%b",' % victim.encode() + usual,
            b'{"extra_key":"%b",' % victim.encode() + usual,
            b'{"extra_body":{"cache_salt":"%b","a":1},' % victim.encode() + usual,
            b'{"nvext":{"extra_key":["%b"]},' % victim.encode() + usual,
        ]
        for body in tried:
            assert (await rig.ask(body, Cache_Salt=victim, X_Cache_Salt=victim, **B)).status == 200
        for request in rig.replica.requests[1:]:
            assert request.body.count(b"cache_salt") == 1 and b"extra_key" not in request.body
            assert re.fullmatch("[0-9a-f]{32}", json.loads(request.body)["cache_salt"])
            assert victim.encode() not in request.body + request.raw_head
            assert json.loads(request.body)["messages"] == CHAT["messages"]
        bolts = derived_salt(SECRET.encode(), "bolt")
        seen = salts(rig)[1:]
        assert seen[4:] == [bolts, bolts]
        assert len({*seen, bolts, victim}) == 4  # its own ones are combined with the tenant

    with_rig(scenario, tenants=tenants())


@pytest.mark.parametrize(
    "body",
    [
        b'{"n":NaN,"cache_salt":"v","messages":[]}',
        b'\xef\xbb\xbf{"cache_salt":"v"}',
        '{"cache_salt":"v"}'.encode("utf-16"),
        b'[{"cache_salt":"v"}]',
        b'{"messages":',
        b"prompt=x",
    ],
)
def test_B007_what_only_an_engine_might_read_is_refused(body: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        assert code(await rig.ask(body, **A)) == (400, "body_unreadable")
        form = await rig.ask(body, content_type="multipart/form-data; boundary=x", **A)
        assert code(form) == (400, "body_unreadable")
        assert not rig.replica.requests

    with_rig(scenario, tenants=tenants())


def test_a_form_that_is_no_prompt_passes() -> None:
    async def scenario(rig: Rig) -> None:
        body = b"--x\r\n\r\n--x--"
        form = {"content_type": "multipart/form-data; boundary=x"}
        assert (await rig.ask(body, "/v1/audio/transcriptions", **form, **A)).status == 200
        assert rig.replica.requests[0].body == body

    with_rig(scenario, tenants=tenants())


FORM = {"content_type": "multipart/form-data; boundary=B"}


def part(disposition: bytes, value: bytes = b"v") -> bytes:
    return b"--B\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (disposition, value)


@pytest.mark.parametrize(
    ("disposition", "says"),
    [
        (b'name="cache_salt"', "salt_in_form"),
        (b"NAME=extra_key", "salt_in_form"),
        (b'filename="a"; name = "cache_salt"', "salt_in_form"),
        (b"name*=utf-8''cache_salt", "salt_in_form"),
        (b'name="vllm_xargs"', "salt_in_form"),
        (b'name="cache\\_salt"', "salt_in_form"),
        (b'x="' + b"y" * 9_000 + b'"; name="cache_salt"', "salt_in_form"),
        (b'name="priority"', "control_field"),
    ],
)
def test_a_form_may_set_no_more_than_json(disposition: bytes, says: str) -> None:
    async def scenario(rig: Rig) -> None:
        body = part(b'name="model"', b"m") + part(disposition) + b"--B--"
        assert code(await rig.ask(body, "/v1/audio/transcriptions", **FORM, **A)) == (400, says)
        two = {"content_type": "multipart/form-data; boundary=x; boundary=B"}
        assert code(await rig.ask(body, "/v1/audio/transcriptions", **two, **A)) == (400, "salt_in_form")
        assert not rig.replica.requests
        whole = part(b'name="file"; filename="priority"', bytes(range(256)) * 99) + b"--B--"
        assert (await rig.ask(whole, "/v1/audio/transcriptions", **FORM, **A)).status == 200
        assert rig.replica.requests[0].body == whole

    with_rig(scenario, tenants=tenants())


def test_without_tenants_a_form_may_set_a_salt_but_steers_no_engine() -> None:
    async def scenario(rig: Rig) -> None:
        path = "/v1/audio/transcriptions"
        assert (await rig.ask(part(b'name="cache_salt"') + b"--B--", path, **FORM)).status == 200
        steered = part(b'name="kv_transfer_params"') + b"--B--"
        assert code(await rig.ask(steered, path, **FORM)) == (400, "control_field")
        assert (await rig.ask(part(b'name="priority"') + b"--B--", path, **FORM)).status == 200

    with_rig(scenario, client_control_fields=["priority"])


@pytest.mark.parametrize("body", [b'{"messages":[ ],"x":1.50e0,"y":12345678901234567890123}\r\n', b"{ }"])
def test_every_other_byte_of_a_request_stays(body: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask(body, **A)
        sent = rig.replica.requests[0].body
        salt = derived_salt(SECRET.encode(), "acme").encode()
        comma = b"," if len(body) > 3 else b""
        assert sent == body.rstrip()[:-1] + comma + b'"cache_salt":"' + salt + b'"}'

    with_rig(scenario, tenants=tenants())


def test_groups_share_a_salt_and_a_signed_one_can_be_checked() -> None:
    async def scenario(rig: Rig) -> None:
        for key in "abc":
            await rig.ask(Authorization=f"Bearer sk-{key}")
        first, second, third = salts(rig)
        assert first == second != third
        assert all(is_signed(str(salt), b"k" * 16) for salt in (first, third))

    members = [{"name": key, "keys": [f"sk-{key}"], "group": "g"} for key in "ab"]
    members.append({"name": "g", "keys": ["sk-c"]})  # named as the group is, and not in it
    with_rig(scenario, tenants=tenants(*members, salt_signing_key="k" * 16))


def test_a_replica_that_refuses_unknown_fields_gets_no_salt() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.reload(rig.entry(0, kind="openai"))
        for body in (CHAT, {**CHAT, "cache_salt": "mine"}):
            assert (await rig.ask(body, **A)).status == 200
        assert [json.loads(one.body) for one in rig.replica.requests] == [CHAT, CHAT]

    with_router(scenario, tenants=tenants())


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "limit"),
    [({"requests_per_s": 0.01}, "requests_per_s"), ({"tokens_per_s": 0.5}, "tokens_per_s")],
)
def test_a_rate_is_refused_with_when_to_come_back(limits: dict[str, Any], limit: str) -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(**A)).status == 200
        answer = await rig.ask(**A)
        assert code(answer) == (429, f"tenant_{limit}")
        assert 5 <= int(answer.field("retry-after") or 0) <= 100
        assert f"limits.{limit}" in answer.error["message"]
        for _ in range(3):
            assert (await rig.ask(**B)).status == 200
        assert rig.counters.tenants["acme"].turned_away == {f"tenant_{limit}": 1}

    with_rig(scenario, tenants=limited(**limits))


def test_so_many_at_once_and_each_end_makes_room() -> None:
    async def scenario(rig: Rig) -> None:
        quota = rig.fleet.tenants.quotas["acme"]
        rig.replica.default = [Hang()]
        clients = [await rig.client() for _ in range(3)]
        for number, client in enumerate(clients[:2]):
            await client.post(CHAT_STREAM, **A)
            await until(lambda number=number: quota.in_flight == number + 1)  # type: ignore[misc]
        await clients[2].post(CHAT, **A)
        answer = await clients[2].answer()
        assert code(answer) == (429, "tenant_concurrent") and answer.field("retry-after") == "1"
        assert quota.in_flight == 2
        clients[0].leave()
        await until(lambda: quota.in_flight == 1)
        rig.replica.default = [Send(sized(b"{}"))]
        assert (await rig.ask(**A)).status == 200
        clients[1].leave()
        await until(lambda: quota.in_flight == 0)

    with_rig(scenario, tenants=limited(concurrent=2))


def test_without_redis_each_of_several_routers_keeps_to_its_part() -> None:
    async def scenario(rig: Rig) -> None:
        assert rig.fleet.tenants.quotas["acme"].share == 0.5
        rig.replica.default = [Hang()]
        clients = [await rig.client() for _ in range(2)]
        for client in clients:
            await client.post(CHAT_STREAM, **A)
        await until(lambda: len(rig.replica.requests) == 2)
        assert code(await rig.ask(**A)) == (429, "tenant_concurrent")
        for client in clients:
            client.leave()

    with_rig(scenario, tenants={**limited(concurrent=4), "routers": 2})


def test_B078_what_is_turned_away_takes_no_slot() -> None:
    """Limits of one: after an unknown model, bad bodies, a time-out, the valid request succeeds at once."""

    async def scenario(rig: RouterRig) -> None:
        async def one_passes() -> None:
            rig.replica.default = [Send(sized(b'{"usage":{"prompt_tokens":0,"completion_tokens":0}}'))]
            assert (await rig.ask(**A)).status == 200

        quota = rig.router.fleet.tenants.quotas["acme"]
        for body, status in (
            ({**CHAT, "model": "unknown"}, 404),
            (b"{malformed", 400),
            ({**CHAT, "priority": 1}, 400),
        ):
            for _ in range(3):
                assert (await rig.ask(body, **A)).status == status
            await one_passes()
        for _ in range(2):
            rig.replica.default = [Hang()]
            assert (await rig.ask(**A)).status == 504
            await one_passes()
        assert (quota.in_flight, quota.held) == (0, 0)

    with_router(
        scenario,
        tenants=limited(concurrent=1, tokens_per_s=2_000),
        timeouts={"first_byte_s": 0.1},
        retries={"attempts": 1},
    )


def test_tokens_are_charged_as_replicas_count_them() -> None:
    async def scenario(rig: Rig) -> None:
        quota = rig.fleet.tenants.quotas["acme"]
        rig.replica.default = [Send(sized(b'{"usage":{"prompt_tokens":900,"completion_tokens":70}}'))]
        await rig.ask(**A)
        assert (quota.tokens, quota.requests) == (970, 1)
        counted = rig.counters.tenants["acme"]
        assert (counted.prompt_tokens, counted.output_tokens) == (900, 70)

    with_rig(scenario, tenants=tenants())


# --- what is told of them -------------------------------------------------------------------------


def test_fleet_and_metrics_tell_of_tenants(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"

    async def scenario(rig: RouterRig) -> None:
        await rig.ask(CHAT_STREAM, **A)
        await rig.ask({**CHAT, "model": "none"}, **B)
        told = {one["name"]: one for one in (await rig.admin("/fleet")).json()["tenants"]}
        assert list(told) == ["public", "acme", "bolt"]
        acme, bolt = told["acme"], told["bolt"]
        assert (acme["statuses"], acme["prompt_tokens"], acme["cached_tokens"]) == ({"200": 1}, 10, 4)
        assert acme["limits"]["concurrent"] == 9 and acme["fleet"]["requests"] == 1
        assert (bolt["statuses"], bolt["turned_away"]) == ({"404": 1}, {"model_not_found": 1})
        page = (await rig.admin("/metrics")).body.decode()
        for line in (
            'warmroute_tenant_requests_total{status="200",tenant="acme"} 1.0',
            'warmroute_tenant_turned_away_total{code="model_not_found",tenant="bolt"} 1.0',
            'warmroute_tenant_tokens_total{kind="cached",tenant="acme"} 4.0',
            'warmroute_tenant_in_flight{tenant="acme"} 0.0',
            'warmroute_tenant_ttft_seconds_count{tenant="acme"} 1.0',
        ):
            assert line in page
        assert "sk-a" not in page and SECRET not in page
        await until(lambda: log.read_text().count("\n") == 1)
        row = json.loads(log.read_text())
        assert row["tenant"] == "acme" and "cache_salt" not in row["body"]

    with_router(
        scenario, tenants=limited(concurrent=9), log={"requests": {"file": str(log), "prompts": "bodies"}}
    )


def test_explain_tells_of_one_tenants_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({**CHAT, "messages": [{"role": "user", "content": "word " * 2_000}]}))

    async def scenario(rig: RouterRig) -> None:
        await rig.ask(request.read_bytes(), **A)
        url = f"http://{rig.router.admin.address}"

        async def matched(*tenant: str) -> int:
            code = await asyncio.to_thread(main, ["explain", "--url", url, "--json", *tenant, str(request)])
            shown = capsys.readouterr()
            assert code == 0, shown.err
            return int(json.loads(shown.out)["matched_tokens"])

        assert await matched("--tenant", "acme") > 1_000
        assert await matched("--tenant", "bolt") == await matched() == 0
        for tenant, says in (("nobody", "there are: public, acme, bolt"), ("bolt", "may not use")):
            if tenant == "bolt":
                members = ({"name": "acme", "keys": ["sk-a"]}, {"name": "bolt", "keys": [], "models": []})
                await rig.reload(rig.entry(0), tenants=tenants(*members))
            answer = await rig.admin("/explain", "POST", request.read_bytes(), x_warmroute_tenant=tenant)
            assert answer.status == 400 and says in answer.json()["error"]["message"]

    with_router(scenario, tenants=tenants())
    assert main(["explain", "--tenant", "acme", "router.yaml", str(request)]) == 2
    assert "--tenant goes with --url" in capsys.readouterr().err


def test_an_engine_that_parts_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "warmroute")

    async def scenario(rig: RouterRig) -> None:
        await rig.reload(rig.entry(0, kind="llamacpp"), rig.entry(1, kind="vllm"))
        await until(lambda: any("tenants share its cache" in one for one in caplog.messages))
        assert not any("r1" in one and "share" in one for one in caplog.messages)

    with_router(scenario, replicas=2, tenants=tenants())


def test_tenants_that_take_no_turns_are_warned_of_at_the_start_and_at_a_reload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", "warmroute")

    def told() -> list[str]:
        found = [one for one in caplog.messages if one.startswith("tenants: ")]
        caplog.clear()
        return found

    async def scenario(rig: RouterRig) -> None:
        (warning,) = told()
        assert "hold.enabled is false" in warning and "weight and priority" in warning
        asked = {"kind": "random", "selectable": ["predicted_finish"]}
        await rig.reload(rig.entry(0), policy=asked, hold={"enabled": True})
        assert not told()
        await rig.reload(rig.entry(0))
        (warning,) = told()
        assert "hold.enabled is false" in warning
        await rig.reload(rig.entry(0), tenants=None)
        assert not told()

    with_router(scenario, tenants=tenants(), hold={"enabled": False})


def test_rows_of_tenants_are_bounded() -> None:
    async def scenario(rig: RouterRig) -> None:
        for number in (1, 298, 299):
            await rig.ask(Authorization=f"Bearer sk-{number}")
        page = (await rig.admin("/metrics")).body.decode()
        assert 'warmroute_tenant_requests_total{status="200",tenant="t1"} 1.0' in page
        assert 'warmroute_tenant_requests_total{status="200",tenant="(others)"} 2.0' in page
        assert page.count("warmroute_tenant_in_flight{") == 201

    with_router(
        scenario,
        tenants=tenants(*({"name": f"t{number}", "keys": [f"sk-{number}"]} for number in range(300))),
    )


# --- where they come from -------------------------------------------------------------------------


def test_a_changed_file_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("- {name: acme, keys: [sk-a]}")

    async def scenario(rig: RouterRig) -> None:
        def replace(text: str) -> None:
            (tmp_path / "next").write_text(text)
            (tmp_path / "next").replace(path)

        client = await rig.client()

        async def status(given: dict[str, str]) -> int:
            await client.post(CHAT, **given)
            return (await client.answer()).status

        assert (await status(A), await status(B)) == (200, 401)
        replace("- {name: acme, keys: [sk-b]}\n- {name: late, keys: [sk-a]}")
        book = rig.router.fleet.tenants
        await until(lambda: "late" in book.quotas)
        assert (await status(A), await status(B)) == (200, 200)
        assert book.quotas["acme"].requests == 2  # the same tenant with another key
        replace("- {name: acme, keys: [sk-b]}\n- {name: acme, keys: [sk-a]}")
        await until(lambda: rig.router.counters.failed_tenant_files == 1)
        assert await status(A) == 200 and len(book) == 3
        replace("- {name: acme, keys: [sk-a], limits: {concurrent: 5}}")
        await until(lambda: "late" not in book.quotas)
        assert book.quotas["acme"].limits.concurrent == 5 and await status(B) == 401
        path.write_text("- {name: acme, keys: [sk-x]}")
        assert (await rig.admin("/reload", "POST")).status == 200  # reads the file, too
        assert await status({"Authorization": "Bearer sk-x"}) == 200
        path.write_text("nobody")
        assert (await rig.admin("/reload", "POST")).status == 400
        assert await status({"Authorization": "Bearer sk-x"}) == 200

    with pytest.raises(AssertionError, match="names must differ; twice: acme"):  # logged once, as an error
        with_router(scenario, tenants={"salt_secret": SECRET, "file": str(path), "interval_s": 0.02})


def test_a_tenant_that_is_taken_out_keeps_what_it_began(tmp_path: Path) -> None:
    async def scenario(rig: RouterRig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(REST)]
        client = await rig.client()
        await client.post(CHAT_STREAM, **B)
        assert (await client.head()).status == 200
        await rig.reload(rig.entry(0), tenants=tenants({"name": "acme", "keys": ["sk-a"]}))
        book = rig.router.fleet.tenants
        assert book.quotas["bolt"].in_flight == 1 and (await rig.ask(CHAT, **B)).status == 401
        gate.set()
        while await client.chunk():
            pass
        await until(lambda: book.quotas["bolt"].in_flight == 0)
        await rig.reload(rig.entry(0), tenants=tenants({"name": "acme", "keys": ["sk-a"]}))
        assert list(book.quotas) == list(rig.router.counters.tenants) == ["public", "acme"]
        rig.replica.default = [Send(sized(b"{}"))]
        await rig.reload(rig.entry(0), tenants=None)
        assert (await rig.ask(CHAT)).status == 200 and not book.quotas
        assert (await rig.admin("/fleet")).json()["tenants"] == []

    with_router(scenario, tenants=tenants())


def parsed(**keys: Any) -> RouterConfig:
    config = parse_config({"replicas": [{"url": "http://h:1"}]} | keys, "router.yaml")
    read_tenants(config)
    return config


def test_keys_of_tenants_come_from_the_environment_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_KEY", "sk-env")
    (tmp_path / "key").write_text("sk-file\n")
    keys = ["${ACME_KEY}", {"file": str(tmp_path / "key")}, {"key": "sk-batch", "priority": 5}]
    config = parsed(tenants=tenants({"name": "acme", "keys": keys}))
    assert config.tenants is not None
    found = [(one.key.get_secret_value(), one.priority) for one in config.tenants.members[0].keys]
    assert found == [("sk-env", 0), ("sk-file", 0), ("sk-batch", 5)]
    assert "sk-" not in config.model_dump_json() and SECRET not in config.model_dump_json()


MEMBER = {"name": "acme", "keys": ["sk-secret"]}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tenants": {"salt_secret": "sk-secret", "members": [MEMBER]}}, "at least 16 characters"),
        ({"tenants": {"salt_secret": SECRET}}, "expected file or members"),
        ({"tenants": {"members": [MEMBER]}}, "tenants.salt_secret: Field required"),
        ({"tenants": tenants(MEMBER, MEMBER)}, "names must differ; twice: acme"),
        ({"tenants": tenants(MEMBER, {**MEMBER, "name": "b"})}, "acme and b have the same key"),
        ({"tenants": tenants({**MEMBER, "name": "public"})}, "the name public is taken"),
        ({"tenants": tenants({**MEMBER, "name": "a b"})}, "tenants.members.0.name"),
        ({"tenants": tenants({**MEMBER, "weight": 0})}, "tenants.members.0.weight"),
        ({"tenants": tenants({**MEMBER, "limits": {"concurrent": 0}})}, "limits.concurrent"),
        ({"tenants": tenants({**MEMBER, "limits": {"requests": 1}})}, "unknown key"),
        ({"tenants": tenants({**MEMBER, "keys": ["sk-secret two"]})}, "tenants.members.0.keys.0.key"),
        ({"tenants": tenants(MEMBER), "keys": {"admin": ["sk-secret"]}}, "keys.public or keys.admin"),
        ({"tenants": tenants(file="/nowhere/t.yaml")}, "/nowhere/t.yaml cannot be read"),
    ],
)
def test_what_is_wrong_with_tenants_is_said_without_a_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**keys)
    assert says in str(caught.value) and "sk-secret" not in str(caught.value)
    assert "router.yaml" in str(caught.value) or "tenants" in str(caught.value)
