"""What every benchmark of `tools/` says beside its figures: spread of times, device, revision; and how it takes them.

Owns these words, the option `--device`, the clock that waits for a GPU, and the device's own limits: its memory's
bandwidth and its rate of matrix products, measured in the run that they are compared with. What else is measured is in
each tool.
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
"""Read of a CPU's memory; copied on a GPU, whose caches hold a part of it only."""

MATRIX_WIDTH = {"cpu": 1024, "cuda": 8192}
"""Of the product that a rate is measured with; smaller ones do not fill the device."""

SHORT_S = 1e-3


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device {cpu,cuda,auto}`: what was chosen, "cpu" or "cuda", is in `device`; auto is CUDA where there is one."""
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
    """Waits until the device has done what it was asked; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Seconds = Callable[[], float]
"""A clock: of the wall, or of what a thread or a process has of the processor."""


def seconds(action: Callable[[], object], device: torch.device, clock: Seconds = time.perf_counter) -> float:
    """How long the action takes, what it has asked of the device included."""
    synchronize(device)
    began = clock()
    action()
    synchronize(device)
    return clock() - began


def best_time(
    action: Callable[[], object], device: torch.device, repeats: int = 5, clock: Seconds = time.perf_counter
) -> float:
    """Shortest of a few calls after a first one, s."""
    return min([seconds(action, device, clock) for _ in range(repeats + 1)][1:])


class PartTimes:
    """Processor time of this thread, by part.

    Attributes:
        seconds: Of each part, so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for the part."""

        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self.seconds[part] += time.thread_time() - began

        return call


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second: on a CPU of reading 512 MB, on a GPU of copying them within its memory, both ways counted."""
    buffer = torch.ones(READ_BYTES // 4, device=device)
    if device.type == "cpu":
        return READ_BYTES / best_time(lambda: buffer.sum(), device)
    other = torch.empty_like(buffer)
    return 2 * READ_BYTES / best_time(lambda: other.copy_(buffer), device)


def matrix_rate(dtype: torch.dtype, device: torch.device, clock: Seconds = time.perf_counter) -> float:
    """FLOP per second of a square product."""
    width = MATRIX_WIDTH[device.type]
    a = torch.randn(width, width, device=device).to(dtype)
    return 2 * width**3 / best_time(lambda: a @ a, device, clock=clock)


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, shortest and longest, s."""
    found = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    return {name: round(seconds, 4 if seconds >= SHORT_S else 7) for name, seconds in found.items()}


def device_name(device: str = "cpu") -> str:
    """The GPU; or the processor, and what torch uses of it."""
    if device == "cuda":
        return launch.device_name(torch.device(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """Returns the revision that was measured, with "-dirty" where files differ from it.

    It is "unknown" outside a repository and where git does not run: what was measured is worth more than its name.
    """
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
