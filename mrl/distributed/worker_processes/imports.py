"""The import of a module in a process of its own, since a library for another torch or CUDA may end the process."""

from __future__ import annotations

import subprocess
import sys


def import_problem(module: str, limit_s: float) -> str:
    """Returns why a module cannot be imported: the last line that Python printed; "" where the import works.

    Args:
        module: Its name.
        limit_s: Time that the import may take, s.

    Raises:
        TimeoutError: It takes longer.
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
