"""Bug cases of the category tenant isolation; B007 is in ``test_tenant_salts``, B119 in ``tests/state``."""

import asyncio
from itertools import product
from math import sqrt
from typing import Any

from replica.contract.cache_salt import derived_salt
from router.routing.block_naming import token_root
from router.routing.prompt_blocks import read_prompt, root_key
from tests.fakes.fake_replica import Hang
from tests.fakes.proxy_rig import Rig, until, with_rig
from tests.fakes.raw_client import RawClient
from tests.replica.serving import post
from tests.router.cases.tenant_prober import fleet, probed, rank_z


def _texts(alphabet: str, most: int) -> list[str]:
    """All texts of up to ``most`` characters."""
    return ["".join(one) for size in range(most + 1) for one in product(alphabet, repeat=size)]


def test_B063_distinct_models_salts_and_adapters_have_distinct_roots() -> None:
    """Parts are framed by their length: no two of 33,000 tuples run together, whatever is in them.

    All that are made of tags, digits and delimiters: drawn at random, two of a kind would hardly meet.
    """
    parts: list[str | None] = [None, *_texts("ms1: ", 2)]
    assert len({root_key(*one) for one in product(parts, repeat=3)}) == len(parts) ** 3
    assert len({token_root(*one) for one in product(parts, repeat=2)}) == len(parts) ** 2
    assert len({root_key(*one) for one in product([None, "", "\0", "\x1f", "a,|"], repeat=3)}) == 125


def test_B063_distinct_tenants_and_users_have_distinct_salts() -> None:
    pairs = list(product(_texts("no1: ", 3), [None, *_texts("no1: ", 3)]))
    salts = {derived_salt(b"k", *pair) for pair in pairs}
    assert len(salts) == len(pairs) and salts.isdisjoint(derived_salt(b"l", *pair) for pair in pairs)


def test_B063_the_known_collisions_do_not_collide() -> None:
    pairs = [(("org_1", "2345"), ("org_12345", "")), (("", "a"), ("a", "")), (("a", None), (None, "a"))]
    for one, other in pairs:
        assert root_key("m", *one) != root_key("m", *other)
    assert derived_salt(b"k", "org_1", "2345") != derived_salt(b"k", "org_12345", "")


def _chat(salt: str | None, words: int = 3_000) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "secret " * words}]}
    return body if salt is None else body | {"cache_salt": salt}


def test_B107_nothing_is_believed_cached_for_another_salt() -> None:
    """T1 warms a prefix; the same words with T2's salt, or without one, match nothing; T1's own match."""

    async def scenario(rig: Rig) -> None:
        first = await rig.ask(_chat("tenant-1"))
        for salt in ("tenant-2", None, ""):
            answer = await rig.ask(_chat(salt))
            assert answer.field("x-warmroute-matched-tokens") == "0"
        again = await rig.ask(_chat("tenant-1"))
        assert int(again.field("x-warmroute-matched-tokens") or 0) > 1_000
        assert again.field("x-warmroute-replica") == first.field("x-warmroute-replica")

    with_rig(
        scenario,
        replicas=2,
        policy={"kind": "prefix_affinity"},
        expose_routing=True,
    )


def test_B107_a_salt_reads_the_same_in_every_endpoint() -> None:
    def keys(body: bytes) -> list[int]:
        return list(read_prompt(body).keys)

    for prompt in (b'"prompt":"' + b"x" * 900 + b'"', b'"input":"' + b"x" * 900 + b'"'):
        salted = keys(b'{"cache_salt":"s",' + prompt + b"}")
        assert salted and not set(salted) & set(keys(b"{" + prompt + b"}"))
        assert not set(salted) & set(keys(b'{"cache_salt":"t",' + prompt + b"}"))


# --- tenants by key -------------------------------------------------------------------------------

KEYS = {name: {"Authorization": f"Bearer sk-{name}"} for name in ("t1", "t2")}
TENANTS = {
    "salt_secret": "0123456789abcdef",
    "members": [{"name": name, "keys": [f"sk-{name}"]} for name in ("t1", "t2")],
}


def test_B107_what_one_tenant_warmed_another_is_not_sent_to() -> None:
    """T1 warms a prefix on A; T2, and whoever names T1's salt, match nothing of it, busy as A may be."""

    async def scenario(rig: Rig) -> None:
        first = await rig.ask(_chat(None), **KEYS["t1"])
        home = int((first.field("x-warmroute-replica") or "")[1:])
        salt = derived_salt(b"0123456789abcdef", "t1")
        for body in (_chat(None), _chat(salt)):
            answer = await rig.ask(body, **KEYS["t2"])
            assert answer.field("x-warmroute-matched-tokens") == "0"
            assert answer.field("x-warmroute-reason") == "cold"
        again = await rig.ask(_chat(None), **KEYS["t1"])
        assert int(again.field("x-warmroute-matched-tokens") or 0) > 1_000
        assert again.field("x-warmroute-replica") == f"r{home}"
        rig.replicas[home].default = [Hang()]
        busy = await rig.client()
        await busy.post(_chat("busy"), **KEYS["t1"])
        await until(lambda: rig.replicas[home].answering == 1)
        for _ in range(6):  # all idle ones alike: nothing draws T2 to A
            answer = await rig.ask(_chat(None, 2_999), **KEYS["t2"])
            assert answer.field("x-warmroute-replica") == f"r{1 - home}"
        busy.leave()

    with_rig(
        scenario,
        replicas=2,
        policy={"kind": "predicted_finish"},
        hold={"enabled": False},
        expose_routing=True,
        tenants=TENANTS,
    )


PAIRS = 40
ALIKE, APART = 4.0, 4.5
"""Standard deviations of the ranks: samples that are alike are further apart once in 16,000 runs; two of 40
with every value of one below all of the other are 7.7 apart."""


def test_B090_nothing_tells_a_tenant_that_anothers_prompt_is_cached() -> None:
    """Times of 40 prompts that the victim has just sent and of 40 that nobody has; our engine, real sockets.

    The positive control, the victim's own second request, shows that a hit would be seen; without a prefix
    cache it is not.
    """

    async def run() -> None:
        async with fleet(2) as rig:
            probes = await probed(rig, "prober", PAIRS)
            known, fresh, own = probes.known, probes.fresh, probes.own
            assert all(one.cached_tokens > 900 and one.reason == "warm" for one in own)
            assert abs(rank_z(own, fresh)) > APART
            assert abs(rank_z(known, fresh)) < ALIKE
            told = {(one.cached_tokens, one.matched_tokens, one.reason) for one in known + fresh}
            assert told == {(0, 0, "cold")}
            drawn = [
                sum(one.replica == home for one, home in zip(seen, probes.homes, strict=True))
                for seen in (known, fresh)
            ]
            assert abs(drawn[0] - drawn[1]) < ALIKE * sqrt(PAIRS / 2), "to where the victim's went"
            await _nothing_else_tells(rig.router.data_plane.address, rig.urls[0])
        async with fleet(1, prefix_caching=False) as rig:
            probes = await probed(rig, "victim", PAIRS // 2)
            assert abs(rank_z(probes.known, probes.fresh)) < ALIKE

    asyncio.run(run())


async def _nothing_else_tells(router: str, replica: str) -> None:
    """What the router knows is not told on the public port, and a replica takes no salt from a client."""
    for path in ("/metrics", "/fleet", "/decisions", "/prefixes", "/v1/../metrics", "/explain"):
        client = await RawClient.connect(router)
        await client.post(b"", path, method="GET", authorization="Bearer sk-prober")
        assert (await client.answer()).status == 404
        client.leave()
    body = {"messages": [{"role": "user", "content": "x"}], "cache_salt": "guessed"}
    status, answer = await post(replica + "/v1/chat/completions", body)
    assert status == 400 and "a router has signed" in answer["error"]["message"]
