"""Text to token ids and back: a thin layer over the ``tokenizers`` library.

What a token means in bytes is looked up in a table made at start, so that a stream can hand out text the
moment its bytes are complete (see ``detokenizer``). Two families of decoders are understood: byte-level BPE
(GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 2, Mistral).
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from replica.model.shape import ModelError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes text; knows the bytes of every token; knows which tokens are special."""

    def __init__(self, library: LibraryTokenizer) -> None:
        """Make the table of token bytes.

        Raises:
            ModelError: the tokenizer's decoder is of a kind we do not know.
        """
        self._library = library
        self._library.no_truncation()
        self._library.no_padding()
        definition = json.loads(library.to_str())
        added = {int(token["id"]): token for token in definition.get("added_tokens", ())}
        self.special_ids = frozenset(number for number, token in added.items() if token["special"])
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        kinds = _decoder_kinds(definition.get("decoder"))
        if "ByteLevel" in kinds:
            of_character = {character: byte for byte, character in enumerate(byte_characters())}
            self.strips_leading_space = False
        elif "ByteFallback" in kinds or "Metaspace" in kinds:
            of_character = None
            self.strips_leading_space = "Strip" in kinds or "Metaspace" in kinds
        else:
            raise ModelError(
                f"tokenizer.json: decoder {sorted(kinds)} is not supported; expected ByteLevel, or "
                "ByteFallback or Metaspace as SentencePiece models have"
            )
        self._bytes: list[bytes] = [b""] * self.size
        for text, number in vocabulary.items():
            if number in added:
                self._bytes[number] = text.encode("utf-8", errors="replace")
            elif of_character is not None:
                self._bytes[number] = _byte_level(text, of_character)
            else:
                self._bytes[number] = _sentencepiece(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` adds what the model wants around a plain prompt.

        Special tokens written out in the text become those tokens. ``text`` must be encodable as UTF-8.
        """
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token stands for; empty when the vocabulary has no such token."""
        return self._bytes[token] if 0 <= token < self.size else b""

    def token_text(self, token: int) -> str:
        """The token alone as text, with U+FFFD for bytes that are no text by themselves."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def decode(self, tokens: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """All of ``tokens`` as text."""
        data = b"".join(
            self.token_bytes(token)
            for token in tokens
            if not (skip_special_tokens and token in self.special_ids)
        )
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def to_json(self) -> str:
        """The definition as tokenizer.json has it."""
        return str(self._library.to_str())


def byte_characters() -> list[str]:
    """The printable character that stands for each of the 256 bytes in a byte-level vocabulary (GPT-2).

    >>> characters = byte_characters()
    >>> characters[ord("A")], characters[ord(" ")], len(set(characters))
    ('A', '\u0120', 256)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_level_tokenizer(
    vocabulary: dict[str, int],
    merges: Sequence[tuple[str, str]],
    pre_tokenizer: Any,
    special: Sequence[str],
    ordinary_added: Sequence[str] = (),
) -> LibraryTokenizer:
    """A byte-level BPE tokenizer; ``special`` and ``ordinary_added`` tokens are found whole in any text."""
    from tokenizers import AddedToken, decoders, models

    library = LibraryTokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary_added])
    return library


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if not decoder:
        return set()
    if decoder["type"] == "Sequence":
        return {part["type"] for part in decoder["decoders"]}
    return {str(decoder["type"])}


def _byte_level(text: str, of_character: dict[str, int]) -> bytes:
    try:
        return bytes(of_character[character] for character in text)
    except KeyError:
        return text.encode("utf-8", errors="replace")


def _sentencepiece(text: str) -> bytes:
    single = _BYTE_TOKEN.fullmatch(text)
    if single:
        return bytes([int(single[1], 16)])
    return text.replace(_SPACE_MARK, " ").encode("utf-8", errors="replace")
