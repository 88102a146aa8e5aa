"""Turns a batch into the index tensors of one forward pass, once per step and shared by all layers.

The tokens of all rows lie on one axis, decode rows first::

    token axis   d0 d1 d2 | p0 p0 p0 p0 | p1 p1 p1
                 decodes    prefill rows (count tokens each, at positions start .. start + count - 1)
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch

from replica.batch import Batch, Work
from replica.sequence import Sequence

PADDING_SHARE = 0.25
"""Decode rows share one padded attention call while padding is at most this share of their blocks."""
INVARIANT_CONTEXT = 512
"""torch's CPU attention takes keys in runs of 512; how it adds up a shorter run depends on its length."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows ``first .. stop - 1`` of the token axis, padded to one context length."""

    first: int
    stop: int
    blocks: torch.Tensor
    """[rows * blocks per row]; padding repeats the row's last block and is masked."""
    context: int
    """Keys each row is given; those past its own length are masked."""
    lengths: torch.Tensor
    """[rows]: keys each row may see without a window."""
    mask: torch.Tensor | None
    """[rows, 1, 1, context], 0 or -inf, added to the scores; None when every row sees all."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens ``first .. stop - 1`` of the axis: one sequence's chunk, after ``prefix`` computed tokens."""

    first: int
    stop: int
    prefix: int
    blocks: torch.Tensor | None
    """Blocks of the whole context (padding repeats the last and is masked); None when there is no prefix and
    the chunk's own K and V are all there is to attend to."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Tokens ``first .. stop - 1`` of the axis advance the recurrent state in ``slot``."""

    first: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything a forward pass needs to know."""

    tokens: torch.Tensor
    """[tokens] ids."""
    positions: torch.Tensor
    """[tokens]."""
    slots: torch.Tensor
    """[tokens]: where each token's K and V go."""
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]
    sampled: torch.Tensor
    """[samples]: the token-axis places whose logits are wanted, in the order of ``works``."""
    works: tuple[Work, ...]
    """The rows that sample."""
    states: tuple[StateSpan, ...]
    """One for each row, where the model has recurrent layers."""
    last_layer: tuple[DecodeGroup, ...] | None
    """Over ``sampled`` instead of the token axis: who attends in the last layer, of which nothing but its K
    and V is ever read of the other tokens. None: all tokens do."""


def plan_step(
    batch: Batch,
    block_size: int,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    reads_back: bool = False,
    whole_last_layer: bool = False,
    state_slot: Callable[[Sequence], int] | None = None,
) -> StepPlan:
    """Lay out ``batch``; ``dtype`` is that of the attention scores' mask.

    ``batch_invariant`` pads every context to a multiple of INVARIANT_CONTEXT tokens. ``reads_back``: a chunk
    attends to its own K and V as they are stored, because storing rounds them. ``whole_last_layer``: it is
    computed for all tokens; so it is where ``batch_invariant``.
    ``state_slot``: where a sequence's recurrent state is, if the model has any.
    """
    unit = max(1, INVARIANT_CONTEXT // block_size) if batch_invariant else 1
    # Rows of one token are alike, whether they decode or end a prefill; shortest context first.
    singles = sorted((row for row in batch.rows if row.count == 1), key=lambda row: row.start)
    spans = [row for row in batch.rows if row.count > 1]
    tokens: list[int] = [row.sequence.token_ids[row.start] for row in singles]
    slots = [
        row.sequence.block_table[row.start // block_size] * block_size + row.start % block_size
        for row in singles
    ]
    positions = [torch.tensor([row.start for row in singles], dtype=torch.int64)]
    slot_parts = [torch.tensor(slots, dtype=torch.int64)]
    prefills = []
    place = len(singles)
    places = {id(row): index for index, row in enumerate(singles)}
    for row in spans:
        stop = row.start + row.count
        tokens += row.sequence.token_ids[row.start : stop]
        at = torch.arange(row.start, stop)
        blocks = _padded(row.sequence.block_table[: -(-stop // block_size)], unit)
        table = torch.tensor(blocks, dtype=torch.int64)
        positions.append(at)
        slot_parts.append(table[at // block_size] * block_size + at % block_size)
        own = row.start == 0 and not batch_invariant and not reads_back
        prefills.append(PrefillSpan(place, place + row.count, row.start, None if own else table))
        place += row.count
        places[id(row)] = place - 1
    works = [row for row in batch.rows if row.samples]
    last_layer = None
    if spans and not batch_invariant and not whole_last_layer:
        works.sort(key=_position)
        last_layer = _decode_groups(works, block_size, unit, dtype)
    return StepPlan(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slot_parts),
        decodes=_decode_groups(singles, block_size, unit, dtype),
        prefills=tuple(prefills),
        sampled=torch.tensor([places[id(row)] for row in works], dtype=torch.int64),
        works=tuple(works),
        last_layer=last_layer,
        states=()
        if state_slot is None
        else tuple(
            StateSpan(places[id(row)] - row.count + 1, places[id(row)] + 1, state_slot(row.sequence))
            for row in batch.rows
        ),
    )


def _position(row: Work) -> int:
    """Of its last token."""
    return row.start + row.count - 1


def _decode_groups(
    rows: Row[Work], block_size: int, unit: int, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    """Cut the last tokens of rows, sorted by context, where padding to the longest would waste too much."""
    counts = [_up(_position(row) // block_size + 1, unit) for row in rows]
    groups = []
    first = 0
    used = 0
    for index, count in enumerate(counts):
        used += count
        following = counts[index + 1] if index + 1 < len(counts) else None
        if following is not None:
            padded = following * (index + 2 - first)
            if padded - used - following <= PADDING_SHARE * padded:
                continue
        group = rows[first : index + 1]
        groups.append(_decode_group(group, first, count, block_size, dtype, padded=unit > 1))
        first, used = index + 1, 0
    return tuple(groups)


def _decode_group(
    rows: Row[Work], first: int, blocks_per_row: int, block_size: int, dtype: torch.dtype, *, padded: bool
) -> DecodeGroup:
    blocks: list[int] = []
    for row in rows:
        table = row.sequence.block_table[: _position(row) // block_size + 1]
        blocks += _padded(table, blocks_per_row)
    longest = _position(rows[-1]) + 1
    context = blocks_per_row * block_size if padded else longest
    lengths = torch.tensor([_position(row) + 1 for row in rows])
    mask = None
    if padded or _position(rows[0]) + 1 < longest:
        mask = torch.zeros(len(rows), 1, 1, context, dtype=dtype)
        mask.masked_fill_(torch.arange(context) >= lengths[:, None, None, None], float("-inf"))
    tables = torch.tensor(blocks, dtype=torch.int64)
    return DecodeGroup(first, first + len(rows), tables, context, lengths, mask)


def _padded(table: list[int], unit: int) -> list[int]:
    """The table with its last block repeated up to a multiple of ``unit`` blocks."""
    return table + table[-1:] * (_up(len(table), unit) - len(table))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
