"""A made-up trace as the replicas see it: its prompts' own tokens, in blocks of the replicas' size."""

from collections.abc import Sequence
from dataclasses import replace

import aiohttp

from sim.demo.processes import ChildError
from sim.workload.text_sessions import Message
from sim.workload.trace import Trace


class BlockChain:
    """Names each block of tokens together with everything before it.

    >>> chain = BlockChain(block_tokens=2)
    >>> chain.ids([5, 6, 7, 8, 9]), chain.ids([5, 6, 7, 7]), chain.ids([7, 8])
    ((0, 1), (0, 2), (3,))
    >>> chain.unlike_any(2)
    (4, 5)
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self._named = 0

    def ids(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Of the full blocks of ``tokens``."""
        size, parent = self._block_tokens, None
        made: list[int] = []
        for start in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[start : start + size]))
            name = self._names.get(key)
            if name is None:
                (name,) = self.unlike_any(1)
                self._names[key] = name
            made.append(name)
            parent = name
        return tuple(made)

    def unlike_any(self, count: int) -> tuple[int, ...]:
        """Names of ``count`` blocks that are like no other."""
        first = self._named
        self._named += count
        return tuple(range(first, self._named))


async def tokens_of(url: str, prompts: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Each prompt's token ids, as the replica at ``url`` renders them (``/tokenize``). Raises ChildError."""
    made = []
    async with aiohttp.ClientSession() as session:
        for messages in prompts:
            async with session.post(url + "/tokenize", json={"messages": list(messages)}) as answer:
                if answer.status != 200:
                    raise ChildError(f"{url}/tokenize: status {answer.status}: {await answer.text()}")
                made.append((await answer.json())["tokens"])
    return made


def exact_trace(trace: Trace, tokens: Sequence[Sequence[int]], block_tokens: int) -> Trace:
    """``trace``, timed, with what its prompts became: ``tokens`` by position.

    The blocks that a reply fills have names, too: a replica keeps them as long as others, though nobody asks
    for them again.
    """
    chain = BlockChain(block_tokens)
    made = []
    for request, ids in zip(trace.requests, tokens, strict=True):
        filled = _filled_blocks(len(ids), request.output_tokens, block_tokens)
        made.append(
            replace(
                request,
                prompt_tokens=len(ids),
                block_ids=chain.ids(ids),
                output_block_ids=chain.unlike_any(filled),
            )
        )
    return Trace(trace.name, block_tokens, tuple(made))


def _filled_blocks(prompt_tokens: int, output_tokens: int, block_tokens: int) -> int:
    """By a reply; its last token is told and not computed."""
    return (prompt_tokens + output_tokens - 1) // block_tokens - prompt_tokens // block_tokens
