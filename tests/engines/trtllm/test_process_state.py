"""TensorRT-LLM starts in the trainer's process: what it changes there is as before when it is up."""

import os
import random

import pytest
import torch

from tests.engines.trtllm import tiny

GIB = 1 << 30


class Gpu:
    """A GPU of 80 GiB, as far as a start asks torch for it.

    Attributes:
        reserved: Bytes that torch's allocator holds, the trainer's.
        fraction: The cap of torch's allocator.
        current: The device that the process computes on.
    """

    total = 80 * GIB

    def __init__(self, monkeypatch):
        self.reserved, self.fraction, self.current = 20 * GIB, 1.0, 0
        played = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "set_device": lambda device: setattr(self, "current", getattr(device, "index", device)),
            "synchronize": lambda device: None,
            "memory_reserved": lambda: self.reserved,
            "mem_get_info": lambda: (self.free, self.total),
            "get_per_process_memory_fraction": lambda device=None: self.fraction,
            "set_per_process_memory_fraction": lambda fraction, device=None: setattr(self, "fraction", fraction),
        }
        for name, function in played.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @property
    def free(self):
        from tensorrt_llm._torch import virtual_memory

        return self.total - self.reserved - virtual_memory.held()

    @property
    def room(self):
        """Bytes that the trainer can still allocate."""
        return min(self.free, int(self.fraction * self.total) - self.reserved)


@pytest.mark.parametrize("fraction", [1.0, 0.9])
def test_while_the_engine_sleeps_the_trainer_may_allocate_what_its_cache_took(standin, tmp_path, fraction):
    gpu = Gpu(standin)
    gpu.fraction = fraction
    with tiny.engine(tmp_path, device=torch.device("cuda:0"), gpu_memory_utilization=0.6) as engine:
        beside_the_cache = gpu.room
        engine.sleep()
        assert gpu.fraction == fraction
        assert gpu.room == int(fraction * gpu.total) - gpu.reserved > beside_the_cache


def test_random_numbers_cores_and_device_are_the_trainers_as_before(standin, tmp_path):
    drawn, cores = random.getstate(), os.sched_getaffinity(0)
    with tiny.engine(tmp_path):
        assert random.getstate() == drawn
        assert os.sched_getaffinity(0) == cores
