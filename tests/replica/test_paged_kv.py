"""The KV memory: a block's layers lie together, and memory is taken ahead without touching what is stored."""

import asyncio

import pytest
import torch

from replica.model import paged_kv
from replica.model.attention_products import KEPT_BYTES, ScoreMemory
from replica.model.paged_kv import PagedKv
from replica.model.tiny import tiny_shape
from tests.fakes.proxy_rig import until
from tests.replica.serving import replica

BLOCKS, PAGE = 8, 4


def small() -> PagedKv:
    return PagedKv(tiny_shape(), BLOCKS, PAGE, torch.float32)


def stored_everywhere(kv: PagedKv, slots: torch.Tensor) -> list[torch.Tensor]:
    """Other numbers for each layer, stored at ``slots``."""
    values = [torch.randn(len(slots), 2 * kv.heads, kv.head_dim) for _ in range(kv.places)]
    rows = kv.rows(slots)
    for layer, kept in enumerate(values):
        kv.store(layer, rows, kept)
    return values


def test_a_layer_gets_back_what_it_stored_and_no_other() -> None:
    kv = small()
    order = torch.randperm(BLOCKS)
    slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
    values = stored_everywhere(kv, slots)
    context, by_head = kv.context(order), kv.context_by_head(order)
    for layer, kept in enumerate(values):
        context.load(layer)
        assert torch.equal(context.values.flatten(0, 1), kept)
        by_head.load(layer)
        assert torch.equal(by_head.values, kept.transpose(0, 1))


def test_what_a_block_is_the_first_to_write_lies_in_one_stretch() -> None:
    kv = small()
    stored_everywhere(kv, torch.arange(PAGE))
    written = kv._memory.flatten().nonzero().flatten()
    assert written.max() - written.min() < PAGE * kv.bytes_per_token // 4


def test_memory_is_taken_ahead_of_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = small()
    block = PAGE * kv.bytes_per_token
    monkeypatch.setattr(paged_kv, "PIECE_BYTES", block // 2)
    monkeypatch.setattr(paged_kv, "AHEAD_BYTES", 2 * block)
    assert [kv.take_ahead() for _ in range(6)] == [True] * 4 + [False] * 2
    slots = torch.arange(3 * PAGE)
    values = stored_everywhere(kv, slots)
    assert [kv.take_ahead() for _ in range(6)] == [True] * 4 + [False] * 2
    context = kv.context(torch.arange(3))
    context.load(0)
    assert torch.equal(context.values.flatten(0, 1), values[0]), "what is stored stays"
    stored_everywhere(kv, torch.arange(BLOCKS * PAGE))
    assert not kv.take_ahead(), "all of it is in use"


def test_a_replica_with_nothing_to_do_takes_memory_ahead() -> None:
    async def serve() -> None:
        async with replica() as running:
            kv = running.engine._engine._kv
            await until(lambda: kv._taken_bytes == kv._memory.nbytes)

    asyncio.run(serve())


def test_memory_for_scores_is_kept_unless_it_is_large() -> None:
    memory = ScoreMemory()
    scores, shares = memory.take(100)
    assert (scores.shape, shares.shape) == ((100,), (100,))
    scores.fill_(1.0)
    shares.zero_()
    assert scores.sum() == 100, "they do not share memory"
    assert memory.take(50)[0].data_ptr() == scores.data_ptr()
    large = KEPT_BYTES // 4 + 1
    assert memory.take(large)[0].shape == (large,)
    assert memory.take(50)[0].data_ptr() == scores.data_ptr()
