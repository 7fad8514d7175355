"""One thread per process, and tests that need hardware only where it is."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every child process
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import importlib.util

import pytest
import torch

torch.set_num_threads(1)


def _missing(marker: str) -> str | None:
    if marker == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if marker == "multigpu" and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    if marker == "trtllm" and importlib.util.find_spec("tensorrt_llm") is None:
        return "needs tensorrt_llm"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "multigpu", "trtllm"):
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))
