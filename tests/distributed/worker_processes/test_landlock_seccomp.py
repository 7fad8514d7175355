"""What a confined process cannot do, tried in one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.distributed.worker_processes import seccomp
from mrl.distributed.worker_processes.landlock_seccomp import Confinement
from tests.source import ROOT

TRIES = """
import asyncio, json, os, socket, subprocess, sys, threading
sys.path.insert(0, {root!r})
from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine
inside, outside = {inside!r}, {outside!r}
missing = confine(Confinement(**{asked}))
def thread():
    started = threading.Thread(target=int)
    started.start()
    started.join()
def write(path, size=1):
    with open(path, "wb") as file:
        file.write(b"x" * size)
tries = dict(
    socket=lambda: socket.socket(),
    unix=lambda: socket.socket(socket.AF_UNIX),
    loop=lambda: asyncio.run(asyncio.sleep(0)),
    inside=lambda: write(inside + "/x"),
    null=lambda: write("/dev/null"),
    large=lambda: write(inside + "/large", 2 << 20),
    outside=lambda: write(outside + "/y"),
    read=lambda: open(outside + "/there").close(),
    append=lambda: open(outside + "/there", "a").close(),
    truncate=lambda: os.truncate(outside + "/there", 0),
    remove=lambda: os.unlink(outside + "/there"),
    rename=lambda: os.rename(inside + "/x", outside + "/x"),
    folder=lambda: os.mkdir(outside + "/d"),
    link=lambda: os.symlink("/", outside + "/l"),
    program=lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    fork=lambda: os.fork() or os._exit(0),
    thread=thread,
    signal=lambda: os.kill(os.getppid(), 0),
    all=lambda: os.kill(-1, 0),
    own=lambda: os.kill(os.getpid(), 0),
    owner=lambda: os.chown(inside, 12345, 12345),
    memory=lambda: bytearray(700 << 20),
)
failed = []
for name, attempt in tries.items():
    try:
        attempt()
    except (OSError, MemoryError):
        failed.append(name)
print(json.dumps([missing, failed]))
"""

CHANGES = {"outside", "append", "truncate", "remove", "rename", "folder", "link"}


def tried(tmp_path, **asked):
    """What failed in a process that is confined so."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir(), outside.mkdir()
    (outside / "there").write_text("x")
    for name in ("writable", "readable"):
        if name in asked:
            asked[name] = tuple(str(inside) if place == "in" else place for place in asked[name])
    code = TRIES.format(root=str(ROOT), inside=str(inside), outside=str(outside), asked=asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    missing, failed = json.loads(done.stdout.splitlines()[-1])
    if missing:
        pytest.skip(f"this kernel has no such lock: {missing}")
    assert "remove" not in failed or (outside / "there").read_text() == "x"
    return set(failed)


def test_files_change_only_in_named_folders(tmp_path):
    failed = tried(tmp_path, network=True, writable=("in",), file_mb=1)
    assert failed - {"signal", "all"} == CHANGES | {"large"}  # signals: where Landlock knows them


def test_without_network_no_socket_is_made(tmp_path):
    assert tried(tmp_path, network=False) == {"socket", "unix"}


def test_a_program_starts_no_process_and_signals_no_other(tmp_path):
    failed = tried(tmp_path, calls="program")
    assert failed == {"program", "fork", "signal", "all", "socket", "unix", "owner", "truncate"}


def test_a_program_with_network_is_refused():
    with pytest.raises(ValueError, match="network=False"):
        Confinement(network=True, calls="program")


def test_a_worker_does_what_workers_do(tmp_path):
    assert tried(tmp_path, network=True, calls="worker") - {"owner"} == {"signal", "all"}


CALL = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", re.MULTILINE)
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
NAMES_IN_GENERIC = {"newfstatat": "fstatat"}


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_of_system_calls_are_those_of_linux(column):
    header = Path(HEADERS[column])
    if not header.exists():
        pytest.skip(f"Linux's headers are not installed: {header}")
    known = {name: int(number) for name, number in CALL.findall(header.read_text(encoding="utf-8"))}
    newest = max(known.values())
    for name, numbers in seccomp.NUMBERS.items():
        expected = known.get(NAMES_IN_GENERIC.get(name, name) if column else name)
        if numbers[column] is None or numbers[column] <= newest:
            assert numbers[column] == expected, name


def test_every_rule_names_a_known_call():
    for rules in (seccomp.program_allow_list(), seccomp.worker_deny_list(), seccomp.without_sockets()):
        assert rules.keys() <= seccomp.NUMBERS.keys()


def test_what_may_not_be_read_is_not(tmp_path):
    system = (sys.prefix, sys.base_prefix, sys.executable, "/usr", "/lib", "/lib64", "/bin", "/etc")
    failed = tried(tmp_path, network=True, writable=("in",), readable=system, memory_mb=500)
    assert failed - {"signal", "all"} == CHANGES | {"read", "memory"}


def test_nothing_asked_for_is_nothing_done(tmp_path):
    assert tried(tmp_path, network=True) - {"owner"} == set()
