"""Master weights in two halves: a bfloat16 weight, and the 16 bits that it lacks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.megatron.adam import _make_state, _set_steps, master_weights, remainders

TIE = 0x8000  # of the lower half: half way between two weights
finite = st.floats(width=32, allow_nan=False, max_value=2.0**126, min_value=-(2.0**126))


@given(st.lists(finite, min_size=1))
def test_a_weight_and_what_it_lacks_are_its_master(values):
    masters = torch.tensor(values)
    weights = masters.to(torch.bfloat16)
    found = master_weights(weights, remainders(weights, masters))
    ties = (masters.view(torch.int32) & 0xFFFF) == TIE
    assert torch.equal(found[~ties].view(torch.int32), masters[~ties].view(torch.int32))
    assert bool(((found.view(torch.int32) - masters.view(torch.int32))[ties].abs() <= 1).all())


@pytest.mark.parametrize(
    ("weight", "master", "nearest"),
    [(1.0, -1.0, 1.0), (-0.001, 0.0, -0.001), (0.0, -1.0, 0.0), (2.0, 3.0, 2.0 + 32767 * 2.0**-22)],
)
def test_a_master_that_is_far_from_its_weight_becomes_what_is_nearest_to_it(weight, master, nearest):
    weights = torch.tensor([weight]).to(torch.bfloat16)
    found = master_weights(weights, remainders(weights, torch.tensor([master])))
    assert float(found) == pytest.approx(nearest, rel=2.0**-8)
    assert abs(float(found) - float(weights)) <= 2.0**-8 * abs(float(weights))


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu"), (None, "cpu")])
def test_the_step_is_where_torchs_adamw_reads_it(fused, device):
    """On a device that is not the CPU: there a fused kernel reads the step."""
    parameter = torch.nn.Parameter(torch.zeros(3, device="meta"))
    adam = torch.optim.AdamW([parameter])
    adam.param_groups[0]["fused"] = fused
    _make_state(adam)
    assert adam.state[parameter]["step"].device.type == device
    _set_steps(adam, 7)
    assert adam.state[parameter]["step"].device.type == device


def test_a_fused_step_goes_on_from_the_steps_that_were_set():
    ends = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        adam = torch.optim.AdamW([parameter], lr=0.1)
        adam.param_groups[0]["fused"] = fused
        _make_state(adam)
        _set_steps(adam, 9)
        parameter.grad = torch.linspace(1, 2, 5)
        adam.step()
        assert float(adam.state[parameter]["step"]) == 10
        ends.append(parameter.detach())
    assert torch.allclose(*ends, atol=1e-7)
