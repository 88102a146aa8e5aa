"""The prompts that were told last, by the batch they went in: who missed batches can be told them again."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from router.routing.peer_events import PeerEvent, PromptStored, WorkSent

MAX_PROMPTS: Final = 2_000
MAX_KEYS: Final = 200_000
"""Of all of them together: 1.8 MB when they are told again."""


class RecentPrompts:
    """Bounded in prompts and in their blocks; the oldest go first.

    >>> recent = RecentPrompts()
    >>> recent.told(7, [PromptStored("r0", [1, 2])]), recent.told(8, [PromptStored("r1", [3])])
    (None, None)
    >>> [prompt.replica for prompt in recent.of_batches(8, 20)], len(recent)
    (['r1'], 2)
    """

    __slots__ = ("_keys", "_prompts")

    def __init__(self) -> None:
        self._prompts: deque[tuple[int, WorkSent | PromptStored]] = deque()
        self._keys = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def told(self, batch: int, events: Iterable[PeerEvent]) -> None:
        """``events`` went into the batch of that number; numbers rise."""
        prompts = self._prompts
        for event in events:
            if isinstance(event, WorkSent | PromptStored) and event.keys:
                prompts.append((batch, event))
                self._keys += len(event.keys)
        while len(prompts) > MAX_PROMPTS or self._keys > MAX_KEYS:
            _, event = prompts.popleft()
            self._keys -= len(event.keys)

    def of_batches(self, first: int, last: int) -> list[PromptStored]:
        """Those of the batches from ``first`` to ``last``, oldest first, as far as they are remembered."""
        return [stored(event) for batch, event in self._prompts if first <= batch <= last]


def stored(event: WorkSent | PromptStored) -> PromptStored:
    """What remains to be told of a prompt that was sent some time ago."""
    if isinstance(event, PromptStored):
        return event
    return PromptStored(event.replica, event.keys, event.naming, event.tenant)
