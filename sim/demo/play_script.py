"""Plays a script: every conversation in a task of its own, each turn sent when the last was answered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sim.demo.conversation_script import Conversation
from sim.replay_client import Answer

Message = dict[str, str]
Ask = Callable[[Sequence[Message]], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of the script and what became of it."""

    conversation: str
    turn: int
    in_burst: bool
    sent_at_s: float
    """Since the script began."""
    messages: tuple[Message, ...]
    answer: Answer


async def play(
    script: Sequence[Conversation], unit_s: float, ask: Ask, done: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Play ``script`` through ``ask``; ``done`` sees each record as it comes. In the order they were sent.

    ``unit_s`` is what one of the script's units of time lasts, in seconds.

    A conversation ends at its first error: its user has no answer to go on from.
    """
    began_at = time.monotonic()
    records: list[RequestRecord] = []

    def note(record: RequestRecord) -> None:
        records.append(record)
        done(record)

    async with asyncio.TaskGroup() as tasks:
        for conversation in script:
            tasks.create_task(_converse(conversation, unit_s, ask, note, began_at), name=conversation.name)
    return sorted(records, key=lambda record: record.sent_at_s)


async def _converse(
    conversation: Conversation,
    unit_s: float,
    ask: Ask,
    note: Callable[[RequestRecord], None],
    began_at: float,
) -> None:
    await asyncio.sleep(conversation.starts_at * unit_s)
    messages: list[Message] = [{"role": "system", "content": conversation.system}]
    for turn, (think, says) in enumerate(zip(conversation.think, conversation.turns, strict=True), 1):
        await asyncio.sleep(think * unit_s)
        messages.append({"role": "user", "content": says})
        sent_at = time.monotonic()
        answer = await ask(messages)
        note(
            RequestRecord(
                conversation=conversation.name,
                turn=turn,
                in_burst=conversation.in_burst,
                sent_at_s=sent_at - began_at,
                messages=tuple(messages),
                answer=answer,
            )
        )
        if answer.error is not None:
            return
        messages.append({"role": "assistant", "content": answer.text})
