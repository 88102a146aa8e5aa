"""Where requests of one app first differ: from the one before, and from the most similar of all before."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from replica.contract.block_hash import TOKEN_BYTES, token_bytes
from sim.diagnose.edits import form_of, sentences
from sim.diagnose.masking import masked, snippet
from sim.diagnose.prefix_set import common_prefix
from sim.diagnose.prompt_doc import PromptDoc
from sim.diagnose.prompt_levels import PromptLevels
from sim.diagnose.sample import Sample

EDGES = (1, 16, 64, 256, 1_024, 4_096, 16_384)
"""Buckets of the histogram end before these tokens; the last but one has no end, the last is "nowhere"."""
BUCKETS = (*(f"<{edge}" for edge in EDGES), f"{EDGES[-1]}+", "nowhere")
MOST_APPS = 8
MOST_PLACES = 3
NAME_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Place:
    """A field or message in which requests of an app part from the one before."""

    where: str
    requests: int
    token: int
    """Median offset of the first difference."""
    here: str
    there: str
    """The two texts of one such pair, masked; empty without words."""


@dataclass(frozen=True, slots=True)
class AppDivergence:
    """One app's requests."""

    app: str
    requests: int
    previous: tuple[int, ...]
    """Per bucket, requests whose first difference from the previous request of the app is there."""
    similar: tuple[int, ...]
    """The same against the most similar of all earlier requests."""
    places: tuple[Place, ...]


@dataclass(slots=True)
class _Parting:
    """One request against the one before it."""

    token: int
    whole: bool
    where: str
    here: str = ""
    there: str = ""


def divergence(
    sample: Sample, order: Sequence[int], levels: PromptLevels, counted: Sequence[bool]
) -> list[AppDivergence]:
    """Per app, those with most requests first; what is left over is one more."""
    apps = [
        _app(sample, number, levels.docs[place] if levels.docs else None)
        for place, number in enumerate(order)
    ]
    ranked = [app for app, _ in Counter(apps).most_common()]
    kept = set(ranked if len(ranked) <= MOST_APPS else ranked[: MOST_APPS - 1])
    rest = f"{len(ranked) - len(kept)} more apps"
    partings: dict[str, list[_Parting]] = {}
    similar: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    for place, number in enumerate(order):
        app = apps[place]
        previous = last.get(app)
        last[app] = place
        if not counted[number] or previous is None:
            continue
        name = app if app in kept else rest
        partings.setdefault(name, []).append(_parting(sample, order, levels, place, previous))
        similar.setdefault(name, []).append(_bucket(*_similar(sample, order, levels, place)))
    return [_summed(name, found, similar[name]) for name, found in partings.items()]


def _summed(app: str, found: Sequence[_Parting], similar: Sequence[int]) -> AppDivergence:
    places = []
    for where, requests in Counter(one.where for one in found if not one.whole).most_common(MOST_PLACES):
        here = [one for one in found if one.where == where and not one.whole]
        middle = int(median(one.token for one in here))
        shown = min(here, key=lambda one: abs(one.token - middle))
        places.append(Place(where, requests, middle, shown.here, shown.there))
    previous = [_bucket(one.token, one.whole) for one in found]
    return AppDivergence(app, len(found), _histogram(previous), _histogram(similar), tuple(places))


def _histogram(buckets: Sequence[int]) -> tuple[int, ...]:
    counts = Counter(buckets)
    return tuple(counts[bucket] for bucket in range(len(BUCKETS)))


def _bucket(token: int, whole: bool) -> int:
    """The bucket of a first difference at ``token``; the last one if there is no difference."""
    if whole:
        return len(BUCKETS) - 1
    return next((place for place, edge in enumerate(EDGES) if token < edge), len(EDGES))


def _app(sample: Sample, number: int, doc: PromptDoc | None) -> str:
    """As the log names it; else the model and how its system prompt begins, whatever changes in it."""
    named = sample.words[number].app if sample.words else None
    if named is not None:
        return masked(named)[:NAME_CHARACTERS]
    if doc is None:
        return "all"
    head = next((one for one in doc.segments if one.role in ("system", "developer", "prompt")), None)
    model = f"{doc.model}: " if doc.model else ""
    if head is None:
        return f"{model}no system prompt"
    first = form_of(sentences(head.content)[0]).decode("utf-8", "replace").strip()
    return masked(f"{model}{first}")[:NAME_CHARACTERS]


def _similar(sample: Sample, order: Sequence[int], levels: PromptLevels, place: int) -> tuple[int, bool]:
    """(token, no difference up to the end) against the most similar earlier request."""
    tokens = sample.trace.requests[order[place]].prompt_tokens
    if levels.docs:
        reach, own = levels.reach[place], levels.docs[place].own_bytes
        return reach.own_bytes * tokens // max(1, own), reach.own_bytes == own
    shared = levels.shared[place]
    return shared, shared + sample.trace.block_tokens > tokens


def _parting(
    sample: Sample, order: Sequence[int], levels: PromptLevels, place: int, previous: int
) -> _Parting:
    request, before = (sample.trace.requests[order[one]] for one in (place, previous))
    if levels.docs:
        doc, other = levels.docs[place], levels.docs[previous]
        if doc.name_space != other.name_space:
            what = "model" if doc.model != other.model else "cache_salt"
            return _Parting(0, False, what)
        text, other_text = doc.text, other.text
        at = common_prefix(text, other_text)
        where = _where(doc, at)
        return _Parting(
            at * request.prompt_tokens // max(1, len(text)),
            at == len(text),
            where,
            snippet(text, at),
            snippet(other_text, at) if at < len(other_text) else "(it ends there)",
        )
    ids, other_ids = (
        sample.words[order[one]].token_ids if sample.words else None for one in (place, previous)
    )
    if ids is not None and other_ids is not None:
        token = common_prefix(token_bytes(ids), token_bytes(other_ids)) // TOKEN_BYTES
        return _Parting(
            token,
            token == len(ids),
            "tokens",
            f"{list(ids[token : token + 8])}",
            f"{list(other_ids[token : token + 8])}",
        )
    blocks = 0
    for one, another in zip(request.block_ids, before.block_ids, strict=False):
        if one != another:
            break
        blocks += 1
    token = blocks * sample.trace.block_tokens
    return _Parting(token, blocks == len(request.block_ids), "blocks")


def _where(doc: PromptDoc, at: int) -> str:
    segment = doc.place_of(at)
    if segment is None:
        return "the end"
    number = segment.place.removeprefix("message ").split(" ")[0]
    return segment.place if not number.isdigit() or int(number) < 2 else f"a later {segment.role} message"
