"""Helpers shared by all benchmarks of `tools/`: timing, spread of times, device name, revision, and `--device`.

Also measures the limits of the device, memory bandwidth and GEMM rate, in the same run as the benchmark.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mrl.distributed import launch
from mrl.errors import UserError

READ_BYTES = 512 * 2**20
"""Bytes that are read on a CPU, or copied on a GPU; larger than a GPU's caches."""

MATRIX_WIDTH = {"cpu": 1024, "cuda": 8192}
"""Width of the square GEMM by device; smaller ones do not fill the device."""

SHORT_S = 1e-3


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--device {cpu,cuda,auto}`, which resolves to "cpu" or "cuda"; auto prefers CUDA."""
    parser.add_argument(
        "--device", type=_chosen, default="auto", metavar="{cpu,cuda,auto}", help="default: CUDA where there is one"
    )


def _chosen(word: str) -> str:
    if word not in ("cpu", "cuda", "auto"):
        raise argparse.ArgumentTypeError(f"there is no device '{word}'; known: cpu, cuda, auto")
    try:
        return launch.choose_device(word)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).replace("run.device", "--device")) from error


def synchronize(device: torch.device) -> None:
    """Waits for the device to finish its work; no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Seconds = Callable[[], float]
"""Clock function: wall time, or CPU time of a thread or a process."""


def seconds(action: Callable[[], object], device: torch.device, clock: Seconds = time.perf_counter) -> float:
    """Returns the duration of an action, including its work on the device."""
    synchronize(device)
    began = clock()
    action()
    synchronize(device)
    return clock() - began


def best_time(
    action: Callable[[], object], device: torch.device, repeats: int = 5, clock: Seconds = time.perf_counter
) -> float:
    """Returns the shortest duration of `repeats` calls after a warm-up call, seconds."""
    return min([seconds(action, device, clock) for _ in range(repeats + 1)][1:])


class PartTimes:
    """Processor time of this thread by part.

    Attributes:
        seconds: Time of each part so far, seconds.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that its time is added to a part."""

        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds[part] += time.thread_time() - began

        return call


def memory_bandwidth(device: torch.device) -> float:
    """Measures bytes per second: reading 512 MB on a CPU, copying them on a GPU (read and write counted)."""
    buffer = torch.ones(READ_BYTES // 4, device=device)
    if device.type == "cpu":
        return READ_BYTES / best_time(lambda: buffer.sum(), device)
    other = torch.empty_like(buffer)
    return 2 * READ_BYTES / best_time(lambda: other.copy_(buffer), device)


def matrix_rate(dtype: torch.dtype, device: torch.device, clock: Seconds = time.perf_counter) -> float:
    """Measures the FLOP per second of a square GEMM."""
    width = MATRIX_WIDTH[device.type]
    a = torch.randn(width, width, device=device).to(dtype)
    return 2 * width**3 / best_time(lambda: a @ a, device, clock=clock)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Returns median, shortest and longest time, seconds."""
    found = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    return {name: round(seconds, 4 if seconds >= SHORT_S else 7) for name, seconds in found.items()}


def device_name(device: str = "cpu") -> str:
    """Returns the GPU's name, or the processor's with the instruction set that torch uses."""
    if device == "cuda":
        return launch.device_name(torch.device(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """Returns the measured git revision, with "-dirty" for local changes; "unknown" without git or a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
