"""What mrl replaces inside vLLM, piece by piece, each held against the installed version before it is used.

Owns the replacements and nothing else of vLLM's internals. Each was read and tried in vLLM 0.32; a version that lacks
the place is refused by its name.

- `plain_linears`: on a CPU vLLM packs every matrix after loading and drops it; a matrix that stays can be refitted.
- `ranks_of_the_trainer`: vLLM's end would destroy torch.distributed, which is the trainer's.
- `rewound_numbers`: a token that is sampled behind a part of a prompt is thrown away, and its random numbers are taken
  back in a way that only GPUs know; on a CPU vLLM ends there.
- `world_of_the_replica`: it takes all ranks of the job for its own, and some may only train; and each group would open
  sockets and shared memory for Python objects, which nothing here sends.
- `told_of_the_cache`: what is bound to the model must be there before its graphs are captured.
- `ranks_sleep`: ranks on CPUs would talk through files in shared memory, which have the same names in every job of a
  host and outlive it; and a rank that waits there turns in circles, on the core that the others need.
- `memory_stays`: on a CPU vLLM would move the trainer's memory to one NUMA node, and bind it there for good.
- `kernels_of_vllm`: what stands in for Triton's kernels is looked for in each module of the process, at each start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mrl.distributed.subworld import group_among
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.errors import UserError


def place(module: str, name: str, version: str) -> Any:
    """What `name` is in a module of vLLM; "Class.attribute" works too.

    Raises:
        UserError: The installed version has no such thing.
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
    """Matrices stay torch tensors, and are multiplied by torch: slower than packed, see `tools/bench_rollout.py`."""
    place("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", version)
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)

    utils.dispatch_cpu_unquantized_gemm = dispatch  # each layer looks it up when it is loaded


def ranks_of_the_trainer(version: str) -> None:
    """The engine's end destroys vLLM's process groups, and leaves the default one."""
    place("vllm.v1.engine.core", "cleanup_dist_env_and_memory", version)
    state = place("vllm.distributed", "parallel_state", version)
    for name in ("destroy_model_parallel", "_WORLD", "init_model_parallel_group"):
        place("vllm.distributed.parallel_state", name, version)
    from vllm.v1.engine import core

    def cleanup(*_: Any, **__: Any) -> None:
        state.destroy_model_parallel()
        if state._WORLD is not None:
            state._WORLD.destroy()
            state._WORLD = None

    core.cleanup_dist_env_and_memory = cleanup


class _Distributed:
    """`torch.distributed` for `parallel_state`: the job is the replica, and only who is in a group makes it."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name, self._count = size, name, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def get_world_size(self, group: Any = None) -> int:
        return self._size if group is None else torch.distributed.get_world_size(group)

    def new_group(self, ranks: Sequence[int], **given: Any) -> Any:
        self._count += 1
        return group_among(ranks, f"{self._name}{self._count}", **given)


class _Torch:
    """`torch` for `parallel_state`."""

    def __init__(self, size: int, name: str) -> None:
        self.distributed = _Distributed(size, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def world_of_the_replica(version: str, ranks: Sequence[int], name: str) -> None:
    """Groups are made of the replica's ranks, by their numbers in the job, and by nobody else; they have no queues.

    What vLLM still sends of Python's goes through torch.distributed, data only.

    Args:
        version: Of the installed vLLM.
        ranks: Of the job, in the order of the replica.
        name: Of this start of the replica alone, the same on all its ranks.
    """
    for part in ("torch.distributed", "init_world_group", "init_model_parallel_group"):
        place("vllm.distributed.parallel_state", part, version)
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


def ranks_sleep(version: str) -> None:
    """Ranks of a replica on CPUs talk over torch.distributed, where one that waits leaves its core to the others."""
    module, name = "vllm.distributed.device_communicators.cpu_communicator", "_all_group_ranks_share_shm_group_name"
    place(module, f"CpuCommunicator.{name}", version)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    setattr(CpuCommunicator, name, lambda self: False)


def memory_stays(version: str) -> None:
    """Where the process takes its memory from is for whoever started it to say."""
    importlib.import_module("vllm._custom_ops")  # loads the library
    place("vllm.v1.worker.cpu_worker", "torch.ops._C.init_cpu_memory_env", version)
    operations: Any = torch.ops._C
    operations.init_cpu_memory_env = lambda nodes: None


class _Modules:
    """`sys.modules`, as far as the search for kernels reads it: all by name, but only vLLM's to look through."""

    def __getitem__(self, name: str) -> ModuleType:
        return sys.modules[name]

    def values(self) -> list[ModuleType]:
        return [module for name, module in list(sys.modules.items()) if name.startswith("vllm.")]


def kernels_of_vllm(version: str) -> None:
    """No attribute of other packages is touched, of which some warn, and a start on a CPU takes a second less."""
    place("vllm.triton_utils.dispatcher", "_rebind_kernels", version)
    place("vllm.triton_utils.dispatcher", "sys.modules", version)
    from vllm.triton_utils import dispatcher

    dispatcher.sys = SimpleNamespace(modules=_Modules())


def rewound_numbers(version: str) -> None:
    """On a CPU too a token that is thrown away takes no random numbers of its sample."""
    module = "vllm.v1.worker.gpu_model_runner"
    runner = place(module, "GPUModelRunner", version)
    for name in ("_sample", "_bookkeeping_sync"):
        place(module, f"GPUModelRunner.{name}", version)
    sampled, booked = _own(runner, "_sample"), _own(runner, "_bookkeeping_sync")

    def thrown_away(self: Any) -> dict[int, torch.Generator]:
        """Row -> its generator."""
        batch = self.input_batch
        rows = map(int, self.discard_request_mask.np[: batch.num_reqs].nonzero()[0])
        return {row: batch.generators[row] for row in rows if row in batch.generators}

    def sample(self: Any, *given: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in thrown_away(self).values()]
        found = sampled(self, *given)
        for generator, state in before:
            generator.set_state(state)
        return found

    def bookkeeping(self: Any, *given: Any) -> Any:
        batch, rewound = self.input_batch, thrown_away(self)
        for row in rewound:
            del batch.generators[row]
        try:
            return booked(self, *given)
        finally:
            batch.generators.update(rewound)

    runner._sample, runner._bookkeeping_sync = sample, bookkeeping


def told_of_the_cache(version: str, listeners: Sequence[Callable[[Any, Any], None]]) -> None:
    """Calls each listener with each model runner and its `KVCacheConfig` as soon as it has its cache.

    The model is loaded by then, and no graph was captured.
    """
    runner = place("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", version)
    place("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.initialize_kv_cache", version)
    place("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", version)
    original = _own(runner, "initialize_kv_cache")

    def initialize(self: Any, cache: Any, is_profiling: bool = False, **given: Any) -> None:
        original(self, cache, is_profiling, **given)
        for told in () if is_profiling else listeners:
            told(self, cache)

    runner.initialize_kv_cache = initialize


def _own(kind: Any, name: str) -> Any:
    """The method of a class or function of a module, vLLM's own also after it was replaced."""
    originals: dict[str, Any] = kind.__dict__.get("_mrl_originals") or {}
    originals.setdefault(name, getattr(kind, name))
    kind._mrl_originals = originals
    return originals[name]
