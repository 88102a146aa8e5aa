"""The kernel for a bf16 chunk's attention: right, the same however a prompt is cut, used where it can be."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as functional

from replica.batch import Batch, Work
from replica.model import attention, native_chunk
from replica.model.native_chunk import KernelMemory, NativeChunk, is_native
from replica.model.paged_kv import PagedKv
from replica.model.runner import ModelRunner
from replica.model.shape import ModelShape
from replica.model.step_plan import PrefillSpan
from replica.model.tiny import RandomWeights, tiny_shape
from replica.model.weights import assemble
from replica.sequence import Sequence
from tests.replica.models import tiny

kernel = native_chunk.kernel
runs_here = pytest.mark.skipif(
    kernel is None or not kernel.supported(),
    reason="the kernel was not built (make compile), or this processor has no AVX512-BF16",
)
BLOCKS = 40


def _shape(heads: int = 6, kv_heads: int = 2, dim: int = 64) -> ModelShape:
    return replace(tiny_shape(), heads=heads, kv_heads=kv_heads, head_dim=dim)


def _kv(shape: ModelShape, block_size: int) -> PagedKv:
    kv = PagedKv(shape, BLOCKS, block_size, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for layer in range(shape.layers):
        kv.layer(layer).copy_(torch.randn(kv.layer(layer).shape, generator=generator))
    return kv


def _chunk(
    shape: ModelShape,
    kv: PagedKv,
    prefix: int,
    queries: torch.Tensor,
    table: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Of layer 1: [rows, heads * dim]; the rows lie between others, which must stay as they are."""
    rows, width = queries.shape[0], shape.heads * shape.head_dim
    among = torch.full((rows + 2, shape.heads + 3, shape.head_dim), float("nan"), dtype=torch.bfloat16)
    among[1:-1, : shape.heads] = queries
    out = torch.full((rows + 2, width), 7.0, dtype=torch.bfloat16)
    span = PrefillSpan(1, rows + 1, prefix, table)
    chunk = NativeChunk(span, kv, shape.heads, out, KernelMemory())
    chunk(1, window, among[:, : shape.heads], torch.empty(0))
    assert (out[[0, -1]] == 7).all(), "it wrote beside its rows"
    return out[1:-1]


def _by_definition(
    shape: ModelShape,
    kv: PagedKv,
    prefix: int,
    queries: torch.Tensor,
    table: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    rows = queries.shape[0]
    keys, values = kv.layer(1)[table].flatten(0, 1)[: prefix + rows].float().chunk(2, 1)
    seen = torch.ones(rows, prefix + rows, dtype=torch.bool).tril(prefix)
    if window is not None:
        seen &= ~torch.ones_like(seen).tril(prefix - window)
    attended = functional.scaled_dot_product_attention(
        queries.float().transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=seen,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1).flatten(1)


@runs_here
@pytest.mark.parametrize("window", [None, 1, 24, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (9, 3, 64), (4, 4, 128), (8, 1, 192)])
@pytest.mark.parametrize(
    ("prefix", "rows", "block_size"), [(0, 2, 16), (0, 130, 16), (203, 61, 16), (130, 300, 32)]
)
def test_it_computes_what_the_definition_says(
    prefix: int, rows: int, block_size: int, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    shape = _shape(heads, kv_heads, dim)
    kv = _kv(shape, block_size)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
    queries = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    given = (shape, kv, prefix, queries, table, window)
    torch.testing.assert_close(_chunk(*given).float(), _by_definition(*given), atol=0.02, rtol=0.01)


@runs_here
@pytest.mark.parametrize("window", [None, 70])
def test_a_row_has_the_same_bits_however_a_prompt_is_cut(window: int | None) -> None:
    shape = _shape()
    kv = _kv(shape, 16)
    table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
    queries = torch.randn(
        500, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(3)
    ).bfloat16()
    whole = _chunk(shape, kv, 0, queries, table, window)
    for cuts in ((0, 1, 500), (0, 64, 333, 500), (0, 250, 251, 252, 500)):
        parts = [
            _chunk(shape, kv, first, queries[first:stop], table, window) for first, stop in pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole)


@runs_here
def test_large_scores_and_many_threads_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    shape = _shape()
    kv = _kv(shape, 16)
    table = torch.arange(BLOCKS)
    queries = 1e4 * torch.randn(100, shape.heads, shape.head_dim, generator=torch.Generator().manual_seed(3))
    given = (shape, kv, 60, queries.bfloat16(), table, None)
    torch.testing.assert_close(_chunk(*given).float(), _by_definition(*given), atol=0.02, rtol=0.01)


@runs_here
@pytest.mark.parametrize("window", [None, 24])
def test_a_model_computes_with_it_what_it_does_without(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_amx", lambda: False)
    shape = replace(_shape(), windows=(window, window))
    model = replace(tiny(), shape=shape, weights=assemble(RandomWeights(shape, 0), shape, torch.bfloat16))
    tokens = Sequence("a", [(13 * i + i // 5) % 256 for i in range(300)], 1)
    tokens.block_table = list(range(5, 24))

    def logits(chunk: int) -> torch.Tensor:
        runner = ModelRunner(model, blocks=BLOCKS, block_size=16)
        for first in range(0, 300, chunk):
            row = Work(tokens, first, min(chunk, 300 - first), first + chunk >= 300)
            _, last = runner.run(Batch([row], 0, 0, row.count))
        return last[0]

    with monkeypatch.context() as without:
        without.setattr(native_chunk, "kernel", None)
        expected = logits(300)
    for chunk in (300, 130, 7):
        torch.testing.assert_close(logits(chunk), expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_it_is_used_only_for_kv_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        supported: Callable[[], bool] = staticmethod(lambda: True)

    def kv(dim: int = 64, dtype: torch.dtype = torch.bfloat16, *, int8: bool = False) -> PagedKv:
        return PagedKv(_shape(dim=dim), 4, 16, dtype, int8=int8)

    monkeypatch.setattr(native_chunk, "kernel", Kernel)
    assert is_native(kv()) and is_native(kv(128))
    assert not any(map(is_native, (kv(32), kv(1024), kv(dtype=torch.float32), kv(int8=True))))
    monkeypatch.setattr(Kernel, "supported", staticmethod(lambda: False))
    assert not is_native(kv())
    monkeypatch.setattr(native_chunk, "kernel", None)
    assert not is_native(kv())
