"""Writes a model that was read from a GGUF file, or made from a seed, as a Hugging Face folder.

Run as ``python -m replica.model.hf_export MODEL FOLDER``, it writes in bf16, for other engines to load.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from replica.model import tiny
from replica.model.gguf_file import GgufFile
from replica.model.load import LoadedModel, load_model, smollm2_path
from replica.model.shape import ModelError, Rotary
from replica.model.weights import TensorSource, tensor_names


def export_model(model: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``smollm2``, ``tiny`` or a .gguf file of a Llama as a Hugging Face folder.

    Raises:
        ModelError: it cannot be loaded, or is of a family whose config this does not know to write.
    """
    loaded = load_model(model)
    source: TensorSource
    if model == "tiny":
        source = tiny.RandomWeights(loaded.shape, 0)
    else:
        source = file = GgufFile(smollm2_path() if model == "smollm2" else Path(model))
        family = file.metadata["general.architecture"]
        if family != "llama":
            raise ModelError(f"model {model!r} is a {family}; only a llama can be written as a folder")
        if loaded.shape.rotary != Rotary(loaded.shape.rotary.theta):
            raise ModelError(f"model {model!r} scales its rotary embedding, which this does not write")
    write_folder(loaded, source, folder, dtype)


def write_folder(loaded: LoadedModel, source: TensorSource, folder: Path, dtype: torch.dtype) -> None:
    """``source``'s tensors in ``dtype``, with the config, tokenizer and chat template of ``loaded``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: source.tensor(name).to(dtype).contiguous() for name in tensor_names(loaded.shape)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = sorted(loaded.end_ids)
    config = tiny.hf_config(loaded.shape, "llama") | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": ends[0] if ends else None,
        "eos_token_id": ends,
    }
    template = loaded.chat_template
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings |= {"chat_template": template.source, **template.special_tokens}
    for name, text in (
        ("config.json", json.dumps(config)),
        ("tokenizer.json", loaded.tokenizer.to_json()),
        ("tokenizer_config.json", json.dumps(settings)),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """MODEL FOLDER; 0 written, 1 not."""
    model, folder = arguments
    try:
        export_model(model, Path(folder))
    except (ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
