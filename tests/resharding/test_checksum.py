import pytest
import torch

from mrl.resharding.checksum import MODULUS, bit_sum

DTYPES = [(torch.float32, torch.int32, 32), (torch.bfloat16, torch.int16, 16)]


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_it_is_the_wrapped_sum_of_the_bit_patterns_in_the_upper_bits(dtype, bits, width):
    tensor = random(300_001, dtype=dtype)
    patterns = tensor.view(bits).to(torch.int64) % (1 << width)
    assert bit_sum(tensor) == (sum(patterns.tolist()) << (64 - width)) % MODULUS


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_parts_add_up_in_any_order_and_cut(dtype, bits, width):
    tensor = random(64, 95, dtype=dtype)
    parts = [part for rows in tensor.split(10) for part in rows.split(7, dim=1)]
    assert sum(map(bit_sum, reversed(parts))) % MODULUS == bit_sum(tensor) == bit_sum(tensor.t())


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_every_single_bit_counts(dtype, bits, width):
    tensor = torch.ones(3, dtype=dtype)
    for element in range(3):
        for bit in range(width):
            damaged = tensor.clone()
            damaged.view(bits)[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
            assert bit_sum(damaged) != bit_sum(tensor)


def test_minus_zero_and_nan_are_patterns_like_others():
    assert bit_sum(torch.tensor([-0.0])) != bit_sum(torch.tensor([0.0]))
    assert bit_sum(torch.tensor([torch.nan])) == bit_sum(torch.tensor([torch.nan]))
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(5)) == 0
