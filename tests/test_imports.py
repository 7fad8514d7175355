"""The process that has the imports: made once, and gone with whoever started it."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests import imports
from tests.source import ROOT

LIMIT_S = 60
ALONE = """
import os, sys
from tests import imports
imports.PRELOAD[:] = []
os.chdir(sys.argv[1])
imports.fork("tests.test_imports:note", (), sys.argv[1], "one", modules=["poplib"])
sys.stdin.read()
"""


def note(folder, name):
    parents = [process.pid for process in psutil.Process().parents()]
    told = f"{os.getpid()} {parents[:2]} {'poplib' in sys.modules}"
    new = Path(folder) / f"{name}.new"  # several processes write at a time
    new.write_text(told)
    new.rename(Path(folder) / name)
    time.sleep(LIMIT_S)


def told(folder, name):
    wait_until((folder / name).exists)
    pid, _, rest = (folder / name).read_text().partition(" ")
    psutil.Process(int(pid)).kill()
    return rest


def wait_until(holds):
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_needs_the_same_modules_is_forked_from_one_process(tmp_path):
    pids = [
        imports.fork("tests.test_imports:note", (), str(tmp_path), str(number), modules=modules)
        for number, modules in enumerate((["poplib"], ["poplib"], []))
    ]
    one, other, usual = (told(tmp_path, str(number)) for number in range(3))
    assert len(set(pids)) == 3
    assert one == other != usual and one.endswith("True") and usual.endswith("False")


@pytest.mark.slow
def test_it_ends_with_the_process_that_started_it_even_by_kill_9():
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` may be too long for the name of a socket
        words = [sys.executable, "-c", ALONE, folder]
        starter = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, env={**os.environ, "TMPDIR": folder})
        try:
            wait_until((Path(folder) / "one").exists)
            servers = psutil.Process(starter.pid).children(recursive=True)
        finally:
            starter.kill()
            starter.communicate()
        told(Path(folder), "one")
        assert len(servers) >= 2 and not psutil.wait_procs(servers, LIMIT_S)[1]
        assert not list(Path(folder).glob("mrl-imports-*"))
