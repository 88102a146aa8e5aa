"""Models for the tests: the tiny one, the real one, and Hugging Face references with the same weights."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.model.gguf_file import GgufFile
from replica.model.load import LoadedModel, load_model, smollm2_path
from replica.model.sampling import Sampling, StopRule
from replica.model.shape import ModelError
from replica.model.tiny import hf_config
from replica.request import Delta, Request

torch.set_num_threads(1)

GREEDY = Sampling(temperature=0.0)


@cache
def random_model(name: str) -> LoadedModel:
    """The tiny model of this name and seed 0."""
    return load_model(name)


def tiny() -> LoadedModel:
    """The tiny model of seed 0."""
    return random_model("tiny")


def smollm2_is_installed() -> bool:
    """Whether the package with the real model is here."""
    try:
        smollm2_path()
    except ModelError:
        return False
    return True


@cache
def smollm2() -> LoadedModel:
    """The real model, fp32."""
    return load_model("smollm2")


def smollm2_reference() -> Any:
    """``transformers``' Llama with the dequantised weights of the GGUF, read apart from our assembly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file = GgufFile(smollm2_path())
    shape = smollm2().shape
    reference = LlamaForCausalLM(LlamaConfig(**hf_config(shape, "llama")))
    weights = {
        name: file.tensor("model.embed_tokens.weight" if name == "lm_head.weight" else name)
        for name in reference.state_dict()
    }
    reference.load_state_dict(weights)
    return reference.eval()


def reference_from(folder: Path) -> Any:
    """``transformers``' model in a Hugging Face folder, fp32."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return loaded.eval()


def reference_tokens(reference: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What the reference finds likeliest after ``prompt`` and after each of ``output`` but the last.

    Equal to ``output`` exactly when the reference, decoding greedily, generates ``output``: by induction,
    each token is its choice after the same tokens.
    """
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *output[:-1]]])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return tokens


def make_engine(model: LoadedModel | None = None, **limits: Any) -> Engine:
    """An engine over ``model`` (tiny unless given) with small limits."""
    chosen = {"kv_blocks": 128, "max_model_len": 1024} | limits
    return Engine(model or tiny(), EngineLimits(**chosen))


def greedy_request(name: str, prompt: Sequence[int], max_tokens: int, **stops: Any) -> Request:
    """A greedy request that stops only at ``max_tokens`` unless a stop rule is given."""
    return Request(name, tuple(prompt), max_tokens, GREEDY, StopRule(**stops))


def finish_all(engine: Engine, requests: Iterable[Request]) -> dict[str, list[Delta]]:
    """Give all requests to the engine at once, run it until it has no work; deltas by request."""
    deltas: dict[str, list[Delta]] = {}
    for request in requests:
        deltas[request.request_id] = []
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    engine.check_invariants()
    return deltas


def token_ids(deltas: Iterable[Delta]) -> list[int]:
    """The generated token ids of one request."""
    return [drawn.token for delta in deltas for drawn in delta.tokens]


def text_of(deltas: Iterable[Delta]) -> str:
    """The generated text of one request."""
    return "".join(delta.text for delta in deltas)
