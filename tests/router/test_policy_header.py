"""``x-warmroute-policy``: a request asks for another policy, if the config lets it."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.config import parse_config
from router.config_errors import ConfigError
from tests.fakes.fake_replica import Hang, Send, sized
from tests.fakes.proxy_rig import CHAT, until
from tests.fakes.router_rig import RouterRig, with_router

POLICY = {"kind": "predicted_finish", "selectable": ["round_robin", "session", "predicted_finish"]}
WARM = {**CHAT, "messages": [{"role": "user", "content": "hello " * 2_000}]}
ASK = "X_Warmroute_Policy"


def run(scenario: Callable[[RouterRig], Awaitable[None]], **keys: Any) -> None:
    with_router(scenario, replicas=3, expose_routing=True, **{"policy": POLICY, **keys})


async def reason(rig: RouterRig, **fields: str) -> tuple[str | None, str | None]:
    answer = await rig.ask(WARM, **fields)
    assert answer.status == 200
    return answer.field("x-warmroute-reason"), answer.field("x-warmroute-replica")


def test_an_allowed_policy_chooses_and_the_header_stays_here() -> None:
    async def scenario(rig: RouterRig) -> None:
        await reason(rig)
        home = await reason(rig)
        assert home[0] == "warm"
        turns = [await reason(rig, **{ASK: "round_robin"}) for _ in range(3)]
        assert {turn[0] for turn in turns} == {"balanced"}
        assert {turn[1] for turn in turns} == {"r0", "r1", "r2"}
        assert (await reason(rig, X_Session_Id="s", **{ASK: "session"}))[0] == "session"
        for replica in rig.replicas:
            assert not any(b"warmroute-policy" in one.raw_head.lower() for one in replica.requests)

    run(scenario)


@pytest.mark.parametrize("asked", ["random", "nonsense", "", "predicted_finish", "round_robin, session"])
def test_any_other_is_ignored(asked: str) -> None:
    async def scenario(rig: RouterRig) -> None:
        first = await reason(rig, **{ASK: asked})
        assert first[0] == "cold"
        assert {await reason(rig, **{ASK: asked}) for _ in range(4)} == {("warm", first[1])}

    run(scenario)


def test_nothing_may_be_asked_for_unless_configured() -> None:
    async def scenario(rig: RouterRig) -> None:
        first = await reason(rig)
        assert {await reason(rig, **{ASK: "round_robin"}) for _ in range(4)} == {("warm", first[1])}
        await rig.reload(*(rig.entry(number) for number in range(3)), policy=POLICY)
        assert len({(await reason(rig, **{ASK: "round_robin"}))[1] for _ in range(3)}) == 3

    run(scenario, policy={"kind": "predicted_finish"})


def test_a_retry_follows_it_too() -> None:
    async def scenario(rig: RouterRig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(sized(b"{}", 500, "No"))]
        answer = await rig.ask(WARM, **{ASK: "round_robin"})
        assert answer.status == 500
        assert [len(replica.requests) for replica in rig.replicas] == [1, 1, 1]

    run(scenario)


def test_what_another_policy_chose_is_sent_at_once() -> None:
    async def scenario(rig: RouterRig) -> None:
        for replica in rig.replicas:
            replica.default = [Hang()]
        clients = [await rig.client() for _ in range(6)]
        for client in clients[:3]:
            await client.post(WARM)
        for client in clients[3:]:
            await client.post(WARM, **{ASK: "round_robin"})
        await until(lambda: sum(replica.answering for replica in rig.replicas) + rig.router.fleet.held == 6)
        assert rig.router.fleet.held <= 2
        assert all(replica.answering for replica in rig.replicas)

    run(scenario)


def test_explain_follows_it() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.ask(WARM)
        await rig.ask(WARM)
        body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
        told = (await rig.admin("/explain", "POST", body, **{ASK: "round_robin"})).json()
        assert told["reason"] == "balanced"

    run(scenario)


def test_a_kind_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"policy\.selectable\.1"):
        parse_config(
            {"replicas": [{"url": "http://h:1"}], "policy": {"selectable": ["random", "fastest"]}}, "x"
        )
