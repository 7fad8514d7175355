"""Megatron on a CPU: what is corrected, and that other libraries see the torch they know."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.device import prepare
from tests.ranks import run_ranks

TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def prepared():
    prepare("cpu")


def test_preparing_again_does_nothing_and_another_device_is_refused():
    prepare("cpu")
    with pytest.raises(RuntimeError, match="prepared for 'cpu'"):
        prepare("cuda")


def test_an_import_of_megatron_before_prepare_is_refused():
    code = "import megatron.core; from mrl.distributed.device import prepare; prepare('cpu')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "was imported before" in found.stderr


def test_other_libraries_keep_their_torch():
    """transformers and torch.compile's front end import and work; a CUDA call of ours still fails as without mrl."""
    import torch._dynamo
    import transformers
    from megatron.core import parallel_state

    assert parallel_state.torch is not torch
    assert transformers.__version__
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    assert torch._dynamo.is_dynamo_supported() in (True, False)


def test_megatron_makes_its_tensors_on_the_cpu():
    from megatron.core import parallel_state
    from megatron.core.jit import jit_fuser

    its = parallel_state.torch
    assert its.zeros(2, device="cuda").device.type == "cpu"
    assert its.tensor([1], device="cpu", pin_memory=True).is_pinned() is False
    assert its.cuda.current_device() == torch.device("cpu")
    function = len
    assert jit_fuser(function) is function  # no inductor builds


def non_contiguous(name: str) -> str:
    tensor = torch.arange(16.0).view(4, 4)[:, :2]
    try:
        if name == "scatter":
            parts = list(torch.arange(16.0).view(4, 4).chunk(2, 1)) if dist.get_rank() == 0 else None
            target = torch.empty(4, 2) if dist.get_rank() == 0 else torch.empty(2, 4).T
            dist.scatter(target, parts, src=0)
        elif name == "broadcast":
            dist.broadcast(tensor=tensor, src=0)
        else:
            dist.all_reduce(tensor)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "scatter"])
def test_a_collective_that_would_move_wrong_bytes_raises(name):
    for message in run_ranks(2, non_contiguous, name):
        assert f"torch.distributed.{name}" in message
        assert "not contiguous" in message


def reduced_by_megatron() -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel.mappings import _reduce

    tensor = torch.arange(6.0).view(2, 3).T * (dist.get_rank() + 1)
    transposed = tensor.contiguous().T.contiguous().T
    return _reduce(transposed, dist.group.WORLD), torch.arange(6.0).view(2, 3).T * 3


def test_megatron_reduces_a_non_contiguous_input():
    """Its own function reduces a copy and returns the input."""
    for found, expected in run_ranks(2, reduced_by_megatron):
        assert torch.equal(found, expected)


def test_a_synchronous_save_needs_no_manager_process():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = filesystem_async._get_write_results_queue()
    results.put({0: []})
    assert results.get_nowait() == {0: []}
