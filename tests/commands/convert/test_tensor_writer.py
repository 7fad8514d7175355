"""Values that are not finite are counted exactly, in every dtype; sums that overflow are no reason."""

import pytest
import torch

from mrl.commands.convert.tensor_writer import count_not_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 1000, 1024, 5000])
def test_every_value_that_is_not_finite_is_counted(dtype, size):
    tensor = torch.randn(size).to(dtype)
    assert count_not_finite(tensor) == 0
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        tensor[-1 - number * 600 if size > 1200 else 0] = value
    assert count_not_finite(tensor) == (3 if size > 1200 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_beyond_the_dtype_is_no_finding(dtype):
    assert count_not_finite(torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)) == 0


def test_fp8_has_one_pattern_that_is_not_a_number():
    tensor = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    assert count_not_finite(tensor) == int(tensor.float().isnan().sum()) == 2


def test_strides_do_not_matter():
    tensor = torch.zeros(40, 3000)
    tensor[7, 2001] = torch.nan
    assert count_not_finite(tensor[:, 2000:]) == 1
    assert count_not_finite(tensor[:, :2000]) == 0
