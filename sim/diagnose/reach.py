"""How far each prompt agrees with an earlier one, byte by byte, and where it parts from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from sim.diagnose.prefix_set import PrefixSet
from sim.diagnose.prompt_doc import PromptDoc
from sim.diagnose.replies import replies


@dataclass(frozen=True, slots=True)
class Reach:
    """One prompt against all before it of the same model and salt."""

    own_bytes: int
    """Of the request's own text, in common with the most similar earlier prompt."""
    at: int
    """Where they part: a byte of the whole text, dropped parts included."""
    earlier: int | None
    """Number of that prompt; ``None`` if nothing was in common."""


def reaches(docs: Sequence[PromptDoc]) -> list[Reach]:
    """Per prompt; ``docs`` are in order of arrival, and numbered so. What was answered is kept, too.

    Cost: ``log n`` comparisons of memory per prompt; all texts are held at once.
    """
    known: dict[bytes, PrefixSet] = {}
    made = []
    for number, (doc, reply) in enumerate(zip(docs, replies(docs), strict=True)):
        text = doc.text
        stored = text if reply is None else text + reply.text
        common, earlier = known.setdefault(doc.name_space, PrefixSet()).add(text, number, stored)
        made.append(Reach(doc.own_prefix(common), common, earlier if common else None))
    return made
