"""Model shapes by name, from each model's published ``config.json``.

>>> round(MODEL_SHAPES["gpt-oss-120b"].weights / 1e9, 1), MODEL_SHAPES["deepseek-v3"].kv_bytes_per_token()
(116.8, 70272.0)
"""

from collections.abc import Mapping

from replica.contract.roofline.model_shape import Experts, LatentAttention, ModelShape, RecurrentState


def _hf(repository: str) -> str:
    return f"https://huggingface.co/{repository}/blob/main/config.json"


_ALL = (
    ModelShape("smollm2-135m", _hf("HuggingFaceTB/SmolLM2-135M-Instruct"), 30, 576, 9, 3, 64, 1_536, 49_152,
               tied_embeddings=True),
    ModelShape("llama-3.2-1b", _hf("meta-llama/Llama-3.2-1B"), 16, 2_048, 32, 8, 64, 8_192, 128_256,
               tied_embeddings=True),
    ModelShape("llama-3.2-3b", _hf("meta-llama/Llama-3.2-3B"), 28, 3_072, 24, 8, 128, 8_192, 128_256,
               tied_embeddings=True),
    ModelShape("llama-3.1-8b", _hf("meta-llama/Llama-3.1-8B"), 32, 4_096, 32, 8, 128, 14_336, 128_256),
    ModelShape("llama-3.1-70b", _hf("meta-llama/Llama-3.1-70B"), 80, 8_192, 64, 8, 128, 28_672, 128_256),
    ModelShape("llama-3.1-405b", _hf("meta-llama/Llama-3.1-405B"), 126, 16_384, 128, 8, 128, 53_248, 128_256),
    ModelShape("mistral-7b", _hf("mistralai/Mistral-7B-v0.3"), 32, 4_096, 32, 8, 128, 14_336, 32_768),
    ModelShape("qwen2.5-7b", _hf("Qwen/Qwen2.5-7B"), 28, 3_584, 28, 4, 128, 18_944, 152_064),
    ModelShape("qwen2.5-72b", _hf("Qwen/Qwen2.5-72B"), 80, 8_192, 64, 8, 128, 29_568, 152_064),
    ModelShape("qwen3-0.6b", _hf("Qwen/Qwen3-0.6B"), 28, 1_024, 16, 8, 128, 3_072, 151_936,
               tied_embeddings=True),
    ModelShape("qwen3-8b", _hf("Qwen/Qwen3-8B"), 36, 4_096, 32, 8, 128, 12_288, 151_936),
    ModelShape("qwen3-32b", _hf("Qwen/Qwen3-32B"), 64, 5_120, 64, 8, 128, 25_600, 151_936),
    ModelShape(
        "qwen3-30b-a3b", _hf("Qwen/Qwen3-30B-A3B"), 48, 2_048, 32, 4, 128, 6_144, 151_936,
        experts=Experts(count=128, active=8, ffn=768),
    ),
    ModelShape(
        "mixtral-8x7b", _hf("mistralai/Mixtral-8x7B-v0.1"), 32, 4_096, 32, 8, 128, 14_336, 32_000,
        experts=Experts(count=8, active=2, ffn=14_336),
    ),
    ModelShape(
        "gpt-oss-20b", _hf("openai/gpt-oss-20b"), 24, 2_880, 64, 8, 64, 2_880, 201_088,
        experts=Experts(count=32, active=4, ffn=2_880), windowed_layers=12, window_tokens=128,
    ),
    ModelShape(
        "gpt-oss-120b", _hf("openai/gpt-oss-120b"), 36, 2_880, 64, 8, 64, 2_880, 201_088,
        experts=Experts(count=128, active=4, ffn=2_880), windowed_layers=18, window_tokens=128,
    ),
    ModelShape(
        "deepseek-v3", _hf("deepseek-ai/DeepSeek-V3"), 61, 7_168, 128, 128, 128, 18_432, 129_280,
        experts=Experts(count=256, active=8, ffn=2_048, shared_ffn=2_048, dense_layers=3),
        latent=LatentAttention(kv_rank=512, rope_dim=64, q_rank=1_536, nope_dim=128, value_dim=128),
    ),
    ModelShape(
        # 3 of 4 layers are gated DeltaNet: 16 key and 32 value heads of 128.
        "qwen3-next-80b-a3b", _hf("Qwen/Qwen3-Next-80B-A3B-Instruct"), 48, 2_048, 16, 2, 256, 5_120, 151_936,
        experts=Experts(count=512, active=10, ffn=512, shared_ffn=512), attention_gate=True,
        state=RecurrentState(
            layers=36, heads=32, key_dim=128, value_dim=128,
            conv_channels=2 * 16 * 128 + 32 * 128, conv_kernel=4,
            projections=2_048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2_048,
        ),
    ),
    ModelShape(
        # 29 of 32 layers are Mamba-2: 128 heads of 64, a state of 128 columns, one group.
        "bamba-9b", _hf("ibm-ai-platform/Bamba-9B-v2"), 32, 4_096, 32, 8, 128, 14_336, 128_256,
        state=RecurrentState(
            layers=29, heads=128, key_dim=128, value_dim=64,
            conv_channels=128 * 64 + 2 * 128, conv_kernel=4,
            projections=4_096 * (2 * 8_192 + 2 * 128 + 128) + 8_192 * 4_096,
        ),
    ),
)  # fmt: skip

MODEL_SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in _ALL}
