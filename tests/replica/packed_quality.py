"""``python -m tests.replica.packed_quality``: what packed weights cost SmolLM2 in quality, beside dense bf16.

Teacher-forced over the beginnings of three files of this repository (prose, a list, code): the KL divergence
of each next-token distribution from dense bf16's, in nats, and how often the likeliest token is the same.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from replica.batch import Batch, Work
from replica.model.decoder import Decoder
from replica.model.load import LoadedModel, WeightsKind, load_model
from replica.model.paged_kv import PagedKv
from replica.model.step_plan import plan_step
from replica.sequence import Sequence

ROOT = Path(__file__).parents[2]
TEXTS = ("docs/kv_cache.md", "docs/glossary.md", "replica/sequence.py")
TOKENS = 300
"""Of each text."""
KINDS: tuple[WeightsKind, ...] = ("int8", "file", "int4")
BLOCK = 16


def log_likelihoods(model: LoadedModel, text: str) -> torch.Tensor:
    """[tokens, vocab]: of every token after each of the text's first ``TOKENS``."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False)[:TOKENS]
    sequence = Sequence("text", tokens, 1)
    sequence.block_table = list(range(-(-len(tokens) // BLOCK)))
    dtype = model.weights.embedding.dtype
    kv = PagedKv(model.shape, len(sequence.block_table), BLOCK, dtype)
    whole = Batch((Work(sequence, 0, len(tokens), True),), 0, 0, len(tokens))
    plan = replace(plan_step(whole, BLOCK, dtype, whole_last_layer=True), sampled=torch.arange(len(tokens)))
    logits, _ = Decoder(model.shape, model.weights, kv).forward(plan)
    return logits.log_softmax(-1)


def main() -> int:
    """Measure and print a line for each kind of weights."""
    texts = [(ROOT / name).read_text() for name in TEXTS]
    dense = load_model("smollm2", "bf16")
    wanted = [log_likelihoods(dense, text) for text in texts]
    print(f"{sum(map(len, wanted))} tokens   KL mean   KL p99   KL worst   same likeliest token")
    for kind in KINDS:
        began_s = time.monotonic()
        packed = load_model("smollm2", "bf16", weights=kind)
        found = [log_likelihoods(packed, text) for text in texts]
        apart = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(wanted, found, strict=True)])
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(wanted, found, strict=True)])
        print(
            f"{kind:8} {apart.mean():12.4f} {apart.quantile(0.99):8.3f} {apart.max():10.3f} "
            f"{same.float().mean():12.3f}     ({time.monotonic() - began_s:.0f} s)",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
