"""Checks the installed packages against the ranges in setup.py, and identifies the code of mrl by a hash.

The ranges are read from setup.py next to the package, else from the installed metadata. `ranks.py` compares the
versions of different ranks.
"""

from __future__ import annotations

import ast
import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mrl import __version__
from mrl.commands.doctor.devices import read_gpu_count
from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.config import registry
from mrl.distributed.worker_processes.imports import import_problem
from mrl.engines._capabilities import EngineCapabilities, engine_capabilities, engine_packages
from mrl.errors import UserError, to_install

PACKAGE = Path(__file__).resolve().parents[2]
OPTIONAL = {
    "gpu": ("transformer-engine", "transformer_engine.pytorch"),
    **{extra: (package.distribution, package.module) for extra, package in engine_packages().items()},
    "mpi": ("mpi4py", "mpi4py"),
}
"""Extra -> (distribution, module to import)."""
ENGINES = tuple(engine_packages())
"""Extras of rollout engines; without them a run with that engine does not start."""
NO_ENGINE = EngineCapabilities()
SHOWN = ("torch", "megatron-core", "transformers", "numpy")


@dataclass(frozen=True)
class Ranges:
    """Version ranges of setup.py: Python, required packages, and those of each extra."""

    python: SpecifierSet
    required: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]


def engine_extra(engine: str) -> str | None:
    """Returns the extra that a rollout engine needs on this machine, or None."""
    package = engine_capabilities(engine).package(has_gpu=bool(read_gpu_count()))
    return None if package is None else package.extra


def _engine_of(distribution: str) -> EngineCapabilities:
    """Returns the engine whose package this is; one without packages if there is none."""
    engines = map(engine_capabilities, registry.names("engines"))
    return next((one for one in engines if any(each.distribution == distribution for each in one.packages)), NO_ENGINE)


def ranges(folder: Path = PACKAGE.parent) -> Ranges:
    """Returns the version ranges of this mrl.

    Args:
        folder: Folder of setup.py in a checkout; without that file, the installed metadata is read.

    Raises:
        UserError: There is neither.
    """
    file = folder / "setup.py"
    if file.is_file() and 'name="mrl"' in file.read_text(encoding="utf-8"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        given = {node.arg: node.value for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        python, required, extras = (
            ast.literal_eval(given[name]) for name in ("python_requires", "install_requires", "extras_require")
        )
        return Ranges(
            SpecifierSet(python), _requirements(required), {name: _requirements(all_) for name, all_ in extras.items()}
        )
    try:
        found = metadata.metadata("mrl")
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"mrl is not installed, and {folder} has no setup.py: run `pip install -e .` in a clone."
        ) from error
    every = _requirements(found.get_all("Requires-Dist") or [])
    names: list[str] = found.get_all("Provides-Extra") or []
    return Ranges(
        SpecifierSet(found["Requires-Python"]),
        tuple(each for each in every if each.marker is None),
        {
            name: tuple(each for each in every if each.marker is not None and each.marker.evaluate({"extra": name}))
            for name in names
        },
    )


def _requirements(texts: list[str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(text) for text in texts)


def check_versions(wanted: Ranges, needed: set[str], running: str = "") -> Iterator[Finding]:
    """Checks Python, the required packages (one line), and each optional package.

    Args:
        wanted: Version ranges.
        needed: Extras that this machine or config needs.
        running: Version of Python; "": that of this process.
    """
    running = running or platform.python_version()
    if running not in wanted.python:
        yield problem("python", f"{running}; setup.py requires {wanted.python}", "create a new virtual environment")
    unmet = [line for line in map(_unmet, wanted.required) if line is not None]
    for requirement, found in unmet:
        yield problem(
            requirement.name, f"{found}; setup.py requires {requirement.specifier}", f"pip install '{requirement}'"
        )
    if not unmet:
        shown = ", ".join(f"{name} {installed(name)}" for name in SHOWN)
        yield ok("packages", f"python {running}, {shown}: all {len(wanted.required)} are within setup.py's ranges")
    for extra, (name, _) in OPTIONAL.items():
        yield from _optional(extra, name, wanted, needed)


def _optional(extra: str, name: str, wanted: Ranges, needed: set[str]) -> Iterator[Finding]:
    (requirement,) = (each for each in wanted.extras[extra] if each.name == name)
    version = installed(name)
    advice = f"pip install '{requirement}', or {to_install(extra)}"
    if version is None:
        if extra in needed:
            yield (problem if extra in ENGINES else warning)(name, "not installed, but needed", advice)
        else:
            yield ok(name, "not installed, and not needed")
        return
    if version not in requirement.specifier:
        yield warning(name, f"{version}; mrl supports {requirement.specifier}", advice)
    else:
        yield ok(name, version)
    optional = engine_packages()[extra].optional_requirements if extra in ENGINES else ()
    for text in metadata.requires(name) or []:
        own = Requirement(text)
        if own.name in optional or not (own.marker is None or own.marker.evaluate({"extra": ""})):
            continue
        if (missing := _unmet(own)) is not None:
            required = f"{own.name}{own.specifier}"
            yield warning(name, f"needs {required}, found: {missing[1]}", f"pip install '{requirement}' again")


def _unmet(requirement: Requirement) -> tuple[Requirement, str] | None:
    """Returns the requirement and the installed version, or None if it is met."""
    version = installed(requirement.name)
    if version is None:
        return requirement, "not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return requirement, version


def installed(name: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_import(name: str, module: str, timeout_s: float, *, needed: bool = True) -> Iterator[Finding]:
    """Imports an installed package in a subprocess, since a wrong CUDA or MPI library may crash the process.

    Args:
        name: Distribution name of the package.
        module: Module to import.
        timeout_s: Longest import, s.
        needed: True if a failure is a problem; otherwise it is a warning.
    """
    try:
        reason = import_problem(module, timeout_s)
    except TimeoutError as error:
        yield warning(name, str(error), "check that its folder is not on a slow disk")
        return
    if not reason:
        yield ok(name, f"`import {module}` works")
        return
    level = problem if needed else warning
    suited = "this torch and this CUDA" if read_gpu_count() else "this torch"
    advice = _engine_of(name).broken_requirements()
    yield level(name, f"cannot be imported: {reason}", advice or f"reinstall it for {suited}")


def version_facts() -> dict[str, str]:
    """Returns the versions that must agree on all ranks, by name."""
    found: dict[str, Any] = {"python": platform.python_version(), "mrl": __version__, "mrl's code": code_hash()}
    try:
        names = [each.name for each in ranges().required]
    except UserError:  # `check_versions` reports it
        names = list(SHOWN)
    names += [name for name, _ in OPTIONAL.values()] + ["tensorrt"]
    return {**found, **{name: installed(name) or "not installed" for name in names}}


def code_hash(package: Path = PACKAGE) -> str:
    """Returns twelve hex digits of a hash over all modules of mrl on the disk, committed or not."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]
