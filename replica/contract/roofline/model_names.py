"""Which model shape and precision a served model's name stands for."""

from replica.contract.roofline.model_shapes import MODEL_SHAPES

_PRECISIONS = {
    "fp8": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "int4": "int4",
    "w4a16": "int4",
    "int8": "int8",
    "w8a8": "int8",
    "mxfp4": "mxfp4",
}
_NATIVE_PRECISIONS = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "deepseek-v3": "fp8"}
"""Of models that are published in fewer than 16 bits."""
_SAYS_NOTHING = frozenset(
    ("meta", "instruct", "chat", "it", "hf", "base", "dynamic", "quantized", "2507", "v0.3")
)


def named_model(name: str) -> tuple[str, str] | None:
    """(key of ``MODEL_SHAPES``, key of ``PRECISIONS``) of a model as it is served; ``None`` if unknown.

    >>> named_model("meta-llama/Meta-Llama-3.1-8B-Instruct"), named_model("Qwen/Qwen3-32B-AWQ")
    (('llama-3.1-8b', 'bf16'), ('qwen3-32b', 'int4'))
    >>> named_model("openai/gpt-oss-120b"), named_model("my-finetune")
    (('gpt-oss-120b', 'mxfp4'), None)
    """
    precision = None
    kept = []
    for part in name.rsplit("/", 1)[-1].lower().split("-"):
        if part in _PRECISIONS:
            precision = _PRECISIONS[part]
        elif part not in _SAYS_NOTHING:
            kept.append(part)
    shape = "-".join(kept)
    if shape not in MODEL_SHAPES:
        return None
    return shape, precision or _NATIVE_PRECISIONS.get(shape, "bf16")
