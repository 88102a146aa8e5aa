"""One measured run of a real engine: what was asked, when, and the times at which tokens came.

A folder with ``meta.json`` (model, engine arguments, KV blocks, GPU) and ``requests.jsonl``, as
LLMServingSim's benchmark of vLLM writes them (github.com/casys-kaist/LLMServingSim, MIT). A request has
``arrival_time`` on the wall clock and ``queued_ts``, ``first_token_ts``, ``last_token_ts`` on the engine's:
the clocks are laid over one another where the smallest delay between arriving and being queued is none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from sim.outcome import Outcome

_GPU_NAMES = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000", "H100": "h100", "A100": "a100-80g"}
_NUMBERS = ("input_toks", "output_toks", "arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


class MeasuredRunError(ValueError):
    """A run that cannot be used; the message says file, line, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Requests in order of arrival with what became of them."""

    name: str
    model: str
    """Key of ``MODEL_SHAPES``."""
    gpu: str
    """Key of ``GPUS``."""
    max_running: int
    max_batched_tokens: int
    block_tokens: int
    kv_tokens: int | None
    """KV tokens the engine had; ``None`` when it was not recorded."""
    tensor_parallel: int
    outcomes: tuple[Outcome, ...]
    """``sent_s`` counts from the first arrival."""


def read_measured_run(folder: str | Path) -> MeasuredRun:
    """The run in ``folder``. Raises ``MeasuredRunError``."""
    folder = Path(folder)
    meta = _json(folder / "meta.json", _bytes(folder / "meta.json"))
    try:
        engine = meta["engine_kwargs"]
        model = str(engine["model"]).rsplit("/", 1)[-1].lower()
        kv = meta.get("kv_cache") or {}
        limits = (int(engine["max_num_seqs"]), int(engine["max_num_batched_tokens"]))
        tensor_parallel = int(engine.get("tensor_parallel_size") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise MeasuredRunError(
            f"{folder / 'meta.json'}: {error!r}; expected engine_kwargs with model, max_num_seqs and "
            "max_num_batched_tokens"
        ) from error
    gpu = _GPU_NAMES.get(folder.name.split("_", 1)[0])
    if model not in MODEL_SHAPES or gpu not in GPUS:
        raise MeasuredRunError(
            f"{folder}: model {model!r} on GPU {folder.name.split('_', 1)[0]!r}; expected a model of "
            f"{', '.join(MODEL_SHAPES)} and a folder that begins with one of {', '.join(_GPU_NAMES)}"
        )
    assert gpu is not None
    return MeasuredRun(
        name=folder.name,
        model=model,
        gpu=gpu,
        max_running=limits[0],
        max_batched_tokens=limits[1],
        block_tokens=int(kv.get("block_size") or 16),
        kv_tokens=int(kv["num_kv_tokens"]) if kv.get("num_kv_tokens") else None,
        tensor_parallel=tensor_parallel,
        outcomes=_outcomes(folder / "requests.jsonl"),
    )


def _outcomes(path: Path) -> tuple[Outcome, ...]:
    rows = []
    for number, line in enumerate(_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        row = _json(path, line, number)
        for name in _NUMBERS:
            if type(row.get(name)) not in (int, float):
                raise MeasuredRunError(f"{path}, line {number}: {name} is {row.get(name)!r}, not a number")
        rows.append(row)
    if not rows:
        raise MeasuredRunError(f"{path}: empty; expected one JSON object per request")
    rows.sort(key=lambda row: row["arrival_time"])
    engine_ahead_s = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    start_s = rows[0]["arrival_time"]
    return tuple(
        Outcome(
            sent_s=row["arrival_time"] - start_s,
            prompt_tokens=row["input_toks"],
            output_tokens=row["output_toks"],
            cached_tokens=0,
            ttft_s=row["first_token_ts"] - engine_ahead_s - row["arrival_time"],
            e2e_s=row["last_token_ts"] - engine_ahead_s - row["arrival_time"],
            replica=0,
        )
        for row in rows
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MeasuredRunError(f"{path}: cannot be read: {error}") from error


def _json(path: Path, text: bytes, line: int | None = None) -> dict[str, Any]:
    where = f"{path}, line {line}" if line else str(path)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MeasuredRunError(f"{where}: not JSON: {error}") from error
    if type(value) is not dict:
        raise MeasuredRunError(f"{where}: a JSON {type(value).__name__}; expected an object")
    return value
