"""Restores process state that TensorRT-LLM changes when it starts inside the trainer's process.

TensorRT-LLM expects a process of its own. Its start binds the calling thread to CPU cores, selects a device, draws from
Python's random numbers to estimate the size of its cache, and caps torch's allocator at the memory that is free next to
that cache (`_torch/pyexecutor/_util.py: _adjust_torch_mem_fraction`). With that cap the trainer would run out of memory
while the engine sleeps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_state_restored(device: torch.device) -> Iterator[None]:
    """Restores CPU affinity, current device, Python's random state and the allocator's cap when the block ends."""
    cores, numbers = os.sched_getaffinity(0), random.getstate()
    on_gpu = device.type == "cuda"
    fraction = torch.cuda.get_per_process_memory_fraction(device) if on_gpu else 1.0
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        random.setstate(numbers)
        if on_gpu:
            torch.cuda.set_device(device)
            torch.cuda.set_per_process_memory_fraction(fraction, device)
