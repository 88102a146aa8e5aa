"""A SentencePiece BPE vocabulary, as Llama 2, Mistral and TinyLlama have it, as a tokenizer of the library.

SentencePiece keeps no list of merges: it joins the two neighbours whose joint piece has the best score. In
order of score, every way to cut a piece into two pieces is a merge.
"""

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

SPACE = "\u2581"


def sentencepiece_tokenizer(
    pieces: Sequence[str],
    scores: Sequence[float],
    *,
    unknown: int | None,
    special: Sequence[str],
    ordinary_added: Sequence[str] = (),
    space_first: bool = True,
) -> LibraryTokenizer:
    """``pieces`` by id, with ``scores`` (best first to be joined).

    ``unknown``: the id for what has no piece and no bytes. ``special`` and ``ordinary_added`` pieces are
    found whole in any text. ``space_first``: text is encoded as if a space stood before it.

    >>> pieces = ["<unk>", SPACE, "a", "b", "ab", SPACE + "ab"]
    >>> library = sentencepiece_tokenizer(pieces, [0, -3, -4, -5, -1, -2], unknown=0, special=["<unk>"])
    >>> library.encode("ab a").tokens
    ['▁ab', '▁', 'a']
    """
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    added = {*special, *ordinary_added}
    ranked = sorted(_merges(vocabulary, scores, added))
    library = LibraryTokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, _, left, right in ranked],
            unk_token=pieces[unknown] if unknown is not None else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if space_first else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if space_first else undo)
    library.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary_added])
    return library


def _merges(
    vocabulary: dict[str, int], scores: Sequence[float], added: set[str]
) -> Iterator[tuple[float, int, int, str, str]]:
    """(minus the score, ids of the halves, the halves) of every cut of every piece."""
    for piece, number in vocabulary.items():
        if piece in added:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                yield -scores[number], vocabulary[left], vocabulary[right], left, right
