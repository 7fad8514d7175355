"""Restores the process state that vLLM's start changes and that the trainer shares.

vLLM seeds every random number generator and draws from them at each step, sets environment variables and the precision
of float32 products, makes all loggers write to the terminal, and on a CPU binds the cores of the threads and disables
`torch.set_num_threads`. Its replacements of `torch.cuda.Stream` and pinned memory in a CPU build stay: nothing there
uses the real ones. Also silences log messages of other packages during the start.
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
"""Variables for vLLM's core in this process, and for the model runner that was tested (a newer one is the default on
GPUs)."""

OWN = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Variables that stay set, because vLLM reads them later too: no usage reports, no core binding, and only errors in its
log. The user's values take precedence."""

ABSENT_TRITON = {
    "torch._library.triton": "Triton not available",
    "vllm.triton_utils.importing": "doesn't include CPU backend",
}
"""Logger -> message about Triton to suppress."""


def silence_triton_warnings() -> None:
    """Suppresses messages that Triton is missing on a CPU, where it is not used."""
    for logger in ABSENT_TRITON:
        logging.getLogger(logger).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return ABSENT_TRITON[record.name] not in record.getMessage()


@contextmanager
def process_state_restored(device: torch.device, *, place: int = 0, size: int = 1) -> Iterator[None]:
    """Restores random numbers, cores, threads, device, TF32, log and environment after the block.

    Args:
        device: Device of this rank.
        place: Rank in the replica, which is the world for vLLM.
        size: Ranks of the replica.
    """
    launch.set_env(ALWAYS, unless_set=OWN)
    if device.type == "cpu":
        silence_triton_warnings()
    here = launch.get_launcher_env()
    local = device.index if device.type == "cuda" else here.local_rank  # vLLM uses LOCAL_RANK as the device index
    given = {"RANK": place, "WORLD_SIZE": size, "LOCAL_RANK": local}
    precision = torch.get_float32_matmul_precision()
    cores, set_threads, threads = os.sched_getaffinity(0), torch.set_num_threads, torch.get_num_threads()
    log = logging.getLogger()
    handlers = list(log.handlers)
    with (
        launch.scrubbed_env(hide=(), given={name: str(value) for name, value in given.items()}),
        rng_state_restored(device),
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
def rng_state_restored(device: torch.device) -> Iterator[None]:
    """Restores the state of all random number generators after the block."""
    python = random.getstate()
    array = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
