"""One thread per process, slow tests first, and tests that need a program or a device only where it is."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every child process
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import compileall
import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from mrl.distributed.worker_processes.sandbox import bubblewrap_works
from mrl.models.kernels.bindings import load_library
from tests import imports, ranks, tiers, warm
from tests.launch.cluster import missing_programs
from tests.peft_import import PeftFinder
from tests.source import PACKAGE

sys.meta_path.insert(0, PeftFinder())

torch.set_num_threads(1)
if hasattr(os, "SCHED_BATCH"):
    # of all that the tests start, too: a rank that wakes up waits for its turn. Gloo's thread turns in a circle while
    # another holds its lock, which on a busy machine is one that was pushed aside in the middle of a message
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all is collected: what is imported and collected is no garbage, and much to look through
if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(PACKAGE, quiet=2)  # once, not in each of hundreds of processes
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # until all is collected: pytest keeps the tests as it rewrites them, in three seconds

PRELOADS_VLLM = "vllm_ranks"
"""Fixture whose ranks import vLLM before the test runs: a test without the marker would fail where vLLM is missing."""

MARKERS = ("gpu", "multigpu", "compiler", "te", "trtllm", *tiers.NEED_MORE)

PACKAGES = {"trtllm": "tensorrt_llm", "vllm": "vllm"}


@cache
def _missing(marker: str) -> str | None:
    if marker == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if marker == "multigpu" and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    if marker == "compiler" and (problem := load_library(torch.float32)[1]):
        return f"needs compiled functions: {problem}"
    if marker == "te" and any(importlib.util.find_spec(name) is None for name in ("transformer_engine", "einops")):
        return "needs the wheel transformer-engine and einops"
    if marker in PACKAGES and importlib.util.find_spec(PACKAGES[marker]) is None:
        return f"needs {PACKAGES[marker]}"
    if marker == "vllm" and not torch.cpu._is_avx512_supported():
        return "needs AVX-512: the ranks of a replica of vLLM's build for CPUs give wrong numbers without"
    if marker == "mpi" and not _has_mpi():
        return "needs mpirun, and mpi4py that finds an MPI library"
    if marker == "slurm" and (missing := missing_programs()):
        return f"needs SLURM and munge: no {', '.join(missing)}"
    if marker == "netns" and (os.getuid() != 0 or shutil.which("ip") is None):
        return "needs root and ip (iproute2)"
    if marker == "bubblewrap" and not bubblewrap_works():
        return "bubblewrap is not installed, or may not make namespaces here"
    if marker == "shellcheck" and shutil.which("shellcheck") is None:
        return "needs shellcheck"
    return None


def _has_mpi() -> bool:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, check=False).returncode == 0


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers)
    if (given := getattr(config, "workerinput", None)) is not None:
        imports.use(given["imports"])
    ranks.SERVER.use()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = warm.python()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["imports"] = str(imports.folder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PRELOADS_VLLM in item.fixturenames and not item.get_closest_marker("vllm"):
            raise pytest.UsageError(f"{item.nodeid} uses the fixture {PRELOADS_VLLM} without the marker vllm")
        for marker in MARKERS:
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # Megatron collects garbage again and again
    gc.enable()
    sys.dont_write_bytecode = WRITES_NO_BYTECODE


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects ten times more, to hear of exceptions that nobody sees
