"""Layouts of a weight: the same products in each, and which weights may have which."""

import pytest
import torch

from replica.model import matrix as matrix_module
from replica.model import weights as weights_module
from replica.model.fingerprint import fingerprint
from replica.model.load import load_model
from replica.model.matrix import FEW_ROWS, FewRowsMatrix, OneDnnMatrix, matrix

ROUNDING = 2.0**-8
"""A result is one bf16 number, of 8 bits."""


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is one on which a second layout pays."""
    monkeypatch.setattr(matrix_module, "has_amx", lambda: False)


kernels_are_here = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="no FBGEMM for this processor"
)


def _weight(out: int = 96, columns: int = 64, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(out, columns, generator=generator) * scale).bfloat16()


@kernels_are_here
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_both_layouts_give_the_product(rows: int) -> None:
    weight = _weight()
    inputs = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
    wanted = inputs.float() @ weight.float().t()
    got = matrix(weight, twice=True)(inputs)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, 96)
    assert torch.allclose(got.float(), wanted, rtol=ROUNDING, atol=1e-6)


@kernels_are_here
def test_few_rows_take_the_second_layout_and_many_the_first() -> None:
    calls = []

    class Watched(OneDnnMatrix):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            calls.append(rows.shape[0])
            return super().__call__(rows)

    weight = _weight()
    both = FewRowsMatrix(weight, Watched(weight))
    for rows in (1, FEW_ROWS, FEW_ROWS + 1):
        both(torch.ones(rows, 64, dtype=torch.bfloat16))
    assert calls == [FEW_ROWS + 1]
    assert torch.equal(next(iter(both.tensors())), weight)


@kernels_are_here
@pytest.mark.parametrize(
    ("scale", "why_not"), [(1e7, "beyond fp16"), (1e-6, "below what fp16 has 9 bits for"), (1.0, "")]
)
def test_a_weight_that_fp16_does_not_hold_has_one_layout(scale: float, why_not: str) -> None:
    assert isinstance(matrix(_weight(scale=scale), twice=True), FewRowsMatrix) == (not why_not)


@kernels_are_here
def test_with_amx_the_first_layout_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "has_amx", lambda: True)
    assert not isinstance(matrix(_weight(), twice=True), FewRowsMatrix)


def test_fp32_weights_have_one_layout() -> None:
    assert not isinstance(matrix(_weight().float(), twice=True), FewRowsMatrix)


@kernels_are_here
def test_only_a_small_model_takes_its_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_model("tiny", "bf16")
    size = 2 * weights_module.matrix_weights(small.shape)
    layer = small.weights.layers[0]
    dense = [
        next(iter(part.tensors()))
        for one in small.weights.layers
        for part in (one.qkv, one.output, one.gate_up, one.down)
    ]
    assert size == sum(part.nbytes for part in (*dense, *small.weights.head.tensors()))
    assert isinstance(layer.qkv, FewRowsMatrix) and isinstance(small.weights.head, FewRowsMatrix)
    monkeypatch.setattr(weights_module, "TWICE_BELOW_BYTES", size - 1)
    large = load_model("tiny", "bf16")
    assert not isinstance(large.weights.layers[0].qkv, FewRowsMatrix)
    assert not isinstance(large.weights.head, FewRowsMatrix)
    assert fingerprint(small, 16) == fingerprint(large, 16)
