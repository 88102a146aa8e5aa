"""Which beginnings the last prompts have in common. Pure."""

from typing import NamedTuple

from router.routing.prompt_blocks import Prompt

PARTS_BELOW = 0.8
"""A prefix ends where fewer than this share of its prompts go on alike."""


class SharedPrefix(NamedTuple):
    """Some prompts begin with the same blocks."""

    key: int
    """Names them."""
    blocks: int
    prompts: int
    one: Prompt
    """One of them."""


class SharedPrefixes:
    """Counts prompts by every prefix they have.

    Three prompts begin with blocks 1 and 2, two of them go on with 3:

    >>> found = SharedPrefixes()
    >>> for keys in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7]):
    ...     found.add(Prompt(keys=keys, units=1_000))
    >>> [(prefix.key, prefix.blocks, prefix.prompts) for prefix in found.largest(9)]
    [(2, 2, 3), (3, 3, 2)]
    """

    __slots__ = ("_depths", "_prompts", "_seen")

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._depths: dict[int, tuple[int, int | None]] = {}  # blocks, the key before
        self._prompts: dict[int, Prompt] = {}

    def add(self, prompt: Prompt) -> None:
        """One more. Cost: O(its blocks)."""
        before = None
        for depth, key in enumerate(prompt.keys, 1):
            count = self._seen.get(key, 0)
            self._seen[key] = count + 1
            if not count:
                self._depths[key] = depth, before
                self._prompts[key] = prompt
            before = key

    def largest(self, most: int) -> list[SharedPrefix]:
        """At most so many, those first that stand for most blocks asked for: prompts x blocks."""
        follow: dict[int, int] = {}
        for key, count in self._seen.items():
            before = self._depths[key][1]
            if before is not None and count > follow.get(before, 0):
                follow[before] = count
        found = [
            SharedPrefix(key, self._depths[key][0], count, self._prompts[key])
            for key, count in self._seen.items()
            if count > 1 and follow.get(key, 0) < PARTS_BELOW * count
        ]
        found.sort(key=lambda prefix: prefix.prompts * prefix.blocks, reverse=True)
        return found[:most]
