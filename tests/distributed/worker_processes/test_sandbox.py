"""Code that a model may write ends at its limit, reaches nothing outside, and leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from mrl.distributed.worker_processes.sandbox import SandboxLimits, run_python
from tests.source import ROOT

LIMIT_S = 20.0  # for what ends by itself, on a busy machine
PATIENT = SandboxLimits(time_s=LIMIT_S, memory_mb=256)


@pytest.fixture(params=["alone", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)])
def inside(request):
    """Both ways."""
    return request.param == "bubblewrap"


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(psutil.pids())
    yield
    own = {os.getpid(), 1}  # not what a test beside this one is running; what outlives its parent goes to 1
    left = [process for process in psutil.process_iter(["cmdline", "ppid"]) if process.pid not in before]
    left = [process for process in left if process.info["ppid"] in own]
    left = [
        process
        for process in left
        if "mrl.distributed.worker_processes.sandbox" in " ".join(process.info["cmdline"] or ())
    ]
    _, alive = psutil.wait_procs(left, timeout=5)  # a killed one may need a moment
    assert not alive


def ran(code, tmp_path, inside, bounds=PATIENT, **given):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    found = run_python(code, str(folder), bounds, bubblewrap=inside, **given)
    if found.missing:
        pytest.skip(f"this kernel has no such lock: {found.missing}")
    return found


def test_it_prints_what_it_computes(tmp_path, inside):
    found = ran("import decimal, sys\nprint(6 * 7)\nprint('no', file=sys.stderr)", tmp_path, inside)
    assert (sorted(found.output.split()), found.status, found.problem) == (["42", "no"], 0, "")


def test_its_folder_stays_for_the_next_program(tmp_path, inside):
    ran("open('x', 'w').write('kept')", tmp_path, inside)
    assert ran("print(open('x').read())", tmp_path, inside).output == "kept\n"


FAULTS = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "writes outside": ("open({outside!r}, 'w')", "Error"),
    "reads outside": ("print(open({secret!r}).read())", "Error"),
    "socket": ("import socket; socket.socket()", "PermissionError"),
    "forks": ("import os; os.fork()", "PermissionError"),
    "program": ("import subprocess; subprocess.run(['/bin/true'])", "PermissionError"),
    "memory": ("x = bytearray(1 << 30)", "MemoryError"),
    "large file": ("open('x', 'wb').write(bytes(64 << 20))", "File too large"),
    "signals": ("import os; os.kill(os.getppid() or 1, 9)", "PermissionError"),
    "environment": ("import os; print(sorted(os.environ)); os.environ['PYTHONPATH']", "KeyError"),
    "exec": ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo > {outside}'])", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_it_may_not_fails_in_it(tmp_path, inside, fault):
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("hidden")
    code, why = FAULTS[fault]
    found = ran(code.format(secret=str(secret), outside=str(outside)), tmp_path, inside)
    assert found.status != 0 and found.problem == ""
    assert why in found.output and "hidden" not in found.output
    assert not outside.exists()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("while True: pass", "longer than"),
        ("import time; time.sleep(600)", "longer than"),
        ("import os, time\nos.close(1); os.close(2); time.sleep(600)", "longer than"),
        ("while True: print('x' * 1000)", "printed more than"),
    ],
)
def test_it_ends_at_its_limit(tmp_path, inside, code, problem):
    found = ran(code, tmp_path, inside, SandboxLimits(time_s=1.5, output_bytes=5000))
    assert problem in found.problem and len(found.output) <= 5000 and found.status == -9


def test_a_short_limit_does_not_count_the_start_of_python(tmp_path, inside):
    found = ran("while True: pass", tmp_path, inside, SandboxLimits(time_s=0.01))
    assert found.problem == "it took longer than 0.01 s" and found.missing == ()


def test_a_program_that_cannot_start_is_no_result(tmp_path, inside):
    with pytest.raises(RuntimeError, match="did not start"):
        run_python("", str(tmp_path / "nowhere"), PATIENT, bubblewrap=inside)


@pytest.mark.bubblewrap
def test_bubblewrap_is_run_where_it_was_found(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "bin" / "bwrap").symlink_to(shutil.which("bwrap"))
    code = (
        "from mrl.distributed.worker_processes.sandbox import SandboxLimits, bubblewrap_works, run_python\n"
        f"found = run_python('print(42)', {str(tmp_path / 'folder')!r}, SandboxLimits(), bubblewrap=True)\n"
        "print(bubblewrap_works(), found)"
    )
    variables = {**os.environ, "PATH": str(tmp_path / "bin")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True") and "output='42\\n'" in done.stdout


def test_bubblewrap_that_is_not_installed_is_refused_by_name(tmp_path):
    code = "from mrl.distributed.worker_processes.sandbox import *; "
    code += f"run_python('', {str(tmp_path)!r}, SandboxLimits(), bubblewrap=True)"
    variables = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert "RuntimeError: bubblewrap is not installed" in done.stderr


def test_a_program_ends_with_a_killed_parent(tmp_path, inside):
    code = (
        "from mrl.distributed.worker_processes.sandbox import SandboxLimits, run_python\n"
        'program = \'import time\\nopen("there", "w").close()\\ntime.sleep(600)\'\n'
        f"run_python(program, {str(tmp_path)!r}, SandboxLimits(time_s=600.0), bubblewrap={inside})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    until(lambda: (tmp_path / "there").exists())
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert children
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def until(condition):
    """Returns when the condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_folder_that_is_too_full_is_emptied(tmp_path, inside):
    code = "for n in range(300): open(str(n), 'w').close()"
    found = ran(code, tmp_path, inside, SandboxLimits(time_s=LIMIT_S, files=200))
    assert "more than 200 files" in found.problem and os.listdir(tmp_path / "folder") == []


REMOVED = """import mmap, os, time
held = []
for number in range(12):
    file = open("removed", "w+b")
    file.write(bytes(8 << 20)); file.flush(); os.unlink("removed")
    held.append({held})
time.sleep(60)
"""


@pytest.mark.parametrize("held", ["file", "mmap.mmap(file.fileno(), 4096)"])
def test_removed_files_count_as_long_as_they_are_held(tmp_path, inside, held):
    code = REMOVED.format(held=held) if held == "file" else REMOVED.format(held=f"{held}); file.close(")
    found = ran(code, tmp_path, inside, SandboxLimits(time_s=LIMIT_S, folder_mb=32))
    assert found.problem == "it wrote more than 32 MiB of files"


def test_the_input_is_not_among_the_files_that_a_program_writes(tmp_path, inside):
    found = ran(
        "import time; time.sleep(0.3)",
        tmp_path,
        inside,
        SandboxLimits(time_s=LIMIT_S, folder_mb=2),
        stdin="x" * (4 << 20),
    )
    assert (found.status, found.problem) == (0, "")


def test_a_program_that_cannot_start_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="did not start"):
        run_python("", str(tmp_path / "none"), PATIENT, bubblewrap=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_are_counted(tmp_path, inside):
    code = (
        "import threading, time\nfor _ in range(40):\n"
        "  threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\ntime.sleep(600)"
    )
    assert "more than 20 threads" in ran(code, tmp_path, inside, SandboxLimits(time_s=LIMIT_S, threads=20)).problem


def test_numpy_works_with_little_memory(tmp_path, inside):
    code = "import numpy as np\nprint(round(float(np.linalg.det(np.eye(300))), 3))"
    assert ran(code, tmp_path, inside, SandboxLimits(time_s=60.0, memory_mb=128)).output == "1.0\n"


def test_a_fork_bomb_does_not_go_off(tmp_path, inside):
    code = "import os\nfor _ in range(9):\n  try:\n    os.fork()\n  except PermissionError:\n    print('no')"
    assert ran(code, tmp_path, inside).output == "no\n" * 9


WAYS_TO_READ = {
    "sys.stdin": "sys.stdin.read()",
    "open": "open(0, encoding='utf-8', closefd=False).read()",
    "open in binary": "open(0, 'rb', closefd=False).read().decode()",
    "os.read": "os.read(0, 100).decode()",
    "os.fstat": "io.BytesIO(os.read(0, os.fstat(0).st_size)).read().decode()",
    "/dev/stdin": "open('/dev/stdin', encoding='utf-8').read()",
    "/proc/self/fd/0": "open('/proc/self/fd/0', encoding='utf-8').read()",
    "mmap": "mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:].decode()",
    "os.dup": "os.fdopen(os.dup(0)).read()",
    "sys.stdin.buffer": "(sys.stdin.seek(0), sys.stdin.buffer.read())[1].decode()",
    "fileinput": "(sys.stdin.seek(0), ''.join(fileinput.input()))[1]",
    "input()": "(sys.stdin.seek(0), input() + '\\n' + input() + '\\n')[1]",
}


def test_descriptor_0_is_the_input_however_it_is_read(tmp_path, inside):
    code = "import fileinput, io, json, mmap, os, sys\nfound = {}\n"
    code += "".join(f"os.lseek(0, 0, 0); found[{way!r}] = {text}\n" for way, text in WAYS_TO_READ.items())
    found = ran(code + "print(json.dumps(found))", tmp_path, inside, stdin="3 é\n4\n")
    assert json.loads(found.output) == dict.fromkeys(WAYS_TO_READ, "3 é\n4\n")
    assert list((tmp_path / "folder").iterdir()) == []


def test_an_empty_input_is_at_its_end(tmp_path, inside):
    code = "import os, sys\nprint(repr(sys.stdin.read()), os.read(0, 9), os.fstat(0).st_size, sys.argv)\ninput()"
    found = ran(code, tmp_path, inside)
    assert found.output.startswith("'' b'' 0 ['-c']\n") and "EOFError" in found.output


def test_what_runs_after_the_program_has_its_names_and_is_not_in_its_memory_before(tmp_path, inside):
    program = (
        "import gc, sys\ntwice, frame, seen = (lambda x: 2 * x), sys._getframe(), []\nwhile frame:\n"
        "    seen.append(repr((frame.f_locals, frame.f_globals, frame.f_code.co_consts))); frame = frame.f_back\n"
        "print('mark-1' + str(7) in str(seen) + repr(gc.get_objects()))"
    )
    assert ran(program, tmp_path, inside, then="print(twice(4), 'mark-17')").output == "False\n8 mark-17\n"
    assert ran("raise SystemExit", tmp_path, inside, then="print(1)").output == ""
