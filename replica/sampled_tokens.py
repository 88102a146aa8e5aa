"""Checks what the model sampled against the batch it was computed for, before anything is changed."""

from collections.abc import Mapping, Sequence
from operator import index

from replica.batch import Batch
from replica.sequence import Status

MAX_TOKEN_ID = 2**31 - 1


def sampled_tokens(batch: Batch, sampled: Mapping[str, int] | Sequence[int] | None) -> dict[str, int]:
    """Request id to token, for every row of ``batch`` that samples, still runs and is made of token ids.

    ``sampled``: request id to token (rows that were aborted may be missing), or one token per row with
    ``samples``, in order. Raises ValueError for a missing token, a token that belongs to no row, or one that
    is no int32 of 0 or more.

    >>> from replica.batch import Work
    >>> from replica.sequence import Sequence
    >>> a = Sequence("a", [1, 2], max_tokens=4)
    >>> a.status = Status.RUNNING
    >>> batch = Batch([Work(a, 0, 2, samples=True)], 0, 0, 2)
    >>> sampled_tokens(batch, {"a": 7}), sampled_tokens(batch, [7])
    ({'a': 7}, {'a': 7})
    >>> sampled_tokens(batch, {"b": 7})
    Traceback (most recent call last):
    ValueError: request a has token ids: give its sampled token
    """
    if sampled is None:
        given: Mapping[str, int] = {}
    elif isinstance(sampled, Mapping):
        given = sampled
    else:
        names = [row.sequence.request_id for row in batch.rows if row.samples]
        if len(names) != len(sampled):
            raise ValueError(
                f"{len(sampled)} sampled tokens for {len(names)} rows that sample: give one each"
            )
        given = dict(zip(names, sampled, strict=True))
    tokens = {}
    for row in batch.rows:
        sequence = row.sequence
        if not row.samples or sequence.status is not Status.RUNNING or sequence.id_block_size is not None:
            continue
        name = sequence.request_id
        if name not in given:
            raise ValueError(f"request {name} has token ids: give its sampled token")
        tokens[name] = _token(name, given[name])
    if len(given) > len(tokens) and (
        strangers := given.keys() - {row.sequence.request_id for row in batch.rows}
    ):
        raise ValueError(f"sampled tokens for {sorted(strangers)}, which are not in this batch")
    return tokens


def _token(name: str, token: int) -> int:
    try:
        number = index(token)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_TOKEN_ID:
        raise ValueError(f"request {name}: sampled {token!r}, expected a token id of 0 to {MAX_TOKEN_ID}")
    return number
