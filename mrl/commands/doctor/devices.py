"""Devices: CUDA devices with their memory and driver, and what the CPU can do.

Owns what is asked of torch and of the system about them. Which device a rank takes is `distributed/launcher_env.py`'s.
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
from mrl.distributed.launcher_env import Environment, device_index
from mrl.errors import first_line

GB = 1e9
MIN_CAPABILITY = (8, 0)
"""bf16 on tensor cores begins with Ampere (NVIDIA's CUDA C++ Programming Guide, compute capabilities)."""
MIN_FREE_FRAC = 0.95
"""A context alone takes under 1 GB of a device; more in use is another process's."""
PROBE = 256
"""A product of matrices of ones gives this number in every element, which bf16 holds exactly."""
COMMAND_TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """A CUDA device.

    Attributes:
        name: As torch calls it.
        capability: Compute capability.
        free_bytes: Not in use.
        total_bytes: All of it.
        error: Of a small product of matrices; "": it was right.
    """

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int
    error: str = ""


def read_gpu_count() -> int:
    """CUDA devices that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def read_gpus() -> list[Gpu]:
    """The CUDA devices that this process sees, each after a product of matrices."""
    found = []
    for index in range(read_gpu_count()):
        free, total = torch.cuda.mem_get_info(index)
        about = torch.cuda.get_device_properties(index)
        found.append(Gpu(about.name, (about.major, about.minor), free, total, _product(torch.device("cuda", index))))
    return found


def _product(device: torch.device) -> str:
    """What is wrong with a product of matrices on a device."""
    try:
        ones = torch.ones((PROBE, PROBE), dtype=torch.bfloat16, device=device)
        if bool(((ones @ ones) == PROBE).all()):
            return ""
    except RuntimeError as error:
        return first_line(error)
    return "a product of matrices of ones is wrong"


def check_gpus(gpus: Sequence[Gpu], environment: Environment) -> Iterator[Finding]:
    """The devices of a host, for the ranks on it.

    Args:
        gpus: At least one.
        environment: Of a rank of the host.
    """
    topic = "GPUs"
    clean = True
    for index, gpu in enumerate(gpus):
        where = f"device {index} ({gpu.name})"
        if gpu.error:
            clean = False
            yield problem(
                topic, f"{where} does not compute: {gpu.error}", "a torch for this GPU and driver; else its health"
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
                "end what else runs there (nvidia-smi)",
            )
    if len({(gpu.name, gpu.total_bytes) for gpu in gpus}) > 1:
        clean = False
        yield warning(topic, "the devices of this host differ", "a step takes as long as the slowest one")
    device_index(environment, len(gpus))
    if clean:
        first = gpus[0]
        yield ok(
            topic,
            f"{len(gpus)} x {first.name}, compute capability {'.'.join(map(str, first.capability))}, "
            f"{first.total_bytes / GB:.0f} GB, free and computing",
        )


def check_hidden_gpus(
    device_files: Sequence[str], cuda_of_torch: str | None, hidden_by: str | None
) -> Iterator[Finding]:
    """A host where torch sees no CUDA device.

    Args:
        device_files: NVIDIA's under /dev.
        cuda_of_torch: CUDA that torch was built for; None: a CPU build.
        hidden_by: CUDA_VISIBLE_DEVICES; None: not set.
    """
    if not device_files:
        yield ok("GPUs", "none here: the run is on the CPU")
    elif hidden_by is not None and hidden_by.strip() in ("", "-1"):
        yield ok("GPUs", f"{len(device_files)} hidden by CUDA_VISIBLE_DEVICES: the run is on the CPU")
    elif cuda_of_torch is None:
        advice = "install the torch build of this machine's CUDA (pytorch.org), or hide them: CUDA_VISIBLE_DEVICES=''"
        yield problem("GPUs", f"{len(device_files)} NVIDIA device(s), but torch is a CPU build", advice)
    else:
        yield problem(
            "GPUs",
            f"{len(device_files)} NVIDIA device(s), but torch for CUDA {cuda_of_torch} sees none",
            "is the driver loaded and new enough (nvidia-smi)? Does the container get the devices (--gpus all)?",
        )


def nvidia_files() -> list[str]:
    """The devices that the driver shows, whether or not torch can use them."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def cuda_versions() -> dict[str, str]:
    """Versions of CUDA, NCCL and the driver that have to be equal on all ranks; {} without a device."""
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
    """The CPU of a host, as this process may use it.

    Attributes:
        cores: That it may run on.
        quota: Cores' worth of time that a container may take; None: all.
        flags: Of the instruction set, as Linux names them.
    """

    cores: int
    quota: float | None
    flags: frozenset[str]


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> Cpu:
    """From what Linux says; the quota from either version of cgroups."""
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
    """Cores for the ranks of this host, and the instructions.

    Args:
        cpu: What there is.
        num_ranks: Ranks on this host.
        computes: The run is on the CPU.
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
            "--cpus-per-task of srun, --cpus of the container; mpirun --bind-to none",
        )
    if computes and not cpu.flags & {"avx2", "asimd"}:
        clean = False
        yield warning("CPU", f"instructions: {shown}", "matrix products will be slow here")
    if computes and dtype == "bfloat16" and not cpu.flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        clean = False
        yield warning("CPU", "model.dtype=bfloat16 without bf16 instructions is emulated", "use model.dtype=float32")
    if clean:
        yield ok("CPU", f"{usable:g} core(s) for {num_ranks} rank(s); {shown}")
