"""What is diagnosed: a trace and, as far as they are known, its prompts' words and what was measured.

Where words are known but tokens are not, a block is so many bytes of canonical text: the tokens per byte are
those of the log's own ``prompt_tokens``, else a quarter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from replica.contract.block_hash import TOKEN_BYTES, token_bytes
from router.config import ModelConfig
from sim.diagnose.exact_prompts import with_token_ids
from sim.diagnose.prompt_doc import PromptDoc, prompt_doc
from sim.diagnose.replies import replies
from sim.diagnose.request_log import LoggedRequest, is_request_log, read_request_log
from sim.workload.sources import open_text_or_trace
from sim.workload.text_sessions import CHARACTERS_PER_TOKEN
from sim.workload.trace import Trace, TraceError, TraceRequest

DEFAULT_BLOCK_TOKENS = 16
DEFAULT_OUTPUT_TOKENS = 128
"""Reply length of rows that do not tell."""
UNTIMED_GAP_MS = 1_000.0
"""Between requests of a file without times."""


@dataclass(frozen=True, slots=True)
class Words:
    """One request's prompt as text, and what else its row told."""

    doc: PromptDoc | None
    token_ids: tuple[int, ...] | None
    row: LoggedRequest | None
    reply: bytes = b""
    """What was answered, where the next turn tells it."""
    reply_ids: tuple[int, ...] = ()

    @property
    def app(self) -> str | None:
        """As the log names it."""
        return None if self.row is None else self.row.app


@dataclass(frozen=True, slots=True)
class Sample:
    """A trace with, for each of its requests, the words; ``words`` is empty for traces without."""

    trace: Trace
    words: tuple[Words, ...]
    timed: bool
    """The times are recorded ones."""
    lengths: str
    """How prompt tokens are known, for the report."""

    def measured_tokens(self, number: int) -> int | None:
        """Cached tokens that a replica reported for request ``number``, in tokens of the trace."""
        row = self.words[number].row if self.words else None
        if row is None or row.cached_tokens is None:
            return None
        tokens = self.trace.requests[number].prompt_tokens
        told = row.prompt_tokens or tokens
        return row.cached_tokens if told == tokens else min(tokens, round(row.cached_tokens * tokens / told))

    def replica(self, number: int) -> str | None:
        """The replica that served it, as the log tells."""
        row = self.words[number].row if self.words else None
        return None if row is None else row.replica

    @property
    def policies(self) -> tuple[str, ...]:
        """By which its requests were routed, as the log tells."""
        return tuple(sorted({name for one in self.words if one.row and (name := one.row.policy)}))

    @property
    def other_lengths(self) -> int:
        """Requests whose token ids are not as many as their replica counted."""
        return sum(
            one.token_ids is not None
            and one.row is not None
            and one.row.prompt_tokens not in (None, len(one.token_ids))
            for one in self.words
        )

    @property
    def replicas(self) -> tuple[str, ...]:
        """All replicas that the log names."""
        return tuple(sorted({name for one in self.words if one.row and (name := one.row.replica)}))


def open_sample(
    name: str,
    *,
    block_tokens: int | None = None,
    requests: int | None = None,
    seed: int = 1,
    tokenizer: ModelConfig | None = None,
) -> Sample:
    """The sample ``name`` stands for: a request log, or whatever ``simulate --trace`` takes.

    With a ``tokenizer`` prompts that have words are read token by token. Raises ``TraceError``.
    """
    path = Path(name)
    if path.is_file() and is_request_log(path):
        rows = read_request_log(path, requests=requests)
    else:
        trace, text = open_text_or_trace(name, block_tokens=block_tokens, requests=requests, seed=seed)
        if text is None:
            return Sample(trace, (), not trace.in_sessions, "from the trace")
        rows = [
            LoggedRequest(
                number + 1,
                session=request.session,
                body={"messages": text.messages(number)},
                output_tokens=request.output_tokens,
            )
            for number, request in enumerate(trace.requests)
        ]
    if tokenizer is not None:
        rows = with_token_ids(rows, tokenizer)
    return sample_of_log(path.name, rows, block_tokens)


def sample_of_log(name: str, rows: Sequence[LoggedRequest], block_tokens: int | None = None) -> Sample:
    """The sample made of a log's rows, in order of time. Raises ``TraceError``."""
    timed = all(row.time_s is not None for row in rows)
    in_sessions = not timed and all(row.session is not None for row in rows)
    if timed:
        rows = sorted(rows, key=lambda row: row.time_s or 0.0)
    elif in_sessions:
        first: dict[str | None, int] = {}
        for number, row in enumerate(rows):
            first.setdefault(row.session, number)
        rows = sorted(rows, key=lambda row: first[row.session])
    words = tuple(Words(prompt_doc(row.body) if row.body else None, row.token_ids, row) for row in rows)
    words = _with_replies(words)
    size, prompts, lengths = _prompts(name, words, block_tokens)
    requests = tuple(
        TraceRequest(
            blocks.tokens,
            blocks.reply_tokens or row.output_tokens or DEFAULT_OUTPUT_TOKENS,
            blocks.ids[: blocks.tokens // size],
            output_block_ids=blocks.ids[blocks.tokens // size :],
            timestamp_ms=None
            if in_sessions
            else 1e3 * row.time_s
            if timed and row.time_s is not None
            else number * UNTIMED_GAP_MS,
            session=row.session if in_sessions else None,
        )
        for number, (row, blocks) in enumerate(zip(rows, prompts, strict=True))
    )
    return Sample(Trace(name, size, requests), words, timed, lengths)


def _with_replies(words: tuple[Words, ...]) -> tuple[Words, ...]:
    """The same with what was answered, where all have words and a later turn tells."""
    ratio, _ = _bytes_per_token(words)
    docs = [
        replace(one.doc, answer_bytes=one.row.output_tokens * ratio)
        if one.row is not None and one.row.output_tokens is not None
        else one.doc
        for one in words
        if one.doc is not None
    ]
    if len(docs) < len(words):
        return words
    made = []
    for one, doc, reply in zip(words, docs, replies(docs), strict=True):
        one = replace(one, doc=doc)
        if reply is not None:
            ids = _reply_ids(one, words[reply.later], len(reply.text) / len(docs[reply.later].text))
            one = replace(one, reply=reply.text, reply_ids=ids)
        made.append(one)
    return tuple(made)


def _reply_ids(one: Words, later: Words, share: float) -> tuple[int, ...]:
    """The answer's token ids, if ``later``'s go on from this prompt's; it is that share of the later text."""
    if one.token_ids is None or later.token_ids is None:
        return ()
    start = len(one.token_ids)
    if later.token_ids[:start] != one.token_ids:
        return ()  # the template writes a prompt otherwise once it is answered
    told = None if one.row is None else one.row.output_tokens
    return later.token_ids[start : start + (told or round(share * len(later.token_ids)))]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """One prompt, and behind it the answer, in blocks."""

    tokens: int
    ids: tuple[int, ...]
    """Of the full blocks of both."""
    reply_tokens: int = 0


def _prompts(name: str, words: Sequence[Words], block_tokens: int | None) -> tuple[int, list[_Blocks], str]:
    """(tokens in a block, blocks of every request, how the lengths are known)."""
    if all(one.token_ids is not None for one in words):
        size = block_tokens or DEFAULT_BLOCK_TOKENS
        return size, [_token_blocks(one, size) for one in words], "counted in token ids"
    if all(one.doc is not None for one in words):
        size = block_tokens or DEFAULT_BLOCK_TOKENS
        bytes_per_token, how = _bytes_per_token(words)
        width = max(1, round(size * bytes_per_token))
        return size, [_text_blocks(one, width, size) for one in words], how
    rows = [one.row for one in words if one.row is not None and one.row.block_keys is not None]
    sizes = {row.block_tokens for row in rows}
    if len(rows) == len(words) and len(sizes) == 1 and (size := sizes.pop() or 0):
        return size, [_key_blocks(row, size) for row in rows], "block keys in the log"
    raise TraceError(
        f"{name}: rows of different kinds; expected all with words, all with prompt_token_ids, or all with "
        "block_keys of one block_tokens"
    )


def _bytes_per_token(words: Iterable[Words]) -> tuple[float, str]:
    counted = [
        (one.doc.own_bytes, one.row.prompt_tokens)
        for one in words
        if one.doc is not None and one.row is not None and one.row.prompt_tokens
    ]
    text_bytes, tokens = sum(pair[0] for pair in counted), sum(pair[1] for pair in counted)
    if not tokens or not text_bytes:
        return float(CHARACTERS_PER_TOKEN), f"estimated, {CHARACTERS_PER_TOKEN} bytes a token"
    ratio = text_bytes / tokens
    return ratio, f"estimated, {ratio:.2f} bytes a token as the log's prompt_tokens have it"


def _token_blocks(one: Words, size: int) -> _Blocks:
    assert one.token_ids is not None
    ids = one.token_ids + one.reply_ids
    return _Blocks(len(one.token_ids), _chain(one, token_bytes(ids), size * TOKEN_BYTES), len(one.reply_ids))


def _text_blocks(one: Words, width: int, size: int) -> _Blocks:
    """``width`` bytes are a block of ``size`` tokens."""
    assert one.doc is not None
    text = one.doc.text
    stored = text + one.reply
    tokens = max(1, len(text) * size // width)
    return _Blocks(tokens, _chain(one, stored, width), max(0, len(stored) * size // width - tokens))


def _chain(one: Words, data: bytes, width: int) -> tuple[int, ...]:
    """Chained names of the full blocks of ``width`` bytes; other models and salts have other ones."""
    parent = b"" if one.doc is None else one.doc.name_space
    ids: list[int] = []
    for start in range(0, len(data) - width + 1, width):
        parent = blake2b(parent + data[start : start + width], digest_size=8).digest()
        ids.append(int.from_bytes(parent, "little"))
    return tuple(ids)


def _key_blocks(row: LoggedRequest, size: int) -> _Blocks:
    tokens = row.text_tokens or row.prompt_tokens
    assert row.block_keys is not None and tokens is not None
    return _Blocks(tokens, tuple(key & ((1 << 64) - 1) for key in row.block_keys[: tokens // size]))
