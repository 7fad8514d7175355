"""A disk that is really full: a tmpfs of some bytes, where a test may mount one.

with full_disk(folder, "64k") as fill:
    fill()             # not a byte more
"""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(folder, size):
    """Mounts a tmpfs of `size` on a folder; gives a function that fills it with a file, and returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root and the right to mount")

    def fill():
        file = folder / "everything-else"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for block in (65536, 4096, 1):
                while os.write(descriptor, bytes(block)):
                    pass
        except OSError:
            pass
        try:
            while os.write(descriptor, b"0"):
                pass
        except OSError:
            os.close(descriptor)
        return file

    try:
        yield fill
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
