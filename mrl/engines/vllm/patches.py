"""Replacements of vLLM functions, each checked against the installed version before use.

Each was tested with vLLM 0.32; a version that lacks the replaced function is refused by its name.

- `plain_linears`: on a CPU vLLM packs every matrix after loading and drops the original, which weight sync needs.
- `keep_trainer_groups`: vLLM's shutdown would destroy torch.distributed, which the trainer uses.
- `rewind_discarded_rng`: a token sampled after an incomplete prompt is discarded and its random numbers are rewound in
  a way that only works on GPUs; on a CPU vLLM crashes there.
- `use_replica_as_world`: vLLM would use all ranks of the job, but some may only train; and each group would open
  sockets and shared memory for Python objects, which nothing here sends.
- `add_kv_cache_listeners`: hooks on the model must exist before its graphs are captured.
- `use_torch_distributed_on_cpu`: ranks on CPUs would communicate through shared memory files, which have the same names
  in every job of a host and outlive it; and a waiting rank spins on the core that the others need.
- `disable_numa_binding`: on a CPU vLLM would move the trainer's memory to one NUMA node and bind it there.
- `rotate_views`: on a CPU the kernel of rotary embeddings without scaling takes parts of heads for whole ones.
- `restrict_kernel_search`: replacements of Triton kernels are searched in each module of the process, at each start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mrl.distributed.subset_groups import new_subgroup
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.errors import UserError


def look_up(module: str, name: str, version: str) -> Any:
    """Returns `name` (or "Class.attribute") of a module of vLLM.

    Raises:
        UserError: The installed version does not have it.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"vLLM {version} has no {module}.{name}, which mrl replaces to run it inside the training ranks. {INSTALL}"
        ) from error
    return found


def plain_linears(version: str) -> None:
    """Keeps matrices as torch tensors, multiplied by torch: slower than packed ones, see `tools/bench_rollout.py`."""
    look_up("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", version)
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch  # looked up when a layer is loaded


def keep_trainer_groups(version: str) -> None:
    """Makes the engine's shutdown destroy only vLLM's process groups, not the default one."""
    look_up("vllm.v1.engine.core", "cleanup_dist_env_and_memory", version)
    state = look_up("vllm.distributed", "parallel_state", version)
    for name in ("destroy_model_parallel", "_WORLD", "init_model_parallel_group"):
        look_up("vllm.distributed.parallel_state", name, version)
    from vllm.v1.engine import core

    def cleanup(*_: Any, **__: Any) -> None:
        state.destroy_model_parallel()
        if state._WORLD is not None:
            state._WORLD.destroy()
            state._WORLD = None

    core.cleanup_dist_env_and_memory = cleanup


class _Distributed:
    """Replacement of `torch.distributed` in `parallel_state`: the world is the replica."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name, self._count = size, name, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def get_world_size(self, group: Any = None) -> int:
        return self._size if group is None else torch.distributed.get_world_size(group)

    def new_group(self, ranks: Sequence[int], **given: Any) -> Any:
        self._count += 1
        return new_subgroup(ranks, f"{self._name}{self._count}", **given)


class _Torch:
    """Replacement of `torch` in `parallel_state`."""

    def __init__(self, size: int, name: str) -> None:
        self.distributed = _Distributed(size, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def use_replica_as_world(version: str, ranks: Sequence[int], name: str) -> None:
    """Makes vLLM create its groups from the replica's ranks only, without message queues.

    Python objects that vLLM still sends go through torch.distributed, data only.

    Args:
        version: Version of the installed vLLM.
        ranks: Global ranks of the replica, in its order.
        name: Unique name of this start of the replica, the same on all its ranks.
    """
    for part in ("torch.distributed", "init_world_group", "init_model_parallel_group"):
        look_up("vllm.distributed.parallel_state", part, version)
    from vllm.distributed import parallel_state

    module: Any = parallel_state
    make_world, make = _own(module, "init_world_group"), _own(module, "init_model_parallel_group")

    def init_world_group(places: Sequence[int], *given: Any, **named: Any) -> Any:
        return make_world([ranks[place] for place in places], *given, **named)

    def init_model_parallel_group(groups: Sequence[Sequence[int]], *given: Any, **named: Any) -> Any:
        numbers = [[ranks[place] for place in places] for places in groups]
        return make(numbers, *given, **{**named, "use_message_queue_broadcaster": False})

    module.torch = _Torch(len(ranks), name)
    module.init_world_group, module.init_model_parallel_group = init_world_group, init_model_parallel_group


def use_torch_distributed_on_cpu(version: str) -> None:
    """Makes the ranks of a replica on CPUs communicate over torch.distributed, where waiting does not use a core."""
    module, name = "vllm.distributed.device_communicators.cpu_communicator", "_all_group_ranks_share_shm_group_name"
    look_up(module, f"CpuCommunicator.{name}", version)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    setattr(CpuCommunicator, name, lambda self: False)


def disable_numa_binding(version: str) -> None:
    """Disables vLLM's NUMA binding of the process."""
    importlib.import_module("vllm._custom_ops")  # loads the library
    look_up("vllm.v1.worker.cpu_worker", "torch.ops._C.init_cpu_memory_env", version)
    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda nodes: None


def rotate_views(version: str) -> None:
    """Rotates parts of queries and keys, as latent attention has them, with torch's operators on a CPU."""
    kind = look_up("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding", version)
    for name in ("forward_cpu", "forward_native"):
        look_up("vllm.model_executor.layers.rotary_embedding.base", f"RotaryEmbedding.{name}", version)
    compiled = _own(kind, "forward_cpu")

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        is_whole = all(part is None or part.is_contiguous() for part in (query, key))
        return (compiled if is_whole else kind.forward_native)(self, positions, query, key)

    kind.forward_cpu = rotate


class _Modules:
    """Replacement of `sys.modules` for the kernel search: lookup by name finds all modules, iteration only vLLM's."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> list[ModuleType]:
        return [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]


def restrict_kernel_search(version: str) -> None:
    """Restricts the kernel search to vLLM's modules: other packages do not warn, and a start on a CPU is 1 s faster."""
    look_up("vllm.triton_utils.dispatcher", "_rebind_kernels", version)
    look_up("vllm.triton_utils.dispatcher", "sys.modules", version)
    from vllm.triton_utils import dispatcher

    dispatcher.sys = SimpleNamespace(modules=_Modules())


def rewind_discarded_rng(version: str) -> None:
    """Makes a discarded token take no random numbers of its sample, on a CPU too."""
    module = "vllm.v1.worker.gpu_model_runner"
    runner = look_up(module, "GPUModelRunner", version)
    for name in ("_sample", "_bookkeeping_sync"):
        look_up(module, f"GPUModelRunner.{name}", version)
    sampled, booked = _own(runner, "_sample"), _own(runner, "_bookkeeping_sync")

    def discarded(self: Any) -> dict[int, torch.Generator]:
        batch = self.input_batch
        rows = map(int, self.discard_request_mask.np[: batch.num_reqs].nonzero()[0])
        return {row: batch.generators[row] for row in rows if row in batch.generators}

    def sample(self: Any, *given: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in discarded(self).values()]
        found = sampled(self, *given)
        for generator, state in before:
            generator.set_state(state)
        return found

    def bookkeeping(self: Any, *given: Any) -> Any:
        batch, rewound = self.input_batch, discarded(self)
        for row in rewound:
            del batch.generators[row]
        try:
            return booked(self, *given)
        finally:
            batch.generators.update(rewound)

    runner._sample, runner._bookkeeping_sync = sample, bookkeeping


def add_kv_cache_listeners(version: str, listeners: Sequence[Callable[[Any, Any], None]]) -> None:
    """Calls each listener with each model runner and its `KVCacheConfig` as soon as the runner has its cache.

    At that time the model is loaded, and no graph is captured.
    """
    runner = look_up("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", version)
    look_up("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache", version)
    look_up("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", version)
    original = _own(runner, "initialize_kv_cache")

    def initialize(self: Any, cache: Any, is_profiling: bool = False, **given: Any) -> None:
        original(self, cache, is_profiling, **given)
        for listener in () if is_profiling else listeners:
            listener(self, cache)

    runner.initialize_kv_cache = initialize


def _own(kind: Any, name: str) -> Any:
    """Returns vLLM's original method or function, even if it was replaced before."""
    originals: dict[str, Any] = kind.__dict__.get("_mrl_originals") or {}
    originals.setdefault(name, getattr(kind, name))
    kind._mrl_originals = originals
    return originals[name]
