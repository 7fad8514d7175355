"""One thread per process, and tests that need hardware only where it is."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every child process
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import importlib.util
import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch

from tests.launch.cluster import missing_programs

torch.set_num_threads(1)

MARKERS = ("gpu", "multigpu", "trtllm", "mpi", "slurm", "netns")


def _missing(marker: str) -> str | None:
    if marker == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if marker == "multigpu" and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    if marker == "trtllm" and importlib.util.find_spec("tensorrt_llm") is None:
        return "needs tensorrt_llm"
    if marker == "mpi" and not _has_mpi():
        return "needs mpirun, and mpi4py that finds an MPI library"
    if marker == "slurm" and (missing := missing_programs()):
        return f"needs SLURM and munge: no {', '.join(missing)}"
    if marker == "netns" and (os.getuid() != 0 or shutil.which("ip") is None):
        return "needs root and ip (iproute2)"
    return None


@cache
def _has_mpi() -> bool:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, check=False).returncode == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in MARKERS:
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))
