"""Megatron on a CPU: what is corrected, and that other libraries see the torch they know."""

import pickle
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.megatron.cpu.import_patches import _CUDA_FIXES, prepare, total_l2_norm
from tests.ranks import run_ranks

TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def prepared():
    prepare("cpu")


def test_preparing_again_does_nothing_and_another_device_is_refused():
    prepare("cpu")
    with pytest.raises(RuntimeError, match="prepared for 'cpu'"):
        prepare("cuda")


@pytest.mark.slow
def test_an_import_of_megatron_before_prepare_is_refused():
    code = "import sys; sys.modules['transformer_engine'] = None; "  # without a GPU the wheel is none that imports
    code += "sys.modules['megatron.core'] = sys; from mrl.megatron.cpu.import_patches import prepare; prepare('cpu')"
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

    make_queue = getattr(filesystem_async, "_get_write_results_queue", None) or filesystem_async.get_write_results_queue
    results = make_queue()
    results.put({0: []})
    assert results.get_nowait() == {0: []}


def unequal_parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gathered parts of 1 and 3 rows, their gradient, scattered sums of 1 and 3 rows, and their gradient."""
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    rank, sizes = dist.get_rank(), [1, 3]
    own = (torch.arange(2.0 * sizes[rank]).view(-1, 2) + 10 * rank).requires_grad_()
    gathered = gather_from_sequence_parallel_region(own, group=dist.group.WORLD, output_split_sizes=sizes)
    (gathered * (rank + 1)).sum().backward()
    whole = (torch.arange(8.0).view(4, 2) * (rank + 1)).requires_grad_()
    summed = reduce_scatter_to_sequence_parallel_region(whole, group=dist.group.WORLD, input_split_sizes=sizes)
    (summed * (rank + 1)).sum().backward()
    return gathered.detach(), own.grad, summed.detach(), whole.grad


def test_parts_of_unequal_size_are_gathered_and_scattered():
    """gloo's own collectives take equal parts only; experts that are cut over ranks have parts of any size."""
    rows = torch.cat([torch.arange(2.0).view(1, 2), torch.arange(6.0).view(3, 2) + 10])
    sums = torch.arange(8.0).view(4, 2) * 3
    for rank, (gathered, grad, summed, whole_grad) in enumerate(run_ranks(2, unequal_parts)):
        assert torch.equal(gathered, rows)
        assert torch.equal(grad, torch.full_like(grad, 3.0))
        assert torch.equal(summed, sums[:1] if rank == 0 else sums[1:])
        assert torch.equal(whole_grad, torch.tensor([1.0, 2.0, 2.0, 2.0])[:, None].expand(4, 2))


def test_sizes_of_parts_become_what_collectives_take():
    """Megatron turns them into numbers only where they come from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    convert = token_dispatcher.maybe_move_tensor_to_cpu
    assert [type(size).__module__ for size in convert(torch.tensor([1, 2]), as_numpy=True)] == ["numpy", "numpy"]
    assert convert(3, as_numpy=True) == 3
    assert torch.is_tensor(convert(torch.tensor([1, 2])))


def test_a_router_needs_no_transformer_engine():
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    weight, rows = torch.eye(3), torch.arange(6.0).view(2, 3)
    assert torch.equal(router_gating_linear(rows, weight, None, torch.float64), rows.double())


def norms(values):
    """Megatron's own norm, that of mrl, and what it waits for: Megatron's modules import in a job only."""
    from megatron.core.utils import local_multi_tensor_l2_norm

    tensors = [[torch.tensor(each) for each in values]]
    flag = torch.zeros(1, dtype=torch.int)
    with ReadsByTheHost() as seen:
        ours, none = total_l2_norm(2048 * 32, flag, tensors, False)
    theirs, _ = local_multi_tensor_l2_norm(2048 * 32, flag, tensors, False)
    return ours.tolist(), theirs.tolist(), none, seen.count


class ReadsByTheHost(TorchDispatchMode):
    """Counts operations that bring a device's numbers to the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "values",
    [[[3.0, 4.0]], [[1.0], [2.0, 2.0], [[1e-3] * 7] * 9], [[1e19, 1.0], [1e19]], [[0.0] * 4], [[float("nan")], [1.0]]],
)
def test_the_norm_of_gradients_is_megatrons_and_the_host_waits_for_none(values):
    ours, theirs, none, reads = norms(values)
    assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True) and len(ours) == 1
    assert none is None and reads == 0


@pytest.mark.parametrize(("home", "replaced"), [("megatron.core.utils", True), ("transformer_engine", False)])
def test_on_a_gpu_only_megatrons_own_norm_is_replaced(home, replaced):
    def norm():
        pass

    norm.__module__ = home
    clip_grads = types.SimpleNamespace(l2_norm_impl=norm)
    _CUDA_FIXES["megatron.core.optimizer.clip_grads"](clip_grads)
    assert (clip_grads.l2_norm_impl is total_l2_norm) == replaced
    from megatron.core.optimizer import clip_grads as on_a_cpu

    assert on_a_cpu.l2_norm_impl.__module__ == "megatron.core.utils"  # numbers on a CPU are those of Megatron


def test_a_pickled_tensor_names_a_function_of_torch():
    """megatron-core 0.17 and later put one of their own in its place, for the whole process."""
    import megatron.core

    assert megatron.core.__version__
    assert torch.storage._load_from_bytes.__module__ == "torch.storage"
    assert b"megatron" not in pickle.dumps(torch.zeros(2))
