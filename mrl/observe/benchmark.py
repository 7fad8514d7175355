"""What every benchmark of `tools/` says beside its figures: spread of times, device, revision.

Owns these words only; what is measured is in each tool.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, shortest and longest, s."""
    found = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    return {name: round(seconds, 4) for name, seconds in found.items()}


def device_name() -> str:
    """The processor, and what torch uses of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def commit() -> str:
    """The revision that was measured, "-dirty" where files differ from it; "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
