"""vLLM's own sleep and wake of a GPU, its worker's and its allocator's Python, with the host's memory for the device's.

Replaced are the functions in C that map and copy pages of a GPU: a page that is taken away is overwritten.
"""

import ctypes
from dataclasses import replace
from types import MethodType, SimpleNamespace

import pytest
import torch

from mrl.engines.base import SamplingConfig
from mrl.engines.vllm.llm_runtime import SMALLEST
from mrl.models.hf_config import arch_from_folder
from tests.engines.native.tiny import make_prompts, refit
from tests.engines.vllm import tiny
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

SAMPLED = SamplingConfig(n=2, max_tokens=12, seed=3)
LOST = 0x4B
"""What each byte of a lost page becomes: numbers of 13 million in float32."""
GIB = 1 << 30


class Pages:
    """Tensors of an engine as pages of a GPU that can be taken away."""

    def __init__(self, engine):
        from vllm import device_allocator
        from vllm.device_allocator import AllocationData, cumem
        from vllm.v1.worker.gpu_worker import Worker

        worker = engine._runtime.engine.model_executor.driver_worker.worker
        self.gone = set()
        self.model = engine._runtime.model()
        cumem.cumem_available, cumem.libcudart = True, SimpleNamespace(cudaMemcpy=ctypes.memmove)
        cumem.python_unmap_and_release, cumem.python_create_and_map = self.unmap, self.map
        device_allocator.get_mem_allocator_instance = cumem.CuMemAllocator.get_instance
        torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None
        torch.accelerator.get_memory_info = lambda: (8 * GIB + sum(size for _, size in self.gone), 16 * GIB)
        worker.synchronize_device = lambda: None
        worker.sleep, worker.wake_up = MethodType(Worker.sleep, worker), MethodType(Worker.wake_up, worker)
        self.worker, self.worker_class = worker, Worker
        found = cumem.CuMemAllocator.get_instance().pointer_to_data
        self.parts = {
            "weights": [*self.model.parameters(), *(each for each in self.model.buffers() if each.numel())],
            "kv_cache": worker.model_runner.kv_caches,
        }
        for tag, tensors in self.parts.items():
            for tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                found[tensor.data_ptr()] = AllocationData((0, size, tensor.data_ptr(), 0), tag)
        self.all = {(pointer, each.handle[1]) for pointer, each in found.items()}

    def of(self, tag):
        return {(each.data_ptr(), each.numel() * each.element_size()) for each in self.parts[tag]}

    def unmap(self, _, size, pointer, __):
        assert (pointer, size) not in self.gone
        ctypes.memset(pointer, LOST, size)
        self.gone.add((pointer, size))

    def map(self, _, size, pointer, __):
        self.gone.remove((pointer, size))


def to_sleep(engine):
    """As on a GPU."""
    spec, engine.spec = engine.spec, replace(engine.spec, device=torch.device("cuda"))
    engine.sleep()
    engine.sleep()
    engine.spec = spec


def slept(folder):
    from vllm.v1.worker.utils import request_memory

    arch, prompts = arch_from_folder(folder), make_prompts((40, 9))
    with tiny.engine(folder, engine_kwargs={"vllm": {"block_size": 32}}) as engine:
        refit(engine, folder, arch)
        before = engine.generate(prompts, SAMPLED)
        pages = Pages(engine)
        stored = {name: value.clone() for name, value in pages.model.named_parameters()}
        addresses = {name: value.data_ptr() for name, value in pages.model.named_parameters()}

        to_sleep(engine)
        assert pages.gone == pages.all
        assert not any(torch.equal(value, stored[name]) for name, value in pages.model.named_parameters())
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            engine.generate(prompts, SAMPLED)
        engine.wake()
        assert not pages.gone
        assert engine.generate(prompts, SAMPLED) == before  # of prompts that were cached, in pages that are lost

        to_sleep(engine)
        engine.begin_update()
        assert pages.gone == pages.of("kv_cache")
        for name, value in pages.model.named_parameters():
            assert torch.equal(value, stored[name]) and value.data_ptr() == addresses[name], name
        refit(engine, folder, arch)
        assert pages.gone == pages.of("kv_cache")
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            engine.generate(prompts, SAMPLED)
        engine.wake()
        assert engine.generate(prompts, SAMPLED) == before

        cache = engine._runtime.engine.vllm_config.cache_config
        pages.worker.init_snapshot = full = SimpleNamespace(free_memory=GIB, total_memory=80 * GIB, device_="cuda")
        assert pages.worker_class.determine_available_memory(pages.worker) == cache.kv_cache_memory_bytes
        assert cache.gpu_memory_utilization == SMALLEST
        request_memory(full, cache)  # beside an actor that has the rest
        full.free_memory = 0
        with pytest.raises(ValueError, match="Free memory"):
            request_memory(full, cache)


def test_weights_come_back_for_a_refit_and_the_cache_after_it(folders):
    """No prefix is read from a cache that was away, and vLLM makes its cache as large as it is told."""
    run_ranks(1, slept, folders("qwen2"))
