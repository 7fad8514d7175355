"""How much memory each phase of a step took at its peak: the measured side of `mrl plan`.

Owns the reading of this process and of its device; `timers.py` says when a phase begins and ends. On CUDA the peak is
what torch's allocator handed out; engines that allocate past it are seen in what the device as a whole has in use. On a
CPU it is the largest resident set, which Linux keeps for us; where it does not, there are no peaks.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from mrl.models.kernels import cuda_memory

PEAK, IN_USE = "perf/memory_gb/<phase>", "perf/device_memory_gb/<phase>"
ALLOCATED, RESERVED = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
GIB = 1024**3
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = b"5"
"""Written to `CLEAR`, it makes VmHWM what is resident now (Linux, proc(5))."""


class MemoryLedger:
    """Peaks of the phases of one step, and on CUDA those of the whole run."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Reads `device`."""
        self._device = torch.device(device)
        self._keeps_peaks = self._device.type == "cuda" or _reset_peak()
        self._peaks: dict[str, int] = {}
        self._in_use: dict[str, int] = {}
        self._highest = {ALLOCATED: 0, RESERVED: 0}

    def forget(self) -> None:
        """A new step begins."""
        self._peaks, self._in_use = {}, {}

    def begin(self) -> None:
        """A phase begins: its peak counts from here."""
        if self._device.type == "cuda":
            self._raise_highest()
            torch.cuda.reset_peak_memory_stats(self._device)
            cuda_memory.reset_peak()
        elif self._keeps_peaks:
            _reset_peak()

    def end(self, phase: str) -> None:
        """It ends; of a phase that ran before in this step the larger peak counts."""
        if self._keeps_peaks:
            self._peaks[phase] = max(self._peak(), self._peaks.get(phase, 0))
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._in_use[phase] = total - free

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of each phase of the step so far."""
        return dict(self._peaks)

    def metrics(self) -> dict[str, float]:
        """In GiB (2^30 bytes; the GB in the names is verl's); `mrl/docs/metrics.md` says what each means."""
        found: dict[str, float] = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss}
        found |= {PEAK.replace("<phase>", phase): peak for phase, peak in self._peaks.items()}
        found |= {IN_USE.replace("<phase>", phase): used for phase, used in self._in_use.items()}
        if self._device.type == "cuda":
            self._raise_highest()
            found |= self._highest
        return {name: value / GIB for name, value in found.items()}

    def _peak(self) -> int:
        if self._device.type == "cuda":
            # both peaks, as if they came at once: the engine's memory stays alike while a phase samples
            return int(torch.cuda.max_memory_allocated(self._device)) + cuda_memory.peak_bytes()
        with STATUS.open("rb", buffering=0) as status:
            _, _, after = (status.read() or b"").partition(b"VmHWM:")
        return int(after.split(maxsplit=1)[0]) * 1024

    def _raise_highest(self) -> None:
        read = {ALLOCATED: torch.cuda.max_memory_allocated, RESERVED: torch.cuda.max_memory_reserved}
        self._highest = {name: max(most, read[name](self._device)) for name, most in self._highest.items()}


def _reset_peak() -> bool:
    """Whether Linux let us."""
    try:
        with CLEAR.open("wb", buffering=0) as clear:
            clear.write(RESET_PEAK)
    except OSError:
        return False
    return True
