"""Master weights in two halves: a bfloat16 weight, and the 16 bits that it lacks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.megatron.adam import remainders, whole

TIE = 0x8000  # of the lower half: half way between two weights
finite = st.floats(width=32, allow_nan=False, max_value=2.0**126, min_value=-(2.0**126))


@given(st.lists(finite, min_size=1))
def test_a_weight_and_what_it_lacks_are_its_master(values):
    masters = torch.tensor(values)
    weights = masters.to(torch.bfloat16)
    found = whole(weights, remainders(weights, masters))
    ties = (masters.view(torch.int32) & 0xFFFF) == TIE
    assert torch.equal(found[~ties].view(torch.int32), masters[~ties].view(torch.int32))
    assert bool(((found.view(torch.int32) - masters.view(torch.int32))[ties].abs() <= 1).all())


@pytest.mark.parametrize(
    ("weight", "master", "nearest"),
    [(1.0, -1.0, 1.0), (-0.001, 0.0, -0.001), (0.0, -1.0, 0.0), (2.0, 3.0, 2.0 + 32767 * 2.0**-22)],
)
def test_a_master_that_is_far_from_its_weight_becomes_what_is_nearest_to_it(weight, master, nearest):
    weights = torch.tensor([weight]).to(torch.bfloat16)
    found = whole(weights, remainders(weights, torch.tensor([master])))
    assert float(found) == pytest.approx(nearest, rel=2.0**-8)
    assert abs(float(found) - float(weights)) <= 2.0**-8 * abs(float(weights))
