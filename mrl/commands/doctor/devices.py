"""Checks of the CUDA devices, their memory and driver, and of the CPU.

`distributed/launcher_env.py` assigns devices to ranks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.distributed.launcher_env import LauncherEnv, device_index
from mrl.errors import first_line

GB = 1e9
MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere, the first with bf16 tensor cores (NVIDIA's CUDA C++ Programming Guide)."""
MIN_FREE_FRAC = 0.95
"""Smallest free share of a device without other users: a CUDA context alone takes under 1 GB."""
PROBE = 256
"""Size of a product of matrices of ones; every element equals it, and bf16 represents it exactly."""
COMMAND_TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """CUDA device.

    Attributes:
        name: Name from torch.
        capability: Compute capability (major, minor).
        free_bytes: Free memory.
        total_bytes: Total memory.
        error: Error of a small matrix product; "": the result was right.
    """

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    error: str = ""


def read_gpu_count() -> int:
    """Returns the number of CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def read_gpus() -> list[Gpu]:
    """Returns the CUDA devices visible to this process, each tested with a matrix product."""
    found = []
    for index in range(read_gpu_count()):
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        found.append(Gpu(about.name, (about.major, about.minor), free, total, _product(torch.device("cuda", index))))
    return found


def _product(device: torch.device) -> str:
    """Returns the error of a matrix product on the device, "" if it is right."""
    try:
        ones = torch.ones((PROBE, PROBE), dtype=torch.bfloat16, device=device)
        if bool(((ones @ ones) == PROBE).all()):
            return ""
    except RuntimeError as error:
        return first_line(error)
    return "a product of matrices of ones is wrong"


def check_gpus(gpus: Sequence[Gpu], environment: LauncherEnv) -> Iterator[Finding]:
    """Checks the devices of a host.

    Args:
        gpus: Devices, at least one.
        environment: Environment of a rank on the host.
    """
    topic = "GPUs"
    clean = True
    for index, gpu in enumerate(gpus):
        where = f"device {index} ({gpu.name})"
        if gpu.error:
            clean = False
            yield problem(
                topic,
                f"{where} does not compute: {gpu.error}",
                "install the torch build for this GPU and driver; if that does not help, check the GPU's health",
            )
        if gpu.capability < MIN_CAPABILITY:
            clean = False
            yield warning(
                topic,
                f"{where} has compute capability {'.'.join(map(str, gpu.capability))}: no fast bf16",
                "use GPUs of 8.0 or newer, or model.dtype=float32",
            )
        if gpu.free_bytes < MIN_FREE_FRAC * gpu.total_bytes:
            clean = False
            yield warning(
                topic,
                f"{where} has {gpu.free_bytes / GB:.1f} of {gpu.total_bytes / GB:.1f} GB free",
                "end the other processes on it (see nvidia-smi)",
            )
    if len({(gpu.name, gpu.total_bytes) for gpu in gpus}) > 1:
        clean = False
        yield warning(topic, "the devices of this host differ", "each step takes as long as on the slowest device")
    device_index(environment, len(gpus))
    if clean:
        first = gpus[0]
        yield ok(
            topic,
            f"{len(gpus)} x {first.name}, compute capability {'.'.join(map(str, first.capability))}, "
            f"{first.total_bytes / GB:.0f} GB, free and working",
        )


def check_hidden_gpus(
    device_files: Sequence[str], cuda_of_torch: str | None, hidden_by: str | None
) -> Iterator[Finding]:
    """Explains why torch sees no CUDA device on this host.

    Args:
        device_files: NVIDIA's device files under /dev.
        cuda_of_torch: CUDA version of torch's build; None: a CPU build.
        hidden_by: CUDA_VISIBLE_DEVICES; None: not set.
    """
    if not device_files:
        yield ok("GPUs", "none found: runs use the CPU")
    elif hidden_by is not None and hidden_by.strip() in ("", "-1"):
        yield ok("GPUs", f"{len(device_files)} hidden by CUDA_VISIBLE_DEVICES: runs use the CPU")
    elif cuda_of_torch is None:
        advice = "install the torch build of this machine's CUDA (pytorch.org), or hide them: CUDA_VISIBLE_DEVICES=''"
        yield problem("GPUs", f"{len(device_files)} NVIDIA device(s), but torch is a CPU build", advice)
    else:
        yield problem(
            "GPUs",
            f"{len(device_files)} NVIDIA device(s), but torch for CUDA {cuda_of_torch} sees none",
            "check that the driver is loaded and new enough (nvidia-smi), and that the container has GPUs (--gpus all)",
        )


def nvidia_files() -> list[str]:
    """Returns the device files of NVIDIA's driver, including devices that torch cannot use."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def cuda_versions() -> dict[str, str]:
    """Returns the versions of CUDA, NCCL and the driver, which must agree on all ranks; {} without a device."""
    if not torch.cuda.is_available():
        return {}
    nccl = "not in this torch"
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"CUDA of torch": str(torch.version.cuda), "NCCL": nccl, "NVIDIA driver": _driver()}


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown (no nvidia-smi)"
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.split("\n")[0].strip()


@dataclass(frozen=True)
class Cpu:
    """CPU resources of this process.

    Attributes:
        cores: Number of cores in its affinity mask.
        quota: CPU quota of the container, in cores; None: unlimited.
        flags: Instruction set flags, in Linux's spelling.
    """

    cores: int
    quota: float | None
    flags: frozenset[str]


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> Cpu:
    """Reads the CPU resources from Linux; the quota from cgroup v1 or v2."""
    flags: list[str] = []
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ():
        if line.startswith(("flags", "Features")):
            flags = line.split(":", 1)[1].split()
            break
    quota = None
    new, old = cgroup / "cpu.max", cgroup / "cpu" / "cpu.cfs_quota_us"
    if new.is_file():
        given, period = new.read_text().split()
        quota = None if given == "max" else int(given) / int(period)
    elif old.is_file() and (given_us := int(old.read_text())) > 0:
        quota = given_us / int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    return Cpu(len(os.sched_getaffinity(0)), quota, frozenset(flags))


def check_cpu(cpu: Cpu, num_ranks: int, *, computes: bool, dtype: str | None) -> Iterator[Finding]:
    """Checks that the host has enough cores for its ranks, and the instructions that the run needs.

    Args:
        cpu: CPU resources.
        num_ranks: Ranks on this host.
        computes: True if the run computes on the CPU.
        dtype: `model.dtype`; None: no config.
    """
    usable = min(cpu.cores, cpu.quota) if cpu.quota is not None else cpu.cores
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
    shown = ", ".join(flag for flag in known if flag in cpu.flags) or "none of AVX2, AVX-512, SVE"
    clean = True
    if usable < num_ranks:
        clean = False
        yield warning(
            "CPU",
            f"{num_ranks} ranks share {usable:g} core(s)",
            "raise srun's --cpus-per-task or the container's --cpus, or use mpirun --bind-to none",
        )
    if computes and not cpu.flags & {"avx2", "asimd"}:
        clean = False
        yield warning("CPU", f"instructions: {shown}", "matrix products will be slow here")
    if computes and dtype == "bfloat16" and not cpu.flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        clean = False
        yield warning("CPU", "model.dtype=bfloat16 without bf16 instructions is emulated", "use model.dtype=float32")
    if clean:
        yield ok("CPU", f"{usable:g} core(s) for {num_ranks} rank(s); {shown}")
