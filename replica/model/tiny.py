"""The `tiny` model: a small random Llama made from a seed, with one token per byte; for tests and demos.

Its weights let attention outweigh the last token: of 60 prompts of 100 bytes, changing the first byte changed
the next 16 tokens of all, so handing out the wrong KV shows. Bytes that print are the likelier output.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from tokenizers import pre_tokenizers

from replica.model.shape import ModelShape, Rotary
from replica.model.tokenizer import Tokenizer, byte_characters, byte_level_tokenizer

SPECIAL_TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258; the ids below are bytes."""
END_ID, TURN_END_ID = 256, 258
VOCAB = 264

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_shape(context: int = 8192) -> ModelShape:
    """Two layers, 64 wide, 4 query heads over 2 KV heads of 16; 512 bytes of fp32 KV per token."""
    return ModelShape(
        layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=VOCAB,
        context=context,
        norm_eps=1e-5,
        rotary=Rotary(10_000.0),
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        tied_embeddings=False,
        windows=(None, None),
    )


def tiny_hybrid_shape(context: int = 8192) -> ModelShape:
    """The tiny shape with three layers, of which the middle one is gated linear attention: 2 KiB of state."""
    return replace(tiny_shape(context), layers=3, windows=(None,) * 3, recurrent=frozenset((1,)))


class RandomWeights:
    """Random tensors for a shape under their Hugging Face names; the same for the same seed."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator().manual_seed(seed)

        def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
            values = torch.randn(rows, columns, generator=generator)
            self._tensors[name] = values * (gain / math.sqrt(columns))

        def vector(name: str, size: int, around: float) -> None:
            self._tensors[name] = around + 0.2 * torch.randn(size, generator=generator)

        q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        matrix("model.embed_tokens.weight", shape.vocab, shape.hidden, gain=0.3 * math.sqrt(shape.hidden))
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}"
            vector(f"{prefix}.input_layernorm.weight", shape.hidden, 1.0)
            vector(f"{prefix}.post_attention_layernorm.weight", shape.hidden, 1.0)
            for kind, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                matrix(
                    f"{prefix}.self_attn.{kind}_proj.weight",
                    rows,
                    shape.hidden,
                    gain=3.0 if kind == "q" else 1.0,
                )
                if shape.qkv_bias:
                    vector(f"{prefix}.self_attn.{kind}_proj.bias", rows, 0.0)
            if shape.qk_norm:
                vector(f"{prefix}.self_attn.q_norm.weight", shape.head_dim, 1.0)
                vector(f"{prefix}.self_attn.k_norm.weight", shape.head_dim, 1.0)
            if layer in shape.recurrent:
                matrix(f"{prefix}.self_attn.decay_proj.weight", shape.kv_heads, shape.hidden, gain=3.0)
            matrix(f"{prefix}.self_attn.o_proj.weight", shape.hidden, q_rows, gain=6.0)
            if shape.output_bias:
                vector(f"{prefix}.self_attn.o_proj.bias", shape.hidden, 0.0)
            matrix(f"{prefix}.mlp.gate_proj.weight", shape.ffn, shape.hidden)
            matrix(f"{prefix}.mlp.up_proj.weight", shape.ffn, shape.hidden)
            matrix(f"{prefix}.mlp.down_proj.weight", shape.hidden, shape.ffn)
        vector("model.norm.weight", shape.hidden, 1.0)
        if not shape.tied_embeddings:
            matrix("lm_head.weight", shape.vocab, shape.hidden, gain=4.0)
            head = self._tensors["lm_head.weight"]
            head[:0x20] *= 0.5
            head[0x7F:0x100] *= 0.5
            head[0x100:] *= 0.75

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        return self._tensors[name]


def tiny_tokenizer() -> Tokenizer:
    """Bytes 0 to 255 are tokens 0 to 255; then the special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    return Tokenizer(
        byte_level_tokenizer(
            vocabulary,
            merges=(),
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            special=SPECIAL_TOKENS,
        )
    )


def hf_config(shape: ModelShape, family: str) -> dict[str, Any]:
    """The ``config.json`` of a plain shape (no scaled rotary embedding) of this model_type."""
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rotary.theta,
        "attention_bias": shape.qkv_bias,
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "float32",
        "bos_token_id": END_ID,
        "eos_token_id": [END_ID, TURN_END_ID],
        "pad_token_id": None,
    }
