"""Router, prefill pool and decode pool, all real: the decode replica pulls, and its tokens are the same."""

import asyncio
from typing import Any

from router.config import parse_config
from router.proxy.counters import Counters
from router.proxy.data_plane import DataPlane
from router.proxy.fleet_config import make_fleet
from tests.replica.serving import Running, gauge, post, replica, stream

SECRET, ROUTER_KEY = "between-replicas", "of-the-router"
PEERS = {
    "batch_invariant": True,
    "tiers": {
        "prefill_us_per_token": 50_000,
        "peers": {"secret": SECRET, "router_key": ROUTER_KEY, "listen": "127.0.0.1:0"},
    },
}
PULLS = {"kv_pull": "warmroute", "transfer": {"fixed_ms": 0, "us_per_token": 0.01}}
"""However fast this machine computes a prompt, moving it is said to be quicker."""


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def router(replicas: list[tuple[Running, dict[str, Any]]]) -> DataPlane:
    listed = []
    for number, (one, keys) in enumerate(replicas):
        assert one.peers is not None
        listed.append({"url": one.url, "name": f"r{number}", "kv_source": one.peers.address} | keys)
    config = parse_config(
        {
            "listen": "127.0.0.1:0",
            "replicas": listed,
            "kv_source_key": ROUTER_KEY,
            "expose_routing": True,
            "seed": 1,
            "cost": {"prefill_us_per_token": 5_000},
        },
        "test",
    )
    fleet = make_fleet(config)
    for one in fleet.replicas:
        fleet.probe_succeeded(one.index, 0.0)
    return DataPlane(fleet, config, Counters())


def test_a_prefill_pool_and_a_decode_pool() -> None:
    async def main() -> None:
        async with replica(**PEERS) as prefill, replica(**PEERS) as decode, replica(**PEERS) as alone:
            pulls = {"role": "decode"} | PULLS
            plane = router([(prefill, {"role": "prefill"}), (decode, pulls)])
            await plane.start()
            url = f"http://{plane.address}/v1/completions"
            asked = body("Once upon a time there was a long prompt. " * 20)
            status, answer = await post(url, asked)
            _, expected = await post(alone.url + "/v1/completions", asked)
            assert status == 200 and answer["choices"] == expected["choices"]
            prompt_tokens = answer["usage"]["prompt_tokens"]
            pulled = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert pulled == (prompt_tokens - 1) // 16 * 16, "all but the last block came from the other pool"
            assert prefill.peers is not None and prefill.peers.counters.blocks == pulled // 16
            assert plane.service.counters.handoffs == 1

            events = await stream(url, body("Another one, streamed. " * 40))
            _, whole = await post(alone.url + "/v1/completions", body("Another one, streamed. " * 40))
            text = "".join(one["choices"][0]["text"] for one in events if one != "[DONE]" and one["choices"])
            assert text == whole["choices"][0]["text"]
            assert plane.service.counters.handoffs == 2

            before = await gauge(prefill.url, "vllm:prompt_tokens_total")
            longer = asked["prompt"] + "And then?"
            _, warm = await post(url, body(longer))
            assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= pulled
            assert await gauge(prefill.url, "vllm:prompt_tokens_total") == before, "straight to decode"
            await plane.stop(1.0)
            assert all(one.in_flight == 0 for one in plane.service.fleet.replicas)

    asyncio.run(main())


def test_the_prefill_pools_peer_port_is_dead() -> None:
    async def main() -> None:
        async with replica(**PEERS) as prefill, replica(**PEERS) as decode:
            assert prefill.peers is not None
            await prefill.peers.stop()
            pulls = {"role": "decode"} | PULLS
            plane = router([(prefill, {"role": "prefill"}), (decode, pulls)])
            await plane.start()
            asked = body("Nobody gives this away. " * 30)
            status, answer = await post(f"http://{plane.address}/v1/completions", asked)
            _, expected = await post(prefill.url + "/v1/completions", asked)
            assert status == 200 and answer["choices"] == expected["choices"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await plane.stop(1.0)

    asyncio.run(main())


def test_without_roles_a_prefix_is_pulled_from_the_replica_that_has_no_room() -> None:
    async def main() -> None:
        async with replica(**PEERS) as first, replica(**PEERS) as second:
            plane = router([(first, PULLS), (second, PULLS)])
            await plane.start()
            url = f"http://{plane.address}/v1/completions"
            asked = body("A prefix that only one replica holds. " * 20)
            _, computed = await post(url, asked)
            fleet = plane.service.fleet
            (home,) = [one for one in fleet.replicas if one.requests]
            home.room_price_s = 1_000.0  # its KV is full
            _, pulled = await post(url, asked)
            assert pulled["choices"] == computed["choices"]
            assert pulled["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert [one.requests for one in fleet.replicas] == [1, 1]
            assert plane.service.counters.kv_sources_named == 1
            await plane.stop(1.0)

    asyncio.run(main())
