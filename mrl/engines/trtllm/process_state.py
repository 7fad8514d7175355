"""What TensorRT-LLM's start changes in the process that it shares with the trainer, and that is put back.

Owns the list. Elsewhere TensorRT-LLM has a process of its own, so it binds the cores of the thread that starts it,
chooses the device, draws from Python's random numbers to estimate the size of its cache, and ends by capping torch's
allocator at what is free beside that cache (`_torch/pyexecutor/_util.py: _adjust_torch_mem_fraction`): a trainer would
run out of memory while the engine sleeps.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """After the block, this thread's cores, `device`, Python's random numbers and the allocator's cap are as before."""
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
