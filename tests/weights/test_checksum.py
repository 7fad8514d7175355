import pytest
import torch

from mrl.weights.checksum import MODULUS, bit_sum


@pytest.mark.parametrize("dtype, bits", [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_it_is_the_sum_of_the_bit_patterns(dtype, bits):
    tensor = torch.randn(300_001, generator=torch.Generator().manual_seed(0)).to(dtype)  # several blocks and a rest
    assert bit_sum(tensor) == sum(tensor.view(bits).tolist()) % MODULUS


def test_parts_add_up_in_any_order_and_layout():
    tensor = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    columns = [part for rows in tensor.split(10) for part in rows.split(7, dim=1)]
    assert sum(map(bit_sum, reversed(columns))) % MODULUS == bit_sum(tensor) == bit_sum(tensor.t())


def test_every_single_bit_counts():
    tensor = torch.ones(4, dtype=torch.bfloat16)
    clean = bit_sum(tensor)
    for element in range(4):
        for bit in range(16):
            damaged = tensor.clone()
            damaged.view(torch.int16)[element] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
            assert bit_sum(damaged) != clean


def test_minus_zero_and_nan_are_patterns_like_others():
    assert bit_sum(torch.tensor([-0.0])) != bit_sum(torch.tensor([0.0]))
    assert bit_sum(torch.tensor([torch.nan])) == bit_sum(torch.tensor([torch.nan]))
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(5)) == 0
