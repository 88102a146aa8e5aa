"""Reads a Hugging Face model folder: config.json and its safetensors files."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from replica.model.shape import ModelError


class HfFolder:
    """One model folder; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Read config.json and find out which file holds which tensor.

        Raises:
            ModelError: a file is missing or damaged.
        """
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path}: no *.safetensors file; convert the weights with save_pretrained()")
        self._file_of: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._file_of.update(dict.fromkeys(tensors.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error

    @property
    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors in the folder."""
        return frozenset(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name in the type it is stored in.

        Raises:
            ModelError: no such tensor.
        """
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self.path}: the tensor {name!r} is missing")
        with safe_open(file, framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
        return found

    def optional_json(self, name: str) -> dict[str, Any]:
        """The JSON object in this file of the folder; empty when there is no such file."""
        return read_json(self.path / name) if (self.path / name).is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        ModelError: no such file, or no JSON object in it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
