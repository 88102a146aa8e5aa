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
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def ids(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Of the full blocks of ``tokens``."""
        size, parent = self._block_tokens, None
        made: list[int] = []
        for start in range(0, len(tokens) - size + 1, size):
            key = (parent, tuple(tokens[start : start + size]))
            parent = self._names.setdefault(key, len(self._names))
            made.append(parent)
        return tuple(made)


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
    """``trace``, timed, with what its prompts became: ``tokens`` by position."""
    chain = BlockChain(block_tokens)
    return Trace(
        trace.name,
        block_tokens,
        tuple(
            replace(request, prompt_tokens=len(ids), block_ids=chain.ids(ids))
            for request, ids in zip(trace.requests, tokens, strict=True)
        ),
    )
