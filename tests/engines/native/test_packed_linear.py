"""Products over packed weights: right, alone in each row, and with the values of the last refresh."""

import pytest
import torch

from mrl.engines.native.packed_linear import Linear

ATOL = 5e-5
"""fp32 sums of 700 products of size 1/27 against fp64: 5e-6, more where a processor adds one by one."""


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 33), (99, 48), (384, 700), (259, 5)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_the_stored_weight(threads, shape, with_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    bias = torch.randn(shape[0], generator=generator) if with_bias else None
    linear = Linear(weight, bias, torch.float32)
    for _ in range(2):
        linear.refresh()
        for rows in (1, 4, 7, 8, 9, 20, 31, 32, 33, 100, 300):
            x = torch.randn(rows, shape[1], generator=generator)
            expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            torch.testing.assert_close(linear(x).double(), expected, atol=ATOL, rtol=0)
            assert linear(x).is_contiguous()
        weight.neg_()


@pytest.mark.parametrize("shape", [(384, 700), (128, 1408)], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_others(threads, shape):
    linear = Linear(torch.randn(shape), torch.randn(shape[0]), torch.float32)
    linear.refresh()
    x = torch.randn(300, shape[1])
    whole = linear(x)
    for start in (0, 3, 37):
        for num in (1, 2, 5, 8, 9, 16, 17, 31, 33, 65):
            assert torch.equal(linear(x[start : start + num]), whole[start : start + num])


def test_columns_of_a_wider_tensor_are_taken():
    linear = Linear(torch.randn(260, 16), None, torch.float32)
    linear.refresh()
    x = torch.randn(16, 40)
    assert torch.equal(linear(x[:, 8:24]), linear(x[:, 8:24].contiguous()))
