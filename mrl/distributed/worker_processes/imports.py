"""Import of a module in a subprocess, because a library built for another torch or CUDA may crash the interpreter."""

from __future__ import annotations

import subprocess
import sys


def import_problem(module: str, limit_s: float) -> str:
    """Returns why a module cannot be imported, the last line that Python printed; "" if the import works.

    Args:
        module: Dotted name.
        limit_s: Time limit of the import, s.

    Raises:
        TimeoutError: The import exceeds `limit_s`.
    """
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"`import {module}` takes more than {limit_s:g} s") from error
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"
