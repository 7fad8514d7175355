"""Compiles C files on first use, once per processor and compiler, and loads the library.

The result is cached in the user's cache folder (`machine.cached`). If several processes of a machine need it, one
compiles and the others wait.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mrl.distributed.worker_processes.folders import temporary_folder
from mrl.models.kernels import build_cache

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILER_TIMEOUT_S = 120.0


def built(
    sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> tuple[ctypes.CDLL | None, str]:
    """Returns a library compiled from C files and linked against PyTorch's own OpenMP runtime.

    Args:
        sources: C files.
        headers: Header files, part of the cache key.
        flags: Compiler flags in addition to `FLAGS`.

    Returns:
        (library, cache key of sources, compiler, flags and processor), or (None, reason) if it cannot be compiled.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    openmp = _openmp()
    if compiler is None:
        return None, f"there is no C compiler ({', '.join(COMPILERS)})"
    if openmp is None:
        return None, "PyTorch's OpenMP library was not found"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        texts = [path.read_text(encoding="utf-8") for path in (*headers, *sources)]
        key = build_cache.key(*texts, *FLAGS, *flags, version, str(openmp), build_cache.processor())
        name = f"kernels/{key}.so"
        made = build_cache.cached(name, lambda: _compile(compiler, sources, (*FLAGS, *flags), openmp))
        return _load(build_cache.cache_file(name), made), key
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", "") or str(error)
        return None, f"{compiler} fails: {output.strip().splitlines()[-1]}"
    except OSError as error:
        return None, str(error)


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], openmp: Path) -> bytes:
    with temporary_folder("build") as name:
        objects, library = [Path(name, f"{source.stem}.o") for source in sources], Path(name, "kernels.so")
        for command in (
            *(
                [compiler, *flags, "-c", str(source), "-o", str(compiled)]
                for source, compiled in zip(sources, objects, strict=True)
            ),
            [compiler, "-shared", *map(str, objects), str(openmp), "-lm", "-o", str(library)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILER_TIMEOUT_S)
        return library.read_bytes()


def _load(place: Path | None, data: bytes) -> ctypes.CDLL:
    """Loads the library from the cache, or from a temporary file if there is no cache."""
    if place is not None and place.exists():
        return ctypes.CDLL(str(place))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _openmp() -> Path | None:
    """Returns the OpenMP library that PyTorch has loaded into this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*)$", maps.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else Path(found[1])
