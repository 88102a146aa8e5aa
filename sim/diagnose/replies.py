"""What replicas answered, read from the next turn: engines keep the KV of their answers, too."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from sim.diagnose.prompt_doc import PromptDoc, Segment

HIDDEN_TIMES = 1.5
HIDDEN_BYTES = 64
"""An answer that was longer than what stands in the next turn by more than this lost its reasoning on the
way: what follows there was never computed behind this prompt."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one prompt."""

    text: bytes
    """As the next turn's canonical text has it, with its label."""
    later: int
    """Number of the prompt it was read from."""


def replies(docs: Sequence[PromptDoc]) -> list[Reply | None]:
    """Per prompt, in order of arrival; ``None`` where no later prompt goes on from it, or not from all of it.

    Cost: one hash over every prompt.

    >>> from sim.diagnose.prompt_doc import prompt_doc
    >>> ask, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    >>> made = replies([prompt_doc({"messages": said}) for said in ([ask], [ask, answer, ask])])
    >>> made[0], made[1]
    (Reply(text=b'\\x1eassistant\\x1fassistant', later=1), None)
    """
    found: list[Reply | None] = [None] * len(docs)
    open_prompts: dict[bytes, int] = {}
    for number, doc in enumerate(docs):
        digest = blake2b(doc.name_space, digest_size=16)
        for place, segment in enumerate(doc.segments):
            if segment.role == "assistant":
                asked = open_prompts.pop(digest.digest(), None)
                text = _whole(doc.segments[place:])
                if asked is not None and _reusable(text, docs[asked].answer_bytes):
                    found[asked] = Reply(text, number)
            digest.update(segment.text)
        open_prompts[digest.digest()] = number
    return found


def _whole(segments: Sequence[Segment]) -> bytes:
    """A message with its fields, such as tool calls."""
    text = segments[0].text
    for segment in segments[1:]:
        if not segment.text.startswith(b"\x1d"):
            break
        text += segment.text
    return text


def _reusable(reply: bytes, answer_bytes: float | None) -> bool:
    return answer_bytes is None or answer_bytes <= HIDDEN_TIMES * len(reply) + HIDDEN_BYTES
