"""What the replicas' caches are believed to hold: by text, by exact blocks, by what their events tell.

A prompt read as text is looked up in the text index, one read token by token in the exact index. Both learn
from what is sent and what comes back. KV events feed the exact index and, by how much they remove, correct
the text index (``text_bridge``). Sizes cross this border in tokens.
"""

from collections.abc import Iterator, Sequence

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.load_report import LoadReport
from router.routing.block_source import BlockSettings
from router.routing.exact_index import ExactIndex, Expectation
from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import BlockLayout, Prompt, UniformLayout
from router.routing.tenant import Tenant
from router.routing.text_bridge import TextBridge
from router.routing.token_ratio import TokenRatio


class CacheBeliefs:
    """Owned by the fleet, whose events change it."""

    __slots__ = ("_bridge", "_slots", "_use_index", "exact", "layout", "text", "token_ratio")

    def __init__(
        self,
        blocks: Sequence[BlockSettings],
        *,
        layout: BlockLayout,
        tokens_per_unit: float,
        capacity_tokens: int,
        use_index: bool,
        exact: bool,
    ) -> None:
        """One ``blocks`` per replica. ``use_index=False``: nobody is ever believed to hold anything.

        ``exact``: prompts read token by token will come, so the names in events matter.
        """
        self.token_ratio = TokenRatio(tokens_per_unit)
        self.layout = layout
        self.text = PrefixIndex(len(blocks), layout, int(capacity_tokens / tokens_per_unit))
        self.exact = ExactIndex(blocks, capacity_tokens, names_matter=exact)
        self._bridge = TextBridge(self.text, len(blocks))
        self._slots = len(blocks)
        self._use_index = use_index

    def replica_added(self, replica: int, blocks: BlockSettings, capacity_tokens: int) -> None:
        """A replica joined under an index that was freed before, or the next."""
        units = int(capacity_tokens / self.token_ratio.tokens_per_unit)
        if replica == self._slots:
            self._slots += 1
            self.text.add_replica(units)
            self._bridge.add_replica()
            self.exact.add_slot()
        else:
            self.text.set_capacity(replica, units)
        self.exact.replica_added(replica, blocks, capacity_tokens)

    def replica_gone(self, replica: int) -> None:
        """The replica is no longer there: forget all of it."""
        self._bridge.cleared(replica)
        self.exact.replica_gone(replica)

    def capacity_assumed(self, replica: int, capacity_tokens: int) -> None:
        """The replica is taken to hold so many tokens; it has not told."""
        self.text.set_capacity(replica, int(capacity_tokens / self.token_ratio.tokens_per_unit))
        self.exact.set_capacity(replica, capacity_tokens)

    def tokens_per_unit(self, prompt: Prompt) -> float:
        """How many tokens a unit of this prompt's length stands for."""
        if prompt.chains is not None:
            return 1.0
        if prompt.tokens is not None:
            return prompt.tokens / prompt.units
        return self.token_ratio.tokens_per_unit

    def prompt_tokens(self, prompt: Prompt) -> int:
        """How long the prompt is in tokens, as far as that is known."""
        return max(1, int(prompt.units * self.tokens_per_unit(prompt)))

    def levels(self, prompt: Prompt) -> list[tuple[int, int]]:
        """Who holds how many tokens of the prompt: (replicas as bits, tokens), the deepest last."""
        if not self._use_index:
            return []
        if prompt.chains is not None:
            return self.exact.levels(prompt.chains, prompt.units)
        levels = self.text.levels(prompt.keys)
        if levels:
            ratio, layout = self.tokens_per_unit(prompt), prompt.layout
            # The last token is always computed, so a hit is never the whole prompt.
            most = max(0, int(prompt.units * ratio) - 1)
            for place, (mask, blocks) in enumerate(levels):
                levels[place] = mask, min(most, int(layout.end(blocks) * ratio))
        return levels

    def tokens_of(self, prompt: Prompt, blocks: int) -> int:
        """Tokens in the first ``blocks`` blocks of a prompt, as ``levels`` counts them."""
        return int(prompt.layout.end(blocks) * self.tokens_per_unit(prompt))

    def last_key(self, prompt: Prompt, tokens: int) -> int | None:
        """The key of the last block in the first ``tokens`` tokens: a name for that prefix."""
        blocks = self._blocks(prompt, tokens)
        return prompt.keys[blocks - 1] if blocks and prompt.keys else None

    def blocks_found(self, prompt: Prompt, matched_tokens: int) -> int:
        """Leading blocks of a prompt whose match ``matched_tokens`` is: the block whose end is nearest.

        Another router that tells of a match may take a byte for a little more or less of a token.
        """
        keys, layout = prompt.keys, prompt.layout
        units = int(matched_tokens / self.tokens_per_unit(prompt))
        blocks = layout.blocks(units)
        if blocks < len(keys) and 2 * units > layout.end(blocks) + layout.end(blocks + 1):
            blocks += 1
        return min(blocks, len(keys))

    def found(self, replica: int, prompt: Prompt) -> int:
        """Tokens of the prompt that ``replica`` is believed to hold."""
        for mask, tokens in self.levels(prompt):
            if mask >> replica & 1:
                return tokens
        return 0

    def tokens(self, prompt: Prompt, blocks: int) -> int:
        """Tokens in the first ``blocks`` blocks of the prompt."""
        return int(prompt.layout.end(blocks) * self.tokens_per_unit(prompt))

    def _blocks(self, prompt: Prompt, tokens: int) -> int:
        blocks = prompt.layout.blocks(int((tokens + 1) / self.tokens_per_unit(prompt)))
        return min(blocks, len(prompt.keys))

    # --- a request's life -----------------------------------------------------------------------

    def sent(self, replica: int, prompt: Prompt, matched_tokens: int) -> Expectation | None:
        """The prompt's blocks will be there, ``matched_tokens`` of it already are. End what is returned."""
        if self._use_index:
            if prompt.chains is not None:
                return self.exact.sent(replica, prompt.chains, matched_tokens, prompt.tenant)
            if prompt.keys and prompt.units <= self.text.capacity(replica):  # else it cannot be held
                self.text.insert(replica, prompt.keys, prompt.tenant)
        return None

    def computed(self, expectation: Expectation) -> None:
        """The request is over and its prompt was computed."""
        self.exact.over(expectation, computed=True)

    def withdrawn(
        self, replica: int, prompt: Prompt, matched_tokens: int, expectation: Expectation | None
    ) -> None:
        """The request is over and nothing of its prompt was computed."""
        if expectation is not None:
            self.exact.over(expectation, computed=False)
        elif self._use_index and prompt.keys and prompt.chains is None:
            self.text.truncate(replica, prompt.keys, self._blocks(prompt, matched_tokens))

    def cache_lost(self, replica: int, prompt: Prompt) -> bool:
        """The answer to ``prompt`` showed an empty cache: now it holds that prompt and nothing else.

        False, and nothing changed, where events are trusted and none is missing: they know better.
        """
        if prompt.chains is None:
            self._bridge.cleared(replica)
            self.text.insert(replica, prompt.keys, prompt.tenant)
        elif self.exact.seems_empty(replica):
            self.exact.guess(replica, prompt.chains, prompt.tenant)
        else:
            return False
        return True

    # --- what other routers tell ----------------------------------------------------------------

    def named(
        self, replica: int, keys: Sequence[int], naming: str | None, tenant: Tenant | None = None
    ) -> Prompt:
        """A prompt that another router sent to ``replica``, as far as this one needs to know it.

        ``naming`` is the one ``keys`` are in, ``None`` for text; keys in one that is not the replica's say
        nothing here.
        """
        if naming is None:
            prompt = Prompt(keys=keys, units=0, layout=self.layout)
        else:
            own = self.exact.naming(replica)
            known = naming == own.described()
            prompt = Prompt(
                keys=keys if known else (),
                units=0,
                layout=UniformLayout(own.block_tokens),
                chains={own: keys} if known else {},
            )
        prompt.tenant = tenant
        return prompt

    def stored(
        self, replica: int, keys: Sequence[int], naming: str | None, tenant: Tenant | None = None
    ) -> None:
        """Another router tells that ``replica`` has computed this prompt."""
        prompt = self.named(replica, keys, naming)
        if prompt.chains is not None:
            self.exact.guess(replica, prompt.chains, tenant)
        elif self._use_index and keys:
            self.text.insert(replica, keys, tenant)

    def chains(self, replica: int) -> Iterator[tuple[str | None, Sequence[int], str]]:
        """What ``replica`` is believed to hold by what was sent there, the latest last.

        Naming, keys and the namespace of the tenant whose they are.
        """
        for namespace, keys in self.text.chains(replica):
            yield None, keys, namespace
        name = self.exact.naming(replica).described()
        for namespace, keys in self.exact.guesses(replica):
            yield name, keys, namespace

    # --- what is heard of replicas --------------------------------------------------------------

    def unreachable(self, replica: int) -> None:
        """Nobody listens there: its cache is gone with it. (Trusted events will tell of the restart.)"""
        self._bridge.cleared(replica)
        self.exact.seems_empty(replica)

    def reported(self, replica: int, report: LoadReport, *, new_capacity: bool) -> None:
        """The replica's own gauges: how much it holds, in what blocks."""
        if report.capacity_tokens:
            units = int(report.capacity_tokens / self.token_ratio.tokens_per_unit)
            if (
                new_capacity or abs(units - self.text.capacity(replica)) > units // 10
            ):  # tokens per byte moved
                self.text.set_capacity(replica, units)
        if new_capacity and report.capacity_tokens:
            self.exact.set_capacity(replica, report.capacity_tokens)
        self.exact.blocks_reported(replica, report.block_size, report.hash_algorithm)

    def blocks_stored(self, replica: int, event: BlocksStored) -> None:
        """The replica announced blocks."""
        self.exact.stored(replica, event)

    def blocks_removed(self, replica: int, event: BlocksRemoved) -> None:
        """The replica announced what it removed."""
        held_before = self.exact.told.held(replica)
        self.exact.removed(replica, event)
        gone = held_before - self.exact.told.held(replica)  # on the device, whatever the event's medium
        self._bridge.removed(replica, gone, held_before)

    def cache_cleared(self, replica: int) -> None:
        """The replica said that it holds nothing, or it restarted."""
        self._bridge.cleared(replica)
        self.exact.cleared(replica)

    def events_missed(self, replica: int) -> None:
        """Events were lost for good: what they told is guessed. The text index was never built on them."""
        self.exact.missed(replica)
