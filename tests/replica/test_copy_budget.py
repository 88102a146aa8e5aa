"""Several fetches at once share what may be written to the device between two steps."""

import pytest
import torch

from replica.engine_limits import TierLimits
from replica.model.paged_kv import PagedKv
from replica.tier_movers import torch_mover
from replica.tier_movers.torch_mover import TorchMover
from tests.replica.equality_fuzz import BLOCK, DEAR
from tests.replica.models import finish_all, greedy_request, make_engine, tiny, token_ids

PROMPTS = [tuple((7 * i + 31 * number) % 256 for i in range(70)) for number in range(8)]
"""Four whole blocks and a bit."""
BUDGET_BLOCKS = 3


def test_concurrent_fetches_share_the_bytes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(
        tiny(),
        kv_blocks=24,
        max_model_len=112,
        batch_invariant=True,
        tiers=TierLimits(prefill=DEAR, host_bytes=60 * BLOCK),
    )
    right = [
        token_ids(finish_all(engine, [greedy_request("a", prompt, 8)])["a"]) for prompt in PROMPTS
    ]  # the last five push the first three out
    monkeypatch.setattr(torch_mover, "COPY_BYTES", BUDGET_BLOCKS * BLOCK)
    turns: list[int] = []
    write, advance = PagedKv.write, TorchMover.advance

    def counting(kv: PagedKv, slots: torch.Tensor, values: torch.Tensor) -> None:
        turns[-1] += len(slots) // 16
        write(kv, slots, values)

    def turn(mover: TorchMover, wait_s: float = 0.0) -> None:
        turns.append(0)
        advance(mover, wait_s)

    monkeypatch.setattr(PagedKv, "write", counting)
    monkeypatch.setattr(TorchMover, "advance", turn)
    for number in range(3):
        engine.add(greedy_request(str(number), PROMPTS[number], 8))
    got: dict[str, list[int]] = {str(number): [] for number in range(3)}
    cached = {}
    while engine.has_work:
        for delta in engine.step():
            got[delta.request_id] += [drawn.token for drawn in delta.tokens]
            cached[delta.request_id] = delta.cached_tokens
    assert sum(turns) == 12 and set(cached.values()) == {64}, "three fetches of four blocks"
    assert max(turns) == BUDGET_BLOCKS
    assert got == {str(number): right[number] for number in range(3)}
    engine.close()
