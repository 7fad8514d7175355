"""What an engine's whole life leaves of the process that it shares with the trainer, and what it says meanwhile."""

import gc
import logging
import os
import random
import tempfile
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from torch._inductor import async_compile

from mrl.engines.base import SamplingConfig
from mrl.engines.vllm.process_state import silence_triton_warnings
from mrl.models.hf_config import arch_from_folder
from tests.engines.native.tiny import make_prompts, refit
from tests.engines.vllm import tiny
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]


def state():
    """Of this process, by name."""
    policies = Path("/proc/self/numa_maps")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return {
        "memory policy": {line.split()[1] for line in policies.read_text().splitlines()} if policies.exists() else None,
        "memory and cores": [line for line in status.splitlines() if line.startswith(("Mems_allowed", "Cpus_allowed"))],
        "cores": os.sched_getaffinity(0),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__module__,
        # what torch's own compiler tells its helpers is set when it is first imported
        "environment": {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name},
        "python's random numbers": hash(random.getstate()),
        "numpy's": hash(np.random.get_state()[1].tobytes()),
        "torch's": hash(torch.random.get_rng_state().numpy().tobytes()),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "garbage collection": (gc.isenabled(), gc.get_freeze_count() > 0),
        "log": (logging.getLogger().level, [str(one) for one in logging.getLogger().handlers]),
        "shared memory": {name for name in os.listdir("/dev/shm") if name.startswith("mrl-")},
    }


@contextmanager
def heard():
    """What the block writes to the two streams, by whatever way; warnings in full."""
    said = []
    with tempfile.TemporaryFile("w+") as file, warnings.catch_warnings():
        warnings.simplefilter("always")
        streams = {number: os.dup(number) for number in (1, 2)}
        for number in streams:
            os.dup2(file.fileno(), number)
        try:
            yield said
        finally:
            for number, copy in streams.items():
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            said += file.read().splitlines()


def life(folder):
    from tests.engines.vllm import imported

    threads = threading.enumerate()  # a rank is used again
    vars(gc).update(imported.FREEZES)
    torch._dynamo.config.disable = False
    before = state()
    with heard() as said, tiny.engine(folder) as engine:
        refit(engine, folder, arch_from_folder(folder))
        assert engine.generate(make_prompts((3, 9)), SamplingConfig(n=2, max_tokens=4))
    after = state()
    deadline = time.monotonic() + 20
    while (left := threads_beside(threads)) and time.monotonic() < deadline:
        time.sleep(0.1)  # a pool that was let go of ends its threads a moment later
    return said, before, after, [thread.name for thread in left]


def threads_beside(known):
    """Without torch's own, which compiled what vLLM had it compile, where no run before has left it in a file."""
    pool = async_compile.AsyncCompile.pool
    of_torch = pool()._threads if pool.cache_info().currsize else ()
    return [each for each in threading.enumerate() if not each.daemon and each not in known and each not in of_torch]


def test_a_process_is_as_before_and_nothing_was_said(folders):
    ((said, before, after, threads),) = run_ranks(1, life, folders("qwen3_moe"))
    assert after == before
    assert threads == []
    assert said == []


@pytest.mark.parametrize(
    ("logger", "text"),
    [
        ("torch._library.triton", "Triton not available, find_triton_kernels = []"),
        (
            "vllm.triton_utils.importing",
            "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
        ),
    ],
)
def test_nothing_is_heard_of_a_triton_that_is_not_used(logger, text, caplog):
    silence_triton_warnings()
    logging.getLogger(logger).warning(text)
    logging.getLogger(logger).warning("something else")
    assert caplog.messages == ["something else"]
