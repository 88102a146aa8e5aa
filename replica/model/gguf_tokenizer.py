"""Builds the tokenizer that a GGUF file describes in its metadata."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from replica.model.sentencepiece import sentencepiece_tokenizer
from replica.model.shape import ModelError
from replica.model.tokenizer import byte_level_tokenizer

# GGUF's token types: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BOS_BY_DEFAULT = ("llama-bpe", "llama3")
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(metadata: Mapping[str, Any]) -> LibraryTokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (``gpt2``) or SentencePiece BPE (``llama``).

    Raises:
        ModelError: another kind of tokenizer, or a way of cutting words that we do not know.
    """
    model, words = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"GGUF: tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece); use the model's Hugging Face folder with its tokenizer.json instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    ordinary = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    if model == "llama":
        library = sentencepiece_tokenizer(
            tokens,
            metadata["tokenizer.ggml.scores"],
            unknown=metadata.get("tokenizer.ggml.unknown_token_id"),
            special=special,
            ordinary_added=ordinary,
            space_first=metadata.get("tokenizer.ggml.add_space_prefix", True),
        )
        adds_bos = True
    else:
        library = byte_level_tokenizer(
            vocabulary={text: number for number, text in enumerate(tokens)},
            merges=[_merge(line) for line in metadata["tokenizer.ggml.merges"]],
            pre_tokenizer=_pre_tokenizer(words),
            special=special,
            ordinary_added=ordinary,
        )
        adds_bos = words in _BOS_BY_DEFAULT
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        library.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return library


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _pre_tokenizer(words: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if words in ("gpt-2", "gpt2"):
        return byte_level
    if words == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    patterns = {"llama-bpe": _LLAMA3_WORDS, "llama3": _LLAMA3_WORDS, "qwen2": _QWEN2_WORDS}
    if words not in patterns:
        known = ", ".join(["gpt-2", "smollm", *patterns])
        raise ModelError(f"GGUF: tokenizer.ggml.pre {words!r} is not supported; known are {known}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[words]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
