"""Packs a model's 4-bit matrices for the inputs they get while it reads a page of text.

Rounding to 16 values hurts where inputs are large, and which are is only seen in use: a few columns of
SmolLM2's layers are hundreds of times as large as the others. One forward pass at load, layer by layer, so
that one dense matrix is in memory at a time.
"""

from dataclasses import replace

import torch

from replica.batch import Batch, Work
from replica.model.decoder import Decoder
from replica.model.fitted_matrix import FittedMatrix
from replica.model.matrix import Matrix
from replica.model.paged_kv import PagedKv
from replica.model.shape import ModelShape
from replica.model.step_plan import plan_step
from replica.model.tokenizer import Tokenizer
from replica.model.weights import Weights
from replica.sequence import Sequence

PAGE = """The harbour of the old town lies in the north-west, and on market days the ferries bring 300 people.
"Where does this bread come from?" she asked. "From the mill behind the church," he said, "and it costs 2.50."

Water boils at 100 degrees Celsius at sea level; at 3,000 m it boils at 90, because the pressure is lower.

1. Wash the lentils and let them drain.
2. Fry an onion in oil, add 2 cups of water, and cook everything for 25 minutes.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

{"name": "Ada", "tags": ["math", "engine"], "born": 1815, "active": false}

User: Can you tell me in one sentence why the sky is blue?
Assistant: Air scatters short waves of light more than long ones, so blue reaches us from every direction.
La biblioteca abre a las nueve. Die Sonne scheint, aber es ist kalt. Le train part dans dix minutes.
"""
MOST_TOKENS = 512
BLOCK = 16


def fitted(weights: Weights, shape: ModelShape, tokenizer: Tokenizer) -> Weights:
    """``weights`` with each ``FittedMatrix`` packed, by one pass over ``PAGE``.

    Raises:
        ModelError: a tensor is missing or has another shape than ``shape`` says.
    """
    tokens = tokenizer.encode(PAGE, add_special_tokens=True)[: min(MOST_TOKENS, shape.context)]
    blocks = -(-len(tokens) // BLOCK)
    sequence = Sequence("page", tokens, 1)
    sequence.block_table = list(range(blocks))
    batch = Batch((Work(sequence, 0, len(tokens), True),), 0, 0, len(tokens))
    # In fp32 whatever the model's type is: bf16 kernels differ from processor to processor.
    exact = replace(weights, embedding=weights.embedding.float())
    kv = PagedKv(shape, blocks, BLOCK, torch.float32)
    plan = plan_step(batch, BLOCK, torch.float32, whole_last_layer=True)
    Decoder(shape, exact, kv).forward(plan)
    return replace(
        weights,
        layers=tuple(
            replace(
                layer,
                qkv=_packed(layer.qkv),
                output=_packed(layer.output),
                gate_up=_packed(layer.gate_up),
                down=_packed(layer.down),
            )
            for layer in weights.layers
        ),
    )


def _packed(matrix: Matrix) -> Matrix:
    assert isinstance(matrix, FittedMatrix) and matrix.packed is not None
    return matrix.packed
