"""One tenant tries to tell what another has cached: times, usage and headers of its own requests."""

import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

from router.config import parse_config
from router.proxy.assembly import Router
from tests.fakes.raw_client import RawClient
from tests.replica.serving import replica

SALT_KEY = "a key that routers and replicas share".replace(" ", "-")
TENANTS = {
    "salt_secret": "a secret of the routers alone".replace(" ", "-"),
    "salt_signing_key": SALT_KEY,
    "members": [{"name": name, "keys": [f"sk-{name}"]} for name in ("victim", "prober")],
}
PROMPT_CHARACTERS = 1_000
"""Some 1,100 tokens of the tiny model: 20 ms cold, 3 ms cached on one busy core."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What one request showed its sender."""

    ttft_s: float
    """To the end of an answer of one token."""
    cached_tokens: int
    replica: str
    reason: str
    matched_tokens: int


class Fleet:
    """A whole router in front of real replicas, and clients of it."""

    def __init__(self, router: Router, urls: Sequence[str]) -> None:
        self.router = router
        self.urls = urls
        self._clients: dict[str, RawClient] = {}
        self._rng = random.Random(1)

    def text(self) -> str:
        """A prompt nobody has sent."""
        return "".join(self._rng.choices("abcdefgh ", k=PROMPT_CHARACTERS))

    async def ask(self, tenant: str, text: str) -> Probe:
        """Send ``text`` as ``tenant``, streamed, on its one connection."""
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = await RawClient.connect(self.router.data_plane.address)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.perf_counter()
        await client.post(body, authorization=f"Bearer sk-{tenant}")
        answer = await client.answer()
        took_s = time.perf_counter() - begin
        assert answer.status == 200, answer.body
        (usage,) = (
            found["usage"]
            for line in answer.body.decode().split("\n")
            if line.startswith("data: {") and (found := json.loads(line[6:])).get("usage")
        )
        return Probe(
            took_s,
            usage["prompt_tokens_details"]["cached_tokens"],
            str(answer.field("x-warmroute-replica")),
            str(answer.field("x-warmroute-reason")),
            int(answer.field("x-warmroute-matched-tokens") or -1),
        )


@asynccontextmanager
async def fleet(replicas: int, **settings: Any) -> AsyncIterator[Fleet]:
    """As many replicas of the tiny model, which take only salts that the router signed, behind one router."""
    salts = {"accept": "signed", "key": SALT_KEY}
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(replica(kv_tokens=131_072, cache_salt=salts, **settings))
            for _ in range(replicas)
        ]
        urls = [one.url for one in running]
        config = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "replicas": [{"url": url, "name": f"r{number}"} for number, url in enumerate(urls)],
            "expose_routing": True,
            "tenants": TENANTS,
            "seed": 1,
        }
        router = Router(parse_config(config, "test"))
        await router.start()
        try:
            yield Fleet(router, urls)
        finally:
            await router.stop()


@dataclass(slots=True)
class Probes:
    """What was found, in the same order."""

    own: list[Probe]
    """The victim's second request with each of its prompts."""
    known: list[Probe]
    """The prober's with the same prompts."""
    fresh: list[Probe]
    """The prober's with prompts that nobody has sent."""
    homes: list[str]
    """Where the victim's first requests went."""


async def probed(rig: Fleet, prober: str, pairs: int) -> Probes:
    """Known and fresh prompts take turns in random order: a machine that is busy for a while slows both."""
    rng, found = random.Random(2), Probes([], [], [], [])
    await rig.ask(prober, rig.text())  # warm connections and code
    for _ in range(pairs):
        secret = rig.text()
        found.homes.append((await rig.ask("victim", secret)).replica)
        found.own.append(await rig.ask("victim", secret))
        pair = [(found.known, secret), (found.fresh, rig.text())]
        rng.shuffle(pair)
        for seen, text in pair:
            seen.append(await rig.ask(prober, text))
    return found


def rank_z(one: Sequence[Probe], other: Sequence[Probe]) -> float:
    """How far apart two samples of times are by rank (Mann-Whitney), in standard deviations of alike ones."""
    less = sum((a.ttft_s < b.ttft_s) + 0.5 * (a.ttft_s == b.ttft_s) for a in one for b in other)
    count = len(one) * len(other)
    return (less - count / 2) / sqrt(count * (len(one) + len(other) + 1) / 12)
