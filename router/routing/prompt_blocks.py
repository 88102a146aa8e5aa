"""A request's body -> the chain of block keys that names its prompt, and how long it is.

Text mode needs no tokenizer. Everything that shapes the prompt is written into one canonical text, in
order: model, tools, then each message's role, name, content and tool calls. Two requests whose canonical
texts begin alike begin alike for the engine, too. The text is cut into blocks: 256 bytes each at the
head, where prompts part ways, doubling every 32 blocks, so that 2 / 32 / 256 KiB are 8 / 72 / 161 blocks.
A block's key is chained: it names the block and everything before it, in all 64 bits.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import orjson
import xxhash
from mypy_extensions import mypyc_attr

from router.routing.control_fields import MAY_SET_CONTROLS, control_fields
from router.routing.flat_request import TokenIds
from router.routing.tenant import Tenant

if TYPE_CHECKING:
    from router.routing.block_naming import BlockNaming

FIRST_BLOCK_BYTES: Final = 256
BLOCKS_PER_SIZE: Final = 32
MAX_BLOCKS: Final = 416
PROMPT_SHAPING_FIELDS: Final[tuple[str, ...]] = (
    "tools",
    "functions",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
"""Fields beside the messages that engines render into the prompt, or that choose how it is rendered."""
_SHAPING: Final = frozenset(PROMPT_SHAPING_FIELDS)
_READ_IF_ANY: Final = _SHAPING | MAY_SET_CONTROLS | {"cache_salt", "max_completion_tokens", "prompt"}
"""Beside these only ``model``, ``messages``, ``max_tokens`` and ``stream`` need to be looked up."""
ROOTS_REMEMBERED: Final = 1_024

# Looked up once: a function of an imported module is found by its name with every call. What hashes is not
# typed, nor are keys in loops: compiled, an object that stays one is cheaper than a number of 64 bits.
_loads: Final = orjson.loads
_hash: Final[Any] = xxhash.xxh3_64_intdigest

_BLOCK_ENDS: Final = tuple(
    accumulate((FIRST_BLOCK_BYTES << (block // BLOCKS_PER_SIZE) for block in range(MAX_BLOCKS)), initial=0)
)


class BlockLayout:
    """Where blocks end, in units of prompt (bytes of text, or tokens)."""

    def end(self, blocks: int) -> int:
        """Units in the first ``blocks`` blocks."""
        raise NotImplementedError

    def blocks(self, units: int) -> int:
        """Whole blocks in the first ``units`` units."""
        raise NotImplementedError


class TextLayout(BlockLayout):
    """Blocks of canonical text; units are bytes.

    >>> [TextLayout().end(n) for n in (0, 1, 32, 33, 64)]
    [0, 256, 8192, 8704, 24576]
    >>> [TextLayout().blocks(bytes_) for bytes_ in (255, 256, 8191, 8192, 8704, 24576)]
    [0, 1, 31, 32, 33, 64]
    """

    def end(self, blocks: int) -> int:
        """Bytes in the first ``blocks`` blocks."""
        return _BLOCK_ENDS[blocks]

    def blocks(self, units: int) -> int:
        """Whole blocks in the first ``units`` bytes."""
        size = (units // (FIRST_BLOCK_BYTES * BLOCKS_PER_SIZE) + 1).bit_length() - 1
        whole = BLOCKS_PER_SIZE * size
        return min(MAX_BLOCKS, whole + (units - _BLOCK_ENDS[whole]) // (FIRST_BLOCK_BYTES << size))


class UniformLayout(BlockLayout):
    """Blocks of one size; units are tokens.

    >>> UniformLayout(512).end(3)
    1536
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def end(self, blocks: int) -> int:
        """Tokens in the first ``blocks`` blocks."""
        return blocks * self._block_tokens

    def blocks(self, units: int) -> int:
        """Whole blocks in the first ``units`` tokens."""
        return units // self._block_tokens


TEXT_LAYOUT: Final = TextLayout()


@mypyc_attr(acyclic=True)
class Prompt:
    """What the router knows of one request before it chooses.

    ``keys`` are the chained keys of whole blocks; ``units`` is the length of the whole prompt. Read token by
    token it has ``chains``, the keys in every replica's own naming, ``units`` are tokens, and ``keys`` is one
    of the chains.
    """

    __slots__ = (
        "chains",
        "controls",
        "keys",
        "layout",
        "max_tokens",
        "model",
        "priority",
        "stream",
        "tenant",
        "tokens",
        "units",
    )

    def __init__(
        self,
        *,
        keys: Sequence[int],
        units: int,
        layout: BlockLayout = TEXT_LAYOUT,
        model: str | None = None,
        stream: bool = False,
        max_tokens: int | None = None,
        tokens: int | None = None,
        chains: "Mapping[BlockNaming, Sequence[int]] | None" = None,
        controls: tuple[str, ...] = (),
    ) -> None:
        self.keys: list[int] = keys if isinstance(keys, list) else list(keys)
        self.units = units
        self.layout = layout
        self.model = model
        self.stream = stream
        self.max_tokens = max_tokens
        self.tokens = tokens
        """How many tokens it has, where the request itself says so: a prompt of token ids."""
        self.chains = chains
        self.controls = controls
        """Fields of ``control_fields.CONTROL_FIELDS`` that the request sets."""
        self.tenant: Tenant | None = None
        """Whose it is, where that is told apart."""
        self.priority = 0
        """Among the tenant's requests that wait: lower goes sooner."""


UNREADABLE: Final = Prompt(keys=(), units=0)
"""A request whose prompt cannot be read: it is routed by load, and the replica judges it."""


_roots: Final[dict[object, int]] = {}
"""By model, or by model and salt."""


def root_key(model: str | None, salt: str | None = None, adapter: str | None = None) -> int:
    """The key every chain of this model, tenant salt and adapter starts from.

    Parts are tagged and framed by their length, so a salt "foo" is not an adapter "foo".
    """
    framed = b"".join(
        b"%c%d:%s" % (tag, len(value), value)
        for tag, part in ((b"m", model), (b"s", salt), (b"a", adapter))
        if part is not None
        for value in (part.encode("utf-8", "surrogatepass"),)
    )
    return int(_hash(framed, 0x77617277))


def _root(model: str | None, salt: str | None) -> int:
    """``root_key``, remembered."""
    named: object = model if salt is None else (model, salt)
    root = _roots.get(named)
    if root is None:
        if len(_roots) >= ROOTS_REMEMBERED:
            _roots.clear()
        root = _roots[named] = root_key(model, salt)
    return root


def block_keys(text: bytes, root: int) -> list[int]:
    """Chained 64-bit keys of the whole blocks of ``text``; a last partial block has none.

    A block's key is its XXH3 hash, seeded with the key of the block before it, the first one's with ``root``.
    Stable across processes and versions:

    >>> [hex(key) for key in block_keys(b"x" * 600, root=1)]
    ['0x90a0d808fcb2443f', '0xbaad9d959787001a']
    """
    keys: list[int] = []
    key: Any = root
    start, size, length = 0, FIRST_BLOCK_BYTES, len(text)
    while start + size <= length and len(keys) < MAX_BLOCKS:
        # One size: up to 32 blocks.
        stop = min(start + size * BLOCKS_PER_SIZE, length - (length - start) % size)
        while start < stop:
            key = _hash(text[start : start + size], key)
            keys.append(key)
            start += size
        size *= 2
    return keys


def read_prompt(body: bytes) -> Prompt:
    """The prompt of an OpenAI request body, as text; ``UNREADABLE`` when there is none to be found.

    Never raises: a body that is not what it should be is the replica's to refuse.
    """
    try:
        request = _loads(body)
    except orjson.JSONDecodeError:
        return UNREADABLE
    return text_prompt(request) if type(request) is dict else UNREADABLE


def text_prompt(request: dict[str, Any]) -> Prompt:
    """The prompt of a request as text. Never raises."""
    if all(field not in _READ_IF_ANY for field in request):  # compiled, half of what ``isdisjoint`` costs
        model, max_tokens = request.get("model"), request.get("max_tokens")
        named = model if type(model) is str else None
        text = _canonical(request, shaped=False)
        return Prompt(
            keys=block_keys(text, _root(named, None)),
            units=len(text),
            model=named,
            stream=request.get("stream") is True,
            max_tokens=max_tokens if type(max_tokens) is int and max_tokens > 0 else None,
        )
    named, most = request_limits(request)
    text = canonical_text(request)
    salt = request.get("cache_salt")
    return Prompt(
        keys=block_keys(text, _root(named, salt if type(salt) is str else None)),
        units=len(text),
        model=named,
        stream=request.get("stream") is True,
        max_tokens=most,
        tokens=given_tokens(request),
        controls=control_fields(request),
    )


def request_limits(request: dict[str, Any]) -> tuple[str | None, int | None]:
    """The model a request names and the most tokens it wants, as far as they are what they should be."""
    model = request.get("model")
    max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
    return (
        model if type(model) is str else None,
        max_tokens if type(max_tokens) is int and max_tokens > 0 else None,
    )


def given_tokens(request: dict[str, Any]) -> int | None:
    """How many tokens the prompt has, if it is given as token ids, alone or in a list of one.

    >>> [given_tokens({"prompt": prompt}) for prompt in ([5, 6, 7], [[5, 6]], "5, 6", ["5"], [])]
    [3, 2, None, None, None]
    """
    prompt = request.get("prompt")
    if type(prompt) is not list or not prompt:
        return prompt.count if type(prompt) is TokenIds else None
    ids = prompt[0] if len(prompt) == 1 and type(prompt[0]) is list else prompt
    return len(ids) if ids and type(ids[0]) is int else None


def canonical_text(request: dict[str, Any]) -> bytes:
    """All that shapes the prompt of ``request``, in order, as bytes.

    ``content`` as a string and as one text part are the same; images stand for themselves by their URL
    or data; ``null`` content is empty.

    >>> canonical_text({"messages": [{"role": "user", "content": "hi"}]})
    b'\\x1euser\\x1fhi'
    >>> canonical_text({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]})
    b'\\x1euser\\x1fhi'
    >>> canonical_text({"prompt": "once upon"})
    b'once upon'
    """
    return _canonical(request, shaped=not _SHAPING.isdisjoint(request))


def _canonical(request: dict[str, Any], *, shaped: bool) -> bytes:
    """``shaped``: some field of ``PROMPT_SHAPING_FIELDS`` is there."""
    parts: list[str] = []
    if shaped:
        for field in PROMPT_SHAPING_FIELDS:
            value = request.get(field)
            if value:
                parts.append("\x1d" + field + "\x1f" + _dump(value))
    messages = request.get("messages")
    if type(messages) is list:
        for message in messages:
            if type(message) is dict:
                _write_message(message, parts)
            else:
                parts.append("\x1e" + _dump(message))
    elif type(messages) is str:  # read flat
        parts.append(messages)
    elif "prompt" in request:
        parts.append(_prompt_text(request["prompt"]))
    elif "input" in request:
        instructions = request.get("instructions")
        if type(instructions) is str:
            parts.append("\x1esystem\x1f" + instructions)
        parts.append(_prompt_text(request["input"]))
    text = "".join(parts)
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate: legal in JSON, not in UTF-8
        return text.encode("utf-8", "surrogatepass")


def _write_message(message: dict[str, Any], parts: list[str]) -> None:
    role, content = message.get("role"), message.get("content")
    parts.append("\x1e")
    if type(role) is str:
        parts.append(role)
    parts.append("\x1f")
    if type(content) is str:
        parts.append(content)
    elif type(content) is list:
        for part in content:
            if type(part) is dict and type(part.get("text")) is str:
                parts.append(part["text"])
            else:
                parts.append("\x1c" + _dump(part))
    elif content is not None:
        parts.append("\x1c" + _dump(content))
    if len(message) > 2:
        for field, value in message.items():
            if field not in ("role", "content") and value is not None:
                parts.append("\x1d" + field + "\x1f" + (value if type(value) is str else _dump(value)))


def _prompt_text(prompt: Any) -> str:
    if type(prompt) is str:
        return prompt
    if type(prompt) is TokenIds:
        return prompt.text
    if type(prompt) is list:
        if prompt and all(type(item) is str for item in prompt):
            return "\x1c".join(prompt)
        if len(prompt) == 1 and type(prompt[0]) is list:
            return _dump(prompt[0])  # one prompt as token ids, alone or in a list of one
        if prompt and all(type(item) is dict for item in prompt):
            parts: list[str] = []
            for item in prompt:
                _write_message(item, parts)
            return "".join(parts)
    return _dump(prompt)


def _dump(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer over 64 bits or a lone surrogate
        return repr(value)
