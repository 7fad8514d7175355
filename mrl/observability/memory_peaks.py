"""Peak memory of each phase of a step, measured for this process and its device; compare with `mrl plan`.

On CUDA the peak is that of torch's allocator; memory that an engine allocates elsewhere appears in the memory in use on
the device. On a CPU it is the peak resident set from Linux's /proc; without that there are no peaks.
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
"""Written to `CLEAR`, it resets VmHWM to the current resident set (Linux, proc(5))."""


class PeakMemory:
    """Peak memory of the phases of one step, and on CUDA also of the complete run."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        """Selects the device to measure."""
        self._device = torch.device(device)
        self._keeps_peaks = self._device.type == "cuda" or _reset_peak()
        self._peaks: dict[str, int] = {}
        self._in_use: dict[str, int] = {}
        self._highest = {ALLOCATED: 0, RESERVED: 0}

    def reset(self) -> None:
        """Clears the peaks at the start of a step."""
        self._peaks, self._in_use = {}, {}

    def begin(self) -> None:
        """Resets the peak counters at the start of a phase."""
        if self._device.type == "cuda":
            self._raise_highest()
            torch.cuda.reset_peak_memory_stats(self._device)
            cuda_memory.reset_peak()
        elif self._keeps_peaks:
            _reset_peak()

    def end(self, phase: str) -> None:
        """Records the peak at the end of a phase; for a phase that repeats in a step, the largest one."""
        if self._keeps_peaks:
            self._peaks[phase] = max(self._peak(), self._peaks.get(phase, 0))
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._in_use[phase] = total - free

    @property
    def peaks(self) -> dict[str, int]:
        """Peak of each phase of the step so far, bytes."""
        return dict(self._peaks)

    def metrics(self) -> dict[str, float]:
        """Returns the peaks in GiB (2^30 bytes; the names say GB as in verl); see `mrl/docs/metrics.md`."""
        found: dict[str, float] = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss}
        found |= {PEAK.replace("<phase>", phase): peak for phase, peak in self._peaks.items()}
        found |= {IN_USE.replace("<phase>", phase): used for phase, used in self._in_use.items()}
        if self._device.type == "cuda":
            self._raise_highest()
            found |= self._highest
        return {name: value / GIB for name, value in found.items()}

    def _peak(self) -> int:
        if self._device.type == "cuda":
            # The sum assumes that both peaks coincide: the engine's memory is almost constant while it samples.
            return int(torch.cuda.max_memory_allocated(self._device)) + cuda_memory.peak_bytes()
        with STATUS.open("rb", buffering=0) as status:
            _, _, after = (status.read() or b"").partition(b"VmHWM:")
        return int(after.split(maxsplit=1)[0]) * 1024

    def _raise_highest(self) -> None:
        read = {ALLOCATED: torch.cuda.max_memory_allocated, RESERVED: torch.cuda.max_memory_reserved}
        self._highest = {name: max(most, read[name](self._device)) for name, most in self._highest.items()}


def _reset_peak() -> bool:
    """Resets the peak resident set; returns whether Linux allowed it."""
    try:
        with CLEAR.open("wb", buffering=0) as clear:
            clear.write(RESET_PEAK)
    except OSError:
        return False
    return True
