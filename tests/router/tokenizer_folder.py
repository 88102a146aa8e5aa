"""A Hugging Face folder with a small tokenizer and a chat template; no weights, no torch."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> Tokenizer:
    """Bytes are tokens, "th" is one too; plain prompts begin with a BOS."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"th": 300}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def write_folder(
    folder: Path, tokenizer_json: str | None = None, template: str | None = TEMPLATE, **settings: Any
) -> Path:
    """``folder`` with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = byte_tokenizer().to_str() if tokenizer_json is None else tokenizer_json
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
