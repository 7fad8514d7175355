"""Runs the attacks as the user who runs this, each against a process and files of that user.

    python -m tests.distributed.worker_processes.run_attacks alone|bubblewrap

Prints JSON: {"missing": why nothing was run, "effects": {attack: effect}, "num_run": number of attacks}.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from mrl.distributed.worker_processes.folders import folder_usage, remove
from mrl.distributed.worker_processes.sandbox import SandboxLimits, bubblewrap_works, run_python
from tests.distributed.worker_processes.attacks import CALM, PRELUDE
from tests.distributed.worker_processes.attacks_alone import ALONE, MEMORY_MB

NUM_AT_ONCE = 3
ENDED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
IN_ONE_PROGRAM = 60
FOR_ALL = SandboxLimits(time_s=30.0, memory_mb=MEMORY_MB)
FOR_ONE = SandboxLimits(time_s=6.0, memory_mb=MEMORY_MB, output_bytes=10_000, folder_mb=32, files=500)

EACH = """
for name, source, given in {attacks!r}:
    os.chdir(own)
    try:
        exec(source, globals() | given)
    except BaseException:
        pass
    else:
        print("effect", name, flush=True)
print("end")
"""
"""Runs one attack after the other, and prints the name of each that no exception ended."""


def together(targets: dict[str, Target]) -> str:
    """Returns a program that runs the attack of each name on its target."""
    attacks = [
        (name, CALM[name], {"victim": one.process.pid, "outside": str(one.outside)}) for name, one in targets.items()
    ]
    return PRELUDE + EACH.format(attacks=attacks)


class Target:
    """A process and files of this user that a program should not be able to change."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.outside = folder
        (folder / "folder" / "inner").mkdir(parents=True)
        (folder / "text").write_text("secret")
        (folder / "text").chmod(0o640)
        with contextlib.suppress(OSError):
            os.setxattr(folder / "text", "user.mrl", b"kept")
        self.before = self.state()

    def state(self) -> dict[str, object]:
        """Everything of it that an attack might change."""
        process = psutil.Process(self.process.pid)
        with process.oneshot():
            found = {
                "alive": self.process.poll() is None and process.status() not in ENDED,
                "limits": Path(f"/proc/{process.pid}/limits").read_text(),
                "priority": (process.nice(), process.ionice(), os.sched_getscheduler(process.pid)),
                "processors": process.cpu_affinity(),
                "memory score": Path(f"/proc/{process.pid}/oom_score_adj").read_text(),
            }
        for path in [self.outside, *sorted(self.outside.rglob("*"))]:
            stat = path.lstat()
            found[path.name] = (
                stat.st_mode,
                stat.st_uid,
                stat.st_gid,
                stat.st_size,
                stat.st_mtime_ns,
                stat.st_ctime_ns,
            )
        found["content"] = (self.outside / "text").read_text()
        return found

    def changed(self) -> list[str]:
        """What is not as it was; ends the process."""
        now = self.state()
        self.process.kill()
        self.process.wait()
        return [key for key in now.keys() | self.before.keys() if now.get(key) != self.before.get(key)]


def in_the_kernel() -> list[str]:
    """System V objects of this machine."""
    found: list[str] = []
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(OSError):
            found += [
                kind + " ".join(row.split()[:2]) for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
            ]
    return found


def run_calm(place: Path, names: list[str], inside: bool) -> dict[str, str]:
    """Effects of several attacks in one program."""
    own = place / "own"
    own.mkdir(parents=True)
    targets = {name: Target(place / f"outside{number}") for number, name in enumerate(names)}
    ran = run_python(together(targets), str(own), FOR_ALL, bubblewrap=inside)
    lines = ran.output.splitlines()
    found = {line.removeprefix("effect "): "no exception" for line in lines if line.startswith("effect ")}
    if lines[-1:] != ["end"] or ran.problem:
        found[f"all of {names[0]} to {names[-1]}"] = f"{ran.problem} {ran.status} {ran.output[-300:]}"
    return found | {name: f"changed: {changed}" for name, one in targets.items() if (changed := one.changed())}


def run_alone(place: Path, name: str, inside: bool) -> dict[str, str]:
    """Effects of one attack."""
    own = place / "own"
    own.mkdir(parents=True)
    ran = run_python(PRELUDE + ALONE[name] + "\nprint('effect', flush=True)", str(own), FOR_ONE, bubblewrap=inside)
    num_bytes, num_files = folder_usage(str(own), 10 * FOR_ONE.files)
    if "effect\n" in ran.output and not ran.problem:
        return {name: f"no exception, status {ran.status}"}
    if num_bytes > FOR_ONE.folder_mb << 20 or num_files > FOR_ONE.files or len(ran.output) > FOR_ONE.output_bytes:
        return {name: f"{num_bytes} bytes, {num_files} files, {len(ran.output)} bytes of output left"}
    return {}


def left_processes() -> list[str]:
    """Programs that still run, of this process and without a parent."""
    found = []
    for process in psutil.process_iter(["cmdline", "ppid", "uids"]):
        own = process.info["ppid"] in (1, os.getpid()) and process.info["uids"].real == os.getuid()
        if own and "mrl.distributed.worker_processes.sandbox" in " ".join(process.info["cmdline"] or ()):
            found.append(f"process {process.pid}")
    return found


def main(inside: bool) -> dict[str, object]:
    """Runs all of them."""
    if inside and not bubblewrap_works():
        return {"missing": "bubblewrap is not installed, or may not make namespaces here"}
    with tempfile.TemporaryDirectory() as folder:
        if missing := run_python("", folder, FOR_ALL, bubblewrap=inside).missing:
            return {"missing": f"this kernel has no such lock: {missing}"}
    base = Path(tempfile.mkdtemp(prefix="attacks-"))
    kernel_before, effects = in_the_kernel(), {}
    names = list(CALM)
    chunks = [names[start : start + IN_ONE_PROGRAM] for start in range(0, len(names), IN_ONE_PROGRAM)]
    try:
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            tasks = [pool.submit(run_calm, base / f"calm{n}", chunk, inside) for n, chunk in enumerate(chunks)]
            tasks += [pool.submit(run_alone, base / f"alone{n}", name, inside) for n, name in enumerate(ALONE)]
            for task in tasks:
                effects |= task.result()
        if new := sorted(set(in_the_kernel()) - set(kernel_before)):
            effects["objects in the kernel"] = str(new)
        if left := left_processes():
            effects["processes"] = str(left)
    finally:
        remove(str(base))
    return {"missing": "", "effects": effects, "num_run": len(CALM) + len(ALONE)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1] == "bubblewrap")))
