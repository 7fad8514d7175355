"""What travels between tests and their ranks arrives as it was."""

import pickle

import torch

from tests.ranks import _pickled, run_ranks

TENSORS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6).view(2, 3).t(),
    "part": torch.arange(12.0)[3:7],
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([[1.5, float("inf")]], dtype=torch.bfloat16),
    "fp8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "parameter": torch.nn.Parameter(torch.ones(2)),
}


def _back(tensors):
    pickled = _pickled(tensors["part"])
    tensors["part"].untyped_storage().resize_(0)  # as an offload does: who was sent, and who came, can be
    return tensors | {"part": pickle.loads(pickled)}


def test_tensors_arrive_as_they_were():
    (found,) = run_ranks(1, _back, TENSORS)
    for name, tensor in TENSORS.items():
        back = found[name]
        assert (type(back), back.dtype, back.shape) == (type(tensor), tensor.dtype, tensor.shape), name
        assert back.requires_grad == tensor.requires_grad
        bits, expected = (one.detach().reshape(-1).view(torch.uint8) for one in (back, tensor))
        assert torch.equal(bits, expected), name
    found["part"].add_(1).untyped_storage().resize_(0)  # as an offload does
