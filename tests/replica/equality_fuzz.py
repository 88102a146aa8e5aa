"""``make fuzz``: random traffic, both caches, all options: the tokens of a fresh engine without cache.

Prompts share prefixes, repeat, carry salts, adapters, images and priorities, all of which change what a reply
must be (``told_apart``); requests are aborted; pools are so small that requests are preempted. After every
step the invariants hold, at the end no block is held and a reset leaves nothing.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replica.contract.multimodal import MultimodalItem
from replica.contract.prefill_cost import PrefillCost
from replica.engine import Engine
from replica.engine_limits import TierLimits
from replica.kv_cache.cache_settings import CacheSettings
from replica.kv_cache.tier_transport import PeerOffer
from replica.peers.peer_limits import PeerLimits
from replica.request import Request
from tests.replica.models import finish_all, greedy_request, make_engine, random_model, token_ids
from tests.replica.peer_rig import FAULTS, SECRET, LendingPeer
from tests.replica.told_apart import Mark, told_apart

MOST_TOKENS = 12
PROMPTS = 50
"""A small set, so that whole prompts come back and what is right is computed once for each."""
IMAGE_AT, IMAGE_TOKENS = 21, 14
"""Of a stem, stood for by ``PLACEHOLDER``: in blocks 1 and 2 of 16."""
PLACEHOLDER = 9

IDENTITIES = ((None, None), ("a", None), (None, "a"), ("a", "a"), ("b", None))
"""Salt and adapter of a request. The first are each a stem's own, which most requests over it have."""
IMAGES = (None, "cat", "dog", None)
"""Each the own of a stem."""
OWN = 0.8
"""Of a stem's requests and prompts, so many have its own identity and image; else they would hit nothing."""
TREE = CacheSettings("radix", 1)
BLOCK = 16 * 512
"""Bytes of KV of 16 tokens of the tiny model."""
INT8_BLOCK = 16 * 160
"""The same in 8 bits, with the scales."""
DEAR = PrefillCost(1.0, 1.0)
"""Whatever can be fetched is."""
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks, tiny pool": {"kv_blocks": 10},
    "blocks of 4, small chunks": {"kv_blocks": 60, "block_size": 4, "max_batched_tokens": 40},
    "blocks, longest prefix first": {
        "kv_blocks": 30,
        "longest_prefix_first": True,
        "max_overtaken": 3,
        "max_chunk_tokens": 16,
        "max_batched_tokens": 48,
    },
    "blocks, pins": {"kv_blocks": 20, "pinned_tokens": 96, "max_running": 5},
    "blocks, each its own prefill": {"kv_blocks": 40, "shares_prefills": False},
    "no cache": {"kv_blocks": 24, "prefix_caching": False},
    "tree, tiny pool": {"kv_blocks": 10, "cache": TREE},
    "tree, pins, longest prefix first": {
        "kv_blocks": 16,
        "cache": replace(TREE, eviction="slru"),
        "pinned_tokens": 64,
        "longest_prefix_first": True,
        "max_chunk_tokens": 24,
    },
    "tree of 4, lfu": {"kv_blocks": 20, "cache": CacheSettings("radix", 4, "lfu")},
    "blocks over host": {"kv_blocks": 12, "tiers": TierLimits(24 * BLOCK, prefill=DEAR)},
    "blocks over host and disk": {
        "kv_blocks": 12,
        "tiers": TierLimits(6 * BLOCK, Path(), 200 * BLOCK, prefill=DEAR),
        "longest_prefix_first": True,
    },
    "tree over disk": {
        "kv_blocks": 14,
        "cache": TREE,
        "tiers": TierLimits(0, Path(), 30 * BLOCK, prefill=DEAR),
    },
    "tree of 4 over host and disk": {
        "kv_blocks": 12,
        "cache": CacheSettings("radix", 4, "slru"),
        "tiers": TierLimits(4 * BLOCK, Path(), 60 * BLOCK, 40_000 * BLOCK, DEAR),
        "pinned_tokens": 48,
    },
    "blocks and peers that fail": {
        "kv_blocks": 24,
        "tiers": TierLimits(6 * BLOCK, prefill=PrefillCost(0.05, 3e-3), peers=PeerLimits(SECRET)),
    },
    "tree and peers that fail": {
        "kv_blocks": 28,
        "cache": CacheSettings("radix", 4, "slru"),
        "tiers": TierLimits(prefill=PrefillCost(0.05, 3e-3), peers=PeerLimits(SECRET)),
    },
    "int8 KV, blocks over host": {
        "kv_blocks": 12,
        "kv_int8": True,
        "tiers": TierLimits(24 * INT8_BLOCK, prefill=DEAR),
    },
    "int8 KV, tree": {"kv_blocks": 14, "kv_int8": True, "cache": TREE, "max_chunk_tokens": 24},
    "hybrid, blocks, tiny pool": {"model": "tiny-hybrid", "kv_blocks": 10, "state_slots": 5},
    "hybrid, blocks of 4, chunks": {
        "model": "tiny-hybrid",
        "kv_blocks": 60,
        "block_size": 4,
        "max_batched_tokens": 40,
        "state_slots": 60,
    },
    "hybrid, tree": {"model": "tiny-hybrid", "kv_blocks": 16, "cache": TREE, "max_running": 6},
    "tree of 16, tlru": {"kv_blocks": 16, "cache": CacheSettings("radix", 16, "tlru", 32)},
}
"""Engines that must not differ in a token."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and the images that some of them stand for."""

    stem: int
    tokens: tuple[int, ...]
    images: tuple[MultimodalItem, ...]


Known = dict[tuple[str | bool | Prompt | None, ...], list[int]]
"""Right answers by model, whether KV has 8 bits, salt, adapter and prompt."""


class Fuzz:
    """Traffic from one seed."""

    def __init__(self, seed: int, known: Known) -> None:
        """``known``: right answers by prompt, filled as they are needed."""
        self.chance = random.Random(seed)
        self._stems = [self._stem() for _ in IMAGES]
        self._prompts = [self._prompt() for _ in range(PROMPTS)]
        self._known = known
        self._asked: dict[str, tuple[Request, Prompt]] = {}
        self._marks: dict[str, Mark] = {}
        self.sources: list[PeerOffer] = []
        """Peers that requests may name."""
        self._kv_int8 = False
        self._model = "tiny"
        self.cached_tokens = self.aborted = 0
        self.adapter_cached_tokens = self.images_cached = 0
        """Of requests with an adapter; images whose last block was hit."""

    def run(self, engine: Engine, count: int) -> None:
        """``count`` requests; AssertionError at the first wrong token or broken invariant."""
        chance = self.chance
        told_apart(engine, self._marks)
        self._kv_int8 = engine.limits.kv_int8
        self._model = "tiny" if engine.states is None else "tiny-hybrid"
        got: dict[str, list[int]] = {}
        unfinished: list[str] = []
        while len(got) < count or engine.has_work:
            if len(got) < count and chance.random() < 0.5:
                request = self._request(f"r{len(got)}")
                got[request.request_id] = []
                unfinished.append(request.request_id)
                engine.add(request)
            if unfinished and chance.random() < 0.03:
                name = unfinished.pop(chance.randrange(len(unfinished)))
                engine.abort(name)
                self._check(name, got[name], whole=False)
                self.aborted += 1
            for delta in engine.step():
                assert delta.error is None, delta.error
                got[delta.request_id] += [drawn.token for drawn in delta.tokens]
                if delta.finish_reason is not None:
                    unfinished.remove(delta.request_id)
                    self._count_hit(delta.request_id, delta.cached_tokens)
                    self._check(delta.request_id, got[delta.request_id], whole=True)
            engine.check_invariants()
        assert not unfinished, "a request was forgotten"
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.kv_usage == 0.0 or engine.limits.pinned_tokens
        assert engine.reset_prefix_cache()
        engine.check_invariants()
        assert engine.load().kv_usage == 0.0 == engine.stranded_tokens()
        assert engine.states is None or engine.states.inventory().free == engine.states.slots

    @contextmanager
    def peers_for(self, settings: dict[str, Any]) -> Iterator[None]:
        """While it lasts: a peer that has every prompt, behind links that work and links that do not."""
        tiers = settings.get("tiers")
        if tiers is None or tiers.peers is None:
            yield
            return
        faults = (*("none",) * 20, *FAULTS * 3, *("flipped",) * 8)
        with LendingPeer(self._lender(), faults) as peer:
            self.sources = [peer.offer(link) for link in range(len(faults))]
            yield

    def _lender(self) -> Engine:
        limits = TierLimits(peers=PeerLimits(SECRET))
        lender = make_engine(kv_blocks=3_000, batch_invariant=True, max_model_len=1024, tiers=limits)
        marks: dict[str, Mark] = {}
        told_apart(lender, marks)
        warm = []
        for prompt in self._prompts:
            for salt, adapter in IDENTITIES:
                request = greedy_request(f"warm {len(warm)}", prompt.tokens, 1)
                marks[request.request_id] = Mark(adapter, prompt.images)
                warm.append(replace(request, salt=salt))
        finish_all(lender, warm)
        return lender

    def _request(self, name: str) -> Request:
        chance = self.chance
        prompt = chance.choice(self._prompts)
        salt, adapter = IDENTITIES[prompt.stem] if chance.random() < OWN else chance.choice(IDENTITIES)
        request = replace(
            greedy_request(name, prompt.tokens, chance.choice((1, 4, MOST_TOKENS))),
            salt=salt,
            priority=chance.choice((0, 0, 1)),
            source=chance.choice(self.sources) if self.sources else None,
        )
        self._marks[name] = Mark(adapter, prompt.images)
        self._asked[name] = request, prompt
        return request

    def _count_hit(self, name: str, cached_tokens: int) -> None:
        self.cached_tokens += cached_tokens
        mark = self._marks[name]
        if mark.adapter is not None:
            self.adapter_cached_tokens += cached_tokens
        self.images_cached += any(item.offset + item.tokens <= cached_tokens for item in mark.images)

    def _check(self, name: str, tokens: list[int], *, whole: bool) -> None:
        (request, prompt), mark = self._asked[name], self._marks[name]
        key = (self._model, self._kv_int8, request.salt, mark.adapter, prompt)
        if key not in self._known:
            alone = make_engine(
                random_model(self._model),
                prefix_caching=False,
                batch_invariant=True,
                max_model_len=160,
                kv_int8=self._kv_int8,
            )
            asked = replace(greedy_request("a", prompt.tokens, MOST_TOKENS), salt=request.salt)
            answer = finish_all(told_apart(alone, {"a": mark}), [asked])["a"]
            self._known[key] = token_ids(answer)
        length = request.max_tokens if whole else len(tokens)
        assert tokens == self._known[key][:length], f"{name} has another's tokens"

    def _stem(self) -> tuple[int, ...]:
        after = 100 - IMAGE_AT - IMAGE_TOKENS
        return self._tokens(IMAGE_AT) + (PLACEHOLDER,) * IMAGE_TOKENS + self._tokens(after)

    def _prompt(self) -> Prompt:
        """The beginning of a stem and something new; what stands for an image may be text, too."""
        chance = self.chance
        stem, shared = chance.randrange(len(IMAGES)), chance.randrange(100)
        image = IMAGES[stem] if chance.random() < OWN else chance.choice(IMAGES)
        whole = image is not None and shared >= IMAGE_AT + IMAGE_TOKENS
        images = (MultimodalItem(str(image), IMAGE_AT, IMAGE_TOKENS),) if whole else ()
        return Prompt(stem, self._stems[stem][:shared] + self._tokens(7), images)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.randrange(256) for _ in range(count))


def engine_for(settings: dict[str, Any], folder: Path) -> Engine:
    """An engine whose logits do not depend on what else is in a step; ``folder`` is for its disk tier."""
    tiers = settings.get("tiers")
    if tiers is not None and tiers.disk_bytes:
        settings = settings | {"tiers": replace(tiers, disk_folder=folder)}
    limits = {"batch_invariant": True, "max_model_len": 150} | settings
    return make_engine(random_model(limits.pop("model", "tiny")), **limits)


def main() -> int:
    """Rounds over all engines, a new seed each, until there were enough requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    done, seed, started = 0, args.seed, time.monotonic()
    while done < args.requests:
        known: Known = {}
        for name, settings in SETTINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                fuzz, engine = Fuzz(seed, known), engine_for(settings, Path(folder))
                try:
                    with fuzz.peers_for(settings):
                        fuzz.run(engine, 200)
                except AssertionError as error:
                    print(f"seed {seed}, {name}: {error or type(error).__name__}", file=sys.stderr)
                    raise
                engine.close()
            done += 200
        print(f"{done} requests, seed {seed}, {time.monotonic() - started:.0f} s", flush=True)
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
