"""Patches that let megatron-core 0.16 to 0.19 run without a CUDA device or without TransformerEngine.

`prepare` installs a hook on the import of `megatron.*`, which patches each module right after it ran; so nothing is
imported early, and later imports are patched too. Other libraries see the unchanged torch: on a CPU, Megatron's modules
get their own `torch`, whose `cuda` namespace and tensor factories use the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from mrl.models import transformer_engine

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "empty", "empty_like", "eye", "full", "full_like", "ones"),
    *("ones_like", "rand", "randn", "tensor", "zeros", "zeros_like"),
)
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_UNUSED = ("wandb", "tensorboard", "nvidia_resiliency_ext")
"""Optional packages that Megatron would import for features that mrl does not use; from 0.17 on an old
nvidia-resiliency-ext would stop its import."""
_NOISY = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
)
"""Loggers that from 0.18 on warn at each start about what mrl chose: GPTModel, its own writer of checkpoints."""
_CPU_NOISY = ("torch.utils.cpp_extension",)
"""Loggers that warn on a CPU: from 0.17 on Megatron imports what torch builds CUDA extensions with."""
_load_from_bytes = torch.storage._load_from_bytes
_hidden: tuple[str, ...] = _UNUSED
"""Packages that Megatron cannot import. Includes TransformerEngine where it is unusable: Megatron would fail on a
broken one, and use its optimizer on a CPU."""
_prepared: str | None = None


def prepare(device: str) -> None:
    """Makes `import megatron.core` usable on this device; must be called before the first such import.

    Calling it again with the same device does nothing.

    Args:
        device: Device type, "cpu" or "cuda".

    Raises:
        RuntimeError: Megatron is already imported, or the process was prepared for another device.
    """
    global _prepared, _hidden  # noqa: PLW0603  (a process has one device)
    if _prepared == device:
        return
    if _prepared is not None:
        raise RuntimeError(f"this process was prepared for '{_prepared}' and cannot switch to '{device}'")
    early = [name for name in sys.modules if name.startswith("megatron.core")]
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before mrl.megatron.cpu.import_patches.prepare; it cannot be patched any more"
        )
    if transformer_engine.why_unusable(device) is not None:
        _hidden = (*_UNUSED, transformer_engine.NAME)
    fixes = dict(_ANY_DEVICE_FIXES)
    if device == "cpu":
        own_torch = _cpu_torch()
        fixes.update(_CPU_FIXES)
        _patch_tensor_methods()
        sys.meta_path.insert(0, _Finder(fixes, own_torch))
    else:
        fixes.update(_CUDA_FIXES)
        sys.meta_path.insert(0, _Finder(fixes, None))
    for name in (*_NOISY, *(_CPU_NOISY if device == "cpu" else ())):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("all_reduce", "broadcast", "scatter"):
        setattr(dist, name, _refuse_non_contiguous(name, getattr(dist, name)))
    _prepared = device


# ---- the import hook


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader that runs a module's source and then patches the module."""

    def __init__(self, name: str, path: str, fix: Callable[[ModuleType], None] | None, own_torch: Any) -> None:
        super().__init__(name, path)
        self._fix = fix
        self._own_torch = own_torch

    def exec_module(self, module: ModuleType) -> None:
        needs_triton = module.__name__ in _TRITON_KERNELS and b"\nimport triton\n" in self.get_data(self.path)
        with _replace_modules({**dict.fromkeys(_hidden), **(_triton_placeholder() if needs_triton else {})}):
            super().exec_module(module)
        if self._own_torch is not None and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = self._own_torch
        if self._fix is not None:
            self._fix(module)


@contextlib.contextmanager
def _replace_modules(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Makes imports inside find these modules; None: the module cannot be imported."""
    kept = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(kept)


_TRITON_KERNELS = ("megatron.core.transformer.moe.paged_stash", "megatron.core.transformer.moe.ops.paged_stash")
"""Modules of 0.18 and 0.19 that import triton, which a CPU build of torch lacks; every pipeline schedule needs them."""


def _triton_placeholder() -> dict[str, ModuleType]:
    """Returns modules in place of triton, whose kernels become functions that nothing calls; {} if it is installed."""
    if importlib.util.find_spec("triton") is not None:
        return {}
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(language=language, jit=lambda kernel: kernel)
    vars(language).update(constexpr=object)
    return {"triton": triton, "triton.language": language}


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of `megatron.*` modules that sets the patching loader."""

    def __init__(self, fixes: dict[str, Callable[[ModuleType], None]], own_torch: Any) -> None:
        self._fixes = fixes
        self._own_torch = own_torch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            fix = self._fixes.get(fullname)
            spec.loader = _Loader(spec.loader.name, spec.loader.path, fix, self._own_torch)
        return spec


# ---- a torch whose "cuda" is the CPU, for Megatron's modules only


class _Overlay(ModuleType):
    """A module that forwards to another one, with some names replaced."""

    def __init__(self, base: ModuleType, **replaced: Any) -> None:
        super().__init__(base.__name__)
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


class _NoStream:
    """A CUDA stream or event that does nothing: a CPU runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def record_event(self, *args: Any) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _NoStream) -> float:
        return 0.0

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = record_stream = synchronize = _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _cpu_torch() -> ModuleType:
    stream = _NoStream()
    rng = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    nothing = ("set_device", "synchronize", "empty_cache", "set_stream")
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    types = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "ByteTensor")
    cuda = _Overlay(
        torch.cuda,
        is_available=lambda: False,
        current_device=lambda: _CPU,  # used as `device=` and as a key of default_generators
        device_count=lambda: 1,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda wanted: contextlib.nullcontext(),
        Stream=_NoStream,
        Event=_NoStream,
        default_generators={_CPU: torch.default_generator},
        manual_seed=torch.manual_seed,
        memory_stats=lambda *args: {},
        nvtx=_Overlay(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing),
        random=_Overlay(torch.cuda.random, **rng),
        **rng,
        **dict.fromkeys(nothing, _nothing),
        **dict.fromkeys(zero, _zero),
        **{name: getattr(torch, name) for name in types},
    )
    factories = {name: _cpu_factory(getattr(torch, name)) for name in _FACTORIES}
    return _Overlay(torch, cuda=cuda, **factories)


def _cpu_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a factory: device="cuda" becomes the CPU, and nothing is pinned."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _called_by_megatron() -> bool:
    """Returns whether the caller's caller is Megatron's code."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("megatron.")


def _patch_tensor_methods() -> None:
    """Patches `Tensor.cuda`, `Tensor.type` and `Tensor.record_stream`, for calls from Megatron only."""
    cuda, type_, record_stream = torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.record_stream

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else cuda(self, *args, **kwargs)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        named = type_(self, *args, **kwargs)
        # Megatron's optimizers choose by the string 'torch.cuda.FloatTensor'
        return _CUDA_TYPE_NAMES.get(named, named) if isinstance(named, str) and _called_by_megatron() else named

    def no_record(self: torch.Tensor, stream: Any) -> None:
        if not _called_by_megatron():
            record_stream(self, stream)

    for name, method in (("cuda", stay), ("type", type_name), ("record_stream", no_record)):
        setattr(torch.Tensor, name, method)


# ---- collectives that would silently send wrong bytes


def _refuse_non_contiguous(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a collective: raises for a non-contiguous tensor, of which gloo would send wrong bytes."""

    @functools.wraps(collective)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        listed = (item for value in given if isinstance(value, (list, tuple)) for item in value)
        for value in (*given, *listed):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_contiguous():
                raise ValueError(
                    f"torch.distributed.{name}: tensor of shape {tuple(value.shape)} and strides {value.stride()} is "
                    "not contiguous; gloo would send wrong bytes. Call .contiguous() first and use the result."
                )
        return collective(*args, **kwargs)

    return guarded


# ---- patches by module; each comment says what Megatron does without the patch, in all versions unless it names some


def _fix_core(module: Any) -> None:
    # from 0.17 on replaces torch.storage._load_from_bytes in the whole process: pickles of CPU tensors would name a
    # function of Megatron, which processes without Megatron (reward workers, clients of `mrl serve`) cannot import
    torch.storage._load_from_bytes = _load_from_bytes


def _fix_mappings(module: Any) -> None:
    # _reduce() reduces a contiguous copy of a non-contiguous input and returns the input, unreduced
    reduce = module._reduce
    module._reduce = lambda input_, group: reduce(input_.contiguous(), group)


def _fix_mappings_cpu(module: Any) -> None:
    _fix_mappings(module)
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    # gloo gathers and scatters only parts of equal size; experts sharded over ranks get parts of different sizes
    def gather_any(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        size = group.size()
        if output_split_sizes is None or size == 1:
            gathered: torch.Tensor = gather(input_, group, output_split_sizes, use_global_buffer)
            return gathered
        parts = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        copies = torch.cat([input_] * size)
        dist.all_to_all_single(parts, copies, output_split_sizes, [input_.size(0)] * size, group=group)
        return parts

    def reduce_scatter_any(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        size = group.size()
        if input_split_sizes is None or size == 1:
            scattered: torch.Tensor = reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
            return scattered
        own = input_split_sizes[group.rank()]
        parts = input_.new_empty((size, own, *input_.shape[1:]))
        dist.all_to_all_single(
            parts.view(size * own, *input_.shape[1:]), input_.contiguous(), [own] * size, input_split_sizes, group=group
        )
        return parts.sum(0)

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_any, reduce_scatter_any


def _fix_moe_utils(module: Any) -> None:
    # NameError in the router without TransformerEngine
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _fix_moe_utils_cpu(module: Any) -> None:
    _fix_moe_utils(module)
    # split sizes become numpy arrays only where they come from a GPU; as tensors, collectives refuse them
    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _fix_latent_attention(module: Any) -> None:
    # HAVE_TE is true if placeholders of TransformerEngine's classes can be imported; isinstance() rejects these
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False


def _fix_random(module: Any) -> None:
    # `fp8 is not None` with default False: NameError without TransformerEngine when norms are recomputed
    if not module.HAVE_TE:
        module.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _copy_storage(emptied: torch.Tensor, source: torch.Tensor) -> None:
    """Restores a freed tensor from a recomputed one; 0.16 copies too, later versions share the storage by C++ code."""
    with torch.no_grad():
        storage = emptied.untyped_storage()
        storage.resize_(source.untyped_storage().size())
        storage.copy_(source.untyped_storage())


def _fix_random_cpu(module: Any) -> None:
    _fix_random(module)
    module._lazy_call = lambda callback, **kwargs: callback()  # would wait for CUDA to be initialised
    if hasattr(module, "_get_share_storage"):  # from 0.17 on compiles C++ code at the first selective recompute
        module._get_share_storage = lambda: _copy_storage


def _fix_mapping_cpu(module: Any) -> None:
    """Shards that a rank only passes on while a checkpoint is loaded are allocated on the CPU."""
    module.ShardedTensor.init_data.__defaults__ = (_cpu_factory(torch.empty),)


def _fix_jit(module: Any) -> None:
    # torch.compile of small fusions costs 19 s of inductor builds on a CPU and gains nothing there
    module.disable_jit_fuser()


def _fix_filesystem(module: Any) -> None:
    # a synchronous save forks a writer for each file, which hangs when its rank is killed, and spawns a manager for
    # their results, which runs __main__ again; here threads of the rank write the files
    writer = module.FileSystemWriterAsync
    write = staticmethod(functools.partial(_write_files, writer.write_preloaded_data))
    if hasattr(module, "_get_write_results_queue"):  # 0.16
        module._get_write_results_queue = queue.SimpleQueue
        writer.write_preloaded_data_multiproc = write
    else:  # from 0.17 on uses threads, but one after another, and loses an error of all but the last
        module.get_write_results_queue = lambda mp_mode="spawn": queue.SimpleQueue()
        writer.write_preloaded_data_multithread = write


def _fix_serialization(module: Any) -> None:
    # 0.19 stores what is no tensor in the shards' files and reads it by torch's planner, which would execute code
    if not hasattr(module, "_legacy_common_state_exists"):
        return
    from mrl.checkpoint.formats.checkpoint_metadata import read_common_state  # only where checkpoints are used

    def load_common_state_dict(checkpoint_dir: Any) -> Any:
        module.verify_checkpoint(str(checkpoint_dir))
        if module._legacy_common_state_exists(checkpoint_dir):
            return module.load_common(checkpoint_dir)
        return read_common_state(Path(checkpoint_dir))

    module.load_common_state_dict = load_common_state_dict


def _write_files(
    write: Callable[..., None],
    transforms: list[Any],
    use_msc: bool,
    rank: int,
    buckets: list[Any],
    results: queue.SimpleQueue[Any],
) -> None:
    """Writes each bucket to its file in threads; puts the results into `results` in Megatron's format."""
    written: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    unfinished: queue.Queue[int] = queue.Queue()  # each writer removes one item when it is done
    with ThreadPoolExecutor(len(buckets), "write") as threads:
        writers = []
        for index, bucket in enumerate(buckets):
            unfinished.put(index)
            given = (transforms, index, bucket, written, unfinished)
            writers.append(threads.submit(write, *given, use_fsync=True, use_msc=use_msc))
        for each in writers:
            each.result()
    found = dict(written.get() for _ in buckets)
    failed = [result for _, result in sorted(found.items()) if isinstance(result, Exception)]
    results.put(failed[0] if failed else found)


def total_l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool) -> Any:
    """Returns the L2 norm of all tensors [1] and None, like Megatron's `local_multi_tensor_l2_norm`.

    The host does not synchronise with the device. The norm stays on the device of the first tensor.
    """
    return torch.nn.utils.get_total_norm(tensor_lists[0]).view(1), None


def _fix_clip_grads(module: Any) -> None:
    # without TransformerEngine and Apex the host waits for the device once for each gradient
    if module.l2_norm_impl.__module__ == "megatron.core.utils":
        module.l2_norm_impl = total_l2_norm


_ANY_DEVICE_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core": _fix_core,
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.tensor_parallel.random": _fix_random,
    "megatron.core.transformer.moe.moe_utils": _fix_moe_utils,
    "megatron.core.transformer.multi_latent_attention": _fix_latent_attention,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _fix_filesystem,
    "megatron.core.dist_checkpointing.serialization": _fix_serialization,
}
_CUDA_FIXES: dict[str, Callable[[ModuleType], None]] = {"megatron.core.optimizer.clip_grads": _fix_clip_grads}
_CPU_FIXES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.dist_checkpointing.mapping": _fix_mapping_cpu,
    "megatron.core.jit": _fix_jit,
    "megatron.core.tensor_parallel.mappings": _fix_mappings_cpu,
    "megatron.core.tensor_parallel.random": _fix_random_cpu,
    "megatron.core.transformer.moe.moe_utils": _fix_moe_utils_cpu,
}
