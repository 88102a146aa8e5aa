"""Matrix products with weights [out, in], by the route that is fastest for the number of rows.

Measured on two AVX2 cores with MKL, fp32, all matrices of SmolLM2-135M, ms for 1 / 2 / 4 / 8 / 16 / 32 rows:
``x @ W.T`` 32 / 85 / 84 / 74 / 98 / 130; ``W @ x.T`` 36 / 34 / 33 / 55 / 66 / 98. Row counts between these
are slow (3 rows 44, 6 rows 72, 12 rows 78), so rows are padded up.

From 12 rows on, a row's result has the same bits however many rows there are and by either route; with
fewer, other kernels add in another order.
"""

import torch

MOST_COLUMNS = 32
"""Up to this many rows, activations are kept as columns while they meet a weight."""
INVARIANT_ROWS = 16
"""With at least this many rows in every product, results do not depend on the number of rows."""


def padded_rows(rows: int, least: int = 1) -> int:
    """The number of rows to compute for ``rows``: the next power of two while few, itself when many.

    >>> [padded_rows(n) for n in (1, 2, 3, 5, 9, 32, 33)]
    [1, 2, 4, 8, 16, 32, 33]
    >>> padded_rows(3, least=INVARIANT_ROWS)
    16
    """
    return rows if rows > MOST_COLUMNS else max(least, 1 << (rows - 1).bit_length())


def product(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``rows @ weight.T`` [rows, out]; contiguous only when rows are many."""
    if rows.shape[0] <= MOST_COLUMNS:
        return torch.mm(weight, rows.t()).t()
    return torch.mm(rows, weight.t())
