"""What vLLM's start changes in the process that it shares with the trainer, and that is put back.

Owns the list. vLLM seeds every random number generator and draws from them at each step, sets variables of the
environment and the precision of products in float32, has all loggers write to the terminal, and on a CPU binds the
cores of the threads and makes `torch.set_num_threads` do nothing. Its stand-ins for `torch.cuda.Stream` and pinned
memory in a CPU build stay: nothing there uses the real ones. Also what its start has others say that is no user's
business.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from mrl.distributed import launch

ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""vLLM's core is in this process, and its model in the runner that was tried; a newer one is the default on GPUs."""

OWN = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Variables that vLLM reads now and then, so that they stay: no word to others about the job, cores left alone, and its
log only where something failed. What the user has set goes before."""

ABSENT_TRITON = {
    "torch._library.triton": "Triton not available",
    "vllm.triton_utils.importing": "doesn't include CPU backend",
}
"""Logger -> what it says of Triton."""


def quieten() -> None:
    """On a CPU nobody is told that Triton is not there, or knows no CPU: it is not used."""
    for logger in ABSENT_TRITON:
        logging.getLogger(logger).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return ABSENT_TRITON[record.name] not in record.getMessage()


@contextmanager
def kept(device: torch.device, *, place: int = 0, size: int = 1) -> Iterator[None]:
    """After the block, random numbers, cores, threads, the device, TF32, the log and the environment are as before.

    Args:
        device: Of this rank.
        place: Of it in its replica, which is the whole job for vLLM.
        size: Ranks of the replica.
    """
    launch.give_variables(ALWAYS, unless_set=OWN)
    if device.type == "cpu":
        quieten()
    here = launch.environment()
    local = device.index if device.type == "cuda" else here.local_rank  # vLLM takes the device of that number
    given = {"RANK": place, "WORLD_SIZE": size, "LOCAL_RANK": local}
    precision = torch.get_float32_matmul_precision()
    cores, set_threads, threads = os.sched_getaffinity(0), torch.set_num_threads, torch.get_num_threads()
    log = logging.getLogger()
    handlers = list(log.handlers)
    with (
        launch.scrubbed_variables(hide=(), given={name: str(value) for name, value in given.items()}),
        same_numbers(device),
    ):
        try:
            yield
        finally:
            os.sched_setaffinity(0, cores)
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            log.handlers[:] = handlers
            torch.set_float32_matmul_precision(precision)
            if device.type == "cuda":
                torch.cuda.set_device(device)


@contextmanager
def same_numbers(device: torch.device) -> Iterator[None]:
    """After the block, the random number generators stand where they stood."""
    python = random.getstate()
    array = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
