"""C files compiled where they are first used, once for each processor and compiler of a machine, and loaded.

Owns how. The result is kept in the user's cache folder (`machine.kept`): of the processes of a machine that want it at
the same time one compiles, and the others wait for it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mrl.distributed.worker_processes.folders import owned_folder
from mrl.models.kernels import machine

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
PATIENCE_S = 120.0


def built(
    sources: Sequence[Path], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> tuple[ctypes.CDLL | None, str]:
    """A library of C files; where they use OpenMP, it is PyTorch's own.

    Args:
        sources: Compiled.
        headers: Read by them.
        flags: Beside `FLAGS`.

    Returns:
        (library, a name that is the same where sources, compiler, flags and processor are), or (None, why there is
        none here).
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
        key = machine.key(*texts, *FLAGS, *flags, version, str(openmp), machine.processor())
        name = f"kernels/{key}.so"
        made = machine.kept(name, lambda: _compile(compiler, sources, (*FLAGS, *flags), openmp))
        return _load(machine.place(name), made), key
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", "") or str(error)
        return None, f"{compiler} fails: {said.strip().splitlines()[-1]}"
    except OSError as error:
        return None, str(error)


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], openmp: Path) -> bytes:
    with owned_folder("build") as name:
        parts, whole = [Path(name, f"{source.stem}.o") for source in sources], Path(name, "kernels.so")
        for command in (
            *(
                [compiler, *flags, "-c", str(source), "-o", str(part)]
                for source, part in zip(sources, parts, strict=True)
            ),
            [compiler, "-shared", *map(str, parts), str(openmp), "-lm", "-o", str(whole)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return whole.read_bytes()


def _load(place: Path | None, data: bytes) -> ctypes.CDLL:
    """From where it is kept; otherwise from a file that is gone once it is loaded."""
    if place is not None and place.exists():
        return ctypes.CDLL(str(place))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _openmp() -> Path | None:
    """The OpenMP library that PyTorch has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*)$", maps.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else Path(found[1])
