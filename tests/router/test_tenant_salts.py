"""Cache salts of tenants: what replicas see in bodies and forms, and that no client chooses its own."""

import json
import re
from pathlib import Path

import pytest

from replica.contract.cache_salt import derived_salt, is_signed
from tests.fakes.proxy_rig import CHAT, Rig, with_rig
from tests.fakes.router_rig import RouterRig, with_router
from tests.fakes.tenants import SECRET, A, B, code, salts, tenants
from tests.router.tokenizer_folder import write_folder


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

    with_router(scenario, tenants=tenants(isolation="warn"))


def test_B007_a_body_of_very_many_values_and_one_nested_deeply_lose_their_salts_too() -> None:
    """Which are read in other ways; what cannot be written anew is refused."""
    own = b'{"cache_salt":"victims","extra_body":{"extra_key":"victims"},"model":"m","messages":'

    async def scenario(rig: Rig) -> None:
        crowded = own + b"[%b0]}" % (b"{}," * 70_000)
        assert (await rig.ask(crowded, **A)).status == 200
        (request,) = rig.replica.requests
        assert request.body.count(b"cache_salt") == 1 and b"victims" not in request.body
        assert json.loads(request.body)["messages"][:2] == [{}, {}]
        deep = own + b"[" * 400 + b"]" * 400 + b"}"
        assert code(await rig.ask(deep, **A)) == (400, "body_unreadable")
        assert (await rig.ask(deep.replace(own, b'{"model":"m","messages":'), **A)).status == 200

    with_rig(scenario, tenants=tenants())


@pytest.mark.parametrize("model", ["m", "another"])
def test_B007_a_body_of_very_many_values_has_its_tenants_keys_where_models_are_read_by_token(
    model: str, tmp_path: Path
) -> None:
    """What is read flat is the client's bytes, which the salt is not in."""

    async def scenario(rig: RouterRig) -> None:
        crowded = {"model": "m", "messages": [{"role": "user", "content": "hi"}] * 20_000}
        answers = [await rig.ask(crowded, **key) for key in (A, B, A)]
        known = [int(answer.field("x-warmroute-matched-tokens") or 0) for answer in answers]
        assert known[:2] == [0, 0] and known[2] > 100_000

    with_router(
        scenario,
        tenants=tenants(),
        models={model: {"tokenizer": str(write_folder(tmp_path))}},
        expose_routing=True,
        policy={"kind": "predicted_finish"},
    )
