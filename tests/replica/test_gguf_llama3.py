"""A GGUF whose rotary frequencies are scaled as Llama 3.1's: by a tensor of divisors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter

from replica.model.hf_export import export_model
from replica.model.load import LoadedModel, load_model
from replica.model.shape import (
    Llama3Scaling,
    ModelError,
    ModelShape,
    Rotary,
    inverse_frequencies,
    shape_from_gguf,
)
from replica.model.tiny import RandomWeights, tiny_shape
from replica.model.tokenizer import byte_characters
from replica.model.weights import assemble
from tests.replica.models import finish_all, greedy_request, make_engine, token_ids

SCALING = Llama3Scaling(8.0, 1.0, 4.0, 32)
"""So short an original context that most pairs of the tiny model are scaled."""
GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def divisors(shape: ModelShape) -> list[float]:
    plain = inverse_frequencies(Rotary(shape.rotary.theta), shape.head_dim)
    scaled = inverse_frequencies(Rotary(shape.rotary.theta, llama3=SCALING), shape.head_dim)
    return [one / other for one, other in zip(plain, scaled, strict=True)]


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter stores Q and K: the halves of each head interleaved."""
    return rows.view(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, shape: ModelShape, source: RandomWeights, rope: list[float]) -> None:
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, shape.layers),
        (writer.add_embedding_length, shape.hidden),
        (writer.add_head_count, shape.heads),
        (writer.add_head_count_kv, shape.kv_heads),
        (writer.add_key_length, shape.head_dim),
        (writer.add_feed_forward_length, shape.ffn),
        (writer.add_context_length, shape.context),
        (writer.add_layer_norm_rms_eps, shape.norm_eps),
        (writer.add_rope_freq_base, shape.rotary.theta),
    ):
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*byte_characters(), "aa", *(f"<{number}>" for number in range(shape.vocab - 257))])
    writer.add_token_merges(["a a"])

    def add(name: str, values: torch.Tensor) -> None:
        writer.add_tensor(name, values.float().contiguous().numpy())

    add("token_embd.weight", source.tensor("model.embed_tokens.weight"))
    add("output_norm.weight", source.tensor("model.norm.weight"))
    if not shape.tied_embeddings:
        add("output.weight", source.tensor("lm_head.weight"))
    add("rope_freqs.weight", torch.tensor(rope))
    for layer in range(shape.layers):
        for ours, theirs in GGUF_NAMES.items():
            values = source.tensor(f"model.layers.{layer}.{theirs}.weight")
            if ours in ("attn_q", "attn_k"):
                values = in_pairs(values, shape.heads if ours == "attn_q" else shape.kv_heads)
            add(f"blk.{layer}.{ours}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reply(model: LoadedModel) -> list[int]:
    prompt = [(37 * at) % 256 for at in range(200)]
    return token_ids(finish_all(make_engine(model), [greedy_request("a", prompt, 16)])["a"])


def test_llama_3_scaling_in_a_gguf_is_that_of_a_config(tmp_path: Path) -> None:
    shape = tiny_shape()
    source = RandomWeights(shape, 0)
    write_gguf(tmp_path / "scaled.gguf", shape, source, divisors(shape))
    loaded = load_model(str(tmp_path / "scaled.gguf"))
    by_rule = replace(shape, rotary=Rotary(shape.rotary.theta, llama3=SCALING))
    assert inverse_frequencies(loaded.shape.rotary, shape.head_dim) == pytest.approx(
        inverse_frequencies(by_rule.rotary, shape.head_dim)
    )
    wanted = replace(loaded, shape=by_rule, weights=assemble(source, by_rule, torch.float32))
    unscaled = replace(loaded, shape=shape, weights=assemble(source, shape, torch.float32))
    assert reply(loaded) == reply(wanted) != reply(unscaled)
    with pytest.raises(ModelError, match="scales its rotary embedding"):
        export_model(str(tmp_path / "scaled.gguf"), tmp_path / "folder")


@pytest.mark.parametrize("wrong", [[1.0], [1.0] * 7 + [0.0]], ids=["too few", "zero"])
def test_divisors_that_are_none_are_refused(wrong: list[float]) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "llama.embedding_length": 64,
        "llama.block_count": 1,
    }
    with pytest.raises(ModelError, match=r"rope_freqs\.weight: expected 8 numbers above 0"):
        shape_from_gguf(metadata, frozenset(), wrong)
