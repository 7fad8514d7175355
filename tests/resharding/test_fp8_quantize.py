"""Quantisation to FP8, against transformers' own."""

from types import SimpleNamespace

import pytest
import torch

from mrl.resharding import fp8_quantize

BLOCK = (128, 128)


def blocks(size, block):
    return torch.arange(size, dtype=torch.int32) // block


def ours(values, block):
    """(stored, scales, what they stand for)"""
    rows, columns = (blocks(size, each) for size, each in zip(values.shape, block, strict=True))
    factors = fp8_quantize.multipliers(fp8_quantize.block_magnitudes(values, (0, 0), block))
    stored = fp8_quantize.quantize(values, factors, rows, columns)
    scales = factors.reciprocal()
    return stored, scales, fp8_quantize.dequantize(stored, scales, rows, columns, torch.empty(values.shape))


def theirs(values, block):
    """The same by transformers, whose blocks must divide the matrix: it gets one that zeros make larger."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")  # 4.57's wants triton
    rows, columns = values.shape
    larger = torch.nn.functional.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    wanted = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=list(block), scale_fmt="float"))
    found = finegrained.Fp8Quantize(wanted)._quantize_one("w.weight", larger)
    stored, scales = found["w.weight"], found["w.weight_scale_inv"]
    meant = finegrained.Fp8Dequantize(wanted)._dequantize_one(stored, scales)
    return stored[:rows, :columns], scales, meant[:rows, :columns]


def values_of(shape, dtype=torch.float32):
    """Magnitudes over 12 decades, and a block of zeros where there are several."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * torch.logspace(-9, 3, shape[1])
    if shape[0] > BLOCK[0]:
        values[: BLOCK[0], : BLOCK[1]] = 0
    return values.to(dtype)


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (48, 300), (1, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "one scale"])
def test_every_bit_is_that_of_transformers(shape, dtype, whole):
    values, block = values_of(shape, dtype), shape if whole else BLOCK
    for found, expected in zip(ours(values, block), theirs(values, block), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_parts_of_a_matrix_have_the_magnitudes_and_the_values_of_the_whole():
    """Cuts that run through blocks, and bands of a few rows."""
    values = values_of((200, 300))
    stored, scales, _ = ours(values, BLOCK)
    rows, columns = blocks(200, 128), blocks(300, 128)
    largest = torch.zeros(2, 3)
    for top, bottom in ((0, 60), (60, 130), (130, 200)):
        for left, right in ((0, 100), (100, 290), (290, 300)):
            part = fp8_quantize.block_magnitudes(values[top:bottom, left:right], (top, left), BLOCK)
            into = largest[top // 128 : -(-bottom // 128), left // 128 : -(-right // 128)]
            assert part.shape == into.shape
            torch.maximum(into, part, out=into)
    assert torch.equal(fp8_quantize.multipliers(largest).reciprocal(), scales)
    for top, bottom in ((0, 60), (60, 200)):
        part = fp8_quantize.quantize(values[top:bottom], fp8_quantize.multipliers(largest), rows[top:bottom], columns)
        assert torch.equal(part.view(torch.uint8), stored[top:bottom].view(torch.uint8))


def test_bands_change_nothing(monkeypatch):
    values = values_of((200, 300))
    whole = ours(values, BLOCK)
    monkeypatch.setattr(fp8_quantize, "BAND_ELEMENTS", 1000)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours(values, BLOCK), whole, strict=True))


def test_the_smallest_numbers_survive():
    """448 over a subnormal number is beyond fp32."""
    values = torch.full((2, 2), torch.finfo(torch.float32).smallest_normal / 8)
    stored, scales, meant = ours(values, BLOCK)
    assert stored.float().isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    assert (meant <= values).all()
