"""Tenants: whose key it is, what it may use, and what is told of each."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    Hang,
    Send,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import RouterRig, with_router
from tests.fakes.tenants import SECRET, A, B, code, limited, tenants
from warmroute import main

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
        spelt = (
            "/v1/models/m",
            "/v1/models%2Fm",
            "/v1/%6dodels",
            "/v1/models/",
            "/v1//Models",
            "/v1/models#",
        )
        for path in spelt:  # a replica would list all that it has
            assert code(await rig.get(path, **B)) == (403, "model_not_allowed")
        for adapters in ("other", ["m", "other"], [["m"]], {"m": 1}, 7):
            refused = await rig.ask({**CHAT, "lora_path": adapters}, **A)
            assert code(refused) == (403, "model_not_allowed") and refused.error["param"] == "lora_path"
        crowded = {**CHAT, "lora_path": ["other"], "messages": [{}] * 70_000}
        assert code(await rig.ask(crowded, **A)) == (403, "model_not_allowed")
        assert len(rig.replica.requests) == 1
        assert (await rig.ask({**CHAT, "lora_path": ["m", None]}, **A)).status == 200

    with_router(
        scenario,
        tenants=tenants(
            {"name": "acme", "keys": ["sk-a"], "models": ["m"]},
            {"name": "bolt", "keys": ["sk-b"], "models": ["other"]},
        ),
    )


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
        assert f"limits.{limit}" in answer.error["message"] and answer.error["type"] == "rate_limit_error"
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
