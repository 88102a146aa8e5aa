"""Token ids to text, token by token: what is handed out never changes and never ends inside a character."""

import codecs

from replica.model.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence as its tokens come.

    >>> from replica.model.tiny import tiny_tokenizer
    >>> text = Detokenizer(tiny_tokenizer())                       # one token per byte
    >>> [text.push(byte) for byte in "d\u00e9\u20ac".encode()]
    ['d', '', '\u00e9', '', '', '\u20ac']
    >>> text.push(0xE2), text.close()                              # an unfinished character at the end
    ('', '\ufffd')
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_leading_space

    def push(self, token: int) -> str:
        """The text that is certain now; bytes of an unfinished character wait for the next token."""
        if token in self._skipped:
            return ""
        return self._out(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def close(self) -> str:
        """What was still held back, as U+FFFD."""
        return self._out(self._decoder.decode(b"", final=True))

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
