"""Text for prompts of which a trace tells only block ids: equal ids give equal text, and nothing else does.

The text is made of common English words of three letters and a space, which nearly every tokenizer maps to
one token each: so four characters are one token for a real tokenizer as well as for servers that count
characters.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128

WORD_CHARACTERS = 4
BLOCKS_REMEMBERED = 8_192

_TEXT = (
    "ace act add age ago aid aim air all and ant any ape arc are ark arm art ash ask ate awe axe bad "
    "bag ban bar bat bay bed bee beg bet bid big bin bit bow box boy bud bug bus but buy cab can cap "
    "car cat cop cow cry cup cut dad dam day den dew did die dig dim dip dog dot dry due dug ear eat "
    "egg ego elf end era eve eye fan far fat fax fed fee few fig fin fit fix fly fog for fox fun fur "
    "gap gas gem get god got gum gun gut guy gym had ham has hat hay hen her hey hid him hip his hit "
    "hot how hub hug hut ice ill ink inn ion its jam jar jaw jet job joy key kid kit lab lad lap law "
    "lay led leg let lid lie lip lit log lot low mad man map mat may men met mid mix mob mom mud mug "
    "net new nod nor not now nut oak odd off oil old one our out owe owl own pad pan pat pay pea pen "
    "pet pie pig pin pit pop pot put rag ram ran rap rat raw ray red rib rid rim rip rob rod row rub "
    "rug run sad saw say sea see set sew she shy sin sip sir sit six ski sky son soy spy sum sun tag "
    "tan tap tax tea ten the tie tin tip toe ton too top toy try two "
)
_WORDS = [_TEXT[start : start + WORD_CHARACTERS] for start in range(0, len(_TEXT), WORD_CHARACTERS)]


class PromptText:
    """Writes the prompts of one trace. ``salt`` makes all of them new to a cache that saw another run.

    ``scale`` below 1 shortens every block and every rest alike, so that small models see the same sharing.

    >>> text = PromptText(block_tokens=16, salt="a", scale=0.25)
    >>> one, other = text.prompt([7, 8], 40, "first"), text.prompt([7, 9], 40, "second")
    >>> len(one), one[:16] == other[:16], one[16:32] == other[16:32]
    (40, True, False)
    """

    def __init__(
        self, block_tokens: int, *, salt: str, characters_per_token: float = 4.0, scale: float = 1.0
    ) -> None:
        self.characters_per_token = characters_per_token
        self._block_tokens = block_tokens
        self._salt = salt
        self._characters = characters_per_token * scale
        self._block = lru_cache(maxsize=BLOCKS_REMEMBERED)(self._write_block)

    def prompt(self, block_ids: Sequence[int], prompt_tokens: int, rest_name: str) -> str:
        """The whole prompt; what follows the last full block is named by ``rest_name`` and nobody else's."""
        rest_tokens = prompt_tokens - len(block_ids) * self._block_tokens
        parts = [self._block(block) for block in block_ids]
        parts.append(self._words(f"rest {rest_name}", round(rest_tokens * self._characters)))
        return "".join(parts) or self._words(f"rest {rest_name}", WORD_CHARACTERS)

    def _write_block(self, block: int) -> str:
        return self._words(f"block {block}", max(1, round(self._block_tokens * self._characters)))

    def _words(self, name: str, characters: int) -> str:
        count = -(-characters // WORD_CHARACTERS)
        digest = shake_128(f"{self._salt} {name}".encode()).digest(count)
        return "".join([_WORDS[byte] for byte in digest])[:characters]
