"""Launchers: mpirun and its library, SLURM and its container plugin.

Owns calling their programs. Whether a launcher's variables fit each other is `distributed/launcher_env.py`'s.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.errors import to_install

TIMEOUT_S = 30
LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
HELLO = "import os; from mpi4py import MPI; os.write(1, f'size {MPI.COMM_WORLD.Get_size()}\\n'.encode())"
"""In one write, as mpirun mixes the ranks' writes."""
VENDORS = (("OpenMPI", r"Open ?MPI|OpenRTE"), ("Intel-MPI", r"Intel"), ("MPICH", r"MPICH|HYDRA"))
SLURM = ("sbatch", "srun", "scontrol")


def check_mpi(clean: Mapping[str, str], *, wanted: bool, python: str = sys.executable) -> Iterator[Finding]:
    """mpirun, the library of mpi4py, whether they are one MPI, and two ranks started by it.

    Args:
        clean: Variables of the environment without those of a launcher.
        wanted: The ranks were started over MPI.
        python: With mpi4py.
    """
    bad = problem if wanted else warning
    program = shutil.which("mpirun", path=clean.get("PATH"))
    library = _output([python, "-c", LIBRARY], clean)
    if program is None and library.returncode != 0:
        yield ok("MPI", "no mpirun and no mpi4py with a library: start by torchrun or srun")
        return
    if program is None:
        yield warning("MPI", f"mpi4py has {_vendor(library.stdout)}, but mpirun is not on the PATH", "load its module")
        return
    told = _output([program, "--version"], clean).stdout
    own = _vendor(told)
    if library.returncode != 0:
        yield warning(
            "MPI",
            f"{program} is {own}, but mpi4py finds no library ({_last(library.stderr)})",
            f"{to_install('mpi')}, and MPI4PY_LIBMPI=/path/libmpi.so where the library is elsewhere",
        )
        return
    theirs = _vendor(library.stdout)
    if own.split()[0] != theirs.split()[0]:
        yield bad(
            "MPI",
            f"{program} is {own}, mpi4py has {theirs}: ranks would not know each other",
            "use the mpirun of that library, or name the other one by MPI4PY_LIBMPI",
        )
        return
    more = ["--oversubscribe"] if own.startswith("OpenMPI") else []
    done = _output([program, "-n", "2", *more, python, "-c", HELLO], clean)
    sizes = re.findall(r"size (\d+)", done.stdout)
    if done.returncode == 0 and sizes == ["2", "2"]:
        yield ok("MPI", f"{own}, mpi4py over {theirs}: 2 ranks of {program} see each other")
    elif sizes:
        yield bad("MPI", f"2 ranks of {program} see {', '.join(sizes)}", "mpi4py's library is another: MPI4PY_LIBMPI")
    else:
        yield warning("MPI", f"{own}: 2 ranks do not start: {_first(done.stderr)}", "try `mpirun -n 2 hostname`")


def _vendor(text: str) -> str:
    """Such as "OpenMPI 4.1.4", from what mpirun or a library says of itself."""
    text = text.replace("\0", "")
    name = next((name for name, pattern in VENDORS if re.search(pattern, text)), "another-MPI")
    number = re.search(r"\d+\.\d+(\.\d+)?", text)
    return f"{name} {number[0]}" if number else name


def check_slurm(clean: Mapping[str, str], job: Mapping[str, str], launcher: str) -> Iterator[Finding]:
    """SLURM's programs, its controller, the job around this process, and the container plugin.

    Args:
        clean: Variables of the environment.
        job: SLURM_JOB_ID and SLURM_JOB_NUM_NODES where they are set.
        launcher: Who started this process.
    """
    missing = [name for name in SLURM if shutil.which(name, path=clean.get("PATH")) is None]
    if len(missing) == len(SLURM):
        if "SLURM_JOB_ID" in job:
            yield ok("SLURM", f"in job {job['SLURM_JOB_ID']}; its programs are not in here, and are not needed")
        else:
            yield ok("SLURM", "not on this machine")
        return
    if missing:
        yield warning("SLURM", f"{', '.join(missing)} not on the PATH", "load SLURM's module")
        return
    ping = _output(["scontrol", "ping"], clean)
    if ping.returncode != 0 or "UP" not in ping.stdout:
        told = _lines(ping.stderr or ping.stdout)
        why = next((line for line in told if "DOWN" in line or "fatal" in line), told[0])
        yield warning(
            "SLURM",
            f"its controller does not answer: {why}",
            "is this a login or compute node, and SLURM_CONF right? Needed for sbatch and srun only",
        )
        return
    yield ok("SLURM", _pyxis(clean))
    num_nodes = int(job.get("SLURM_JOB_NUM_NODES", "1"))
    if num_nodes > 1 and launcher == "none":
        yield warning(
            "SLURM",
            f"job {job.get('SLURM_JOB_ID')} has {num_nodes} nodes, but this is one process alone",
            "srun python -m mrl doctor, or sbatch launch/slurm.sbatch doctor, looks at all of them",
        )


def _pyxis(clean: Mapping[str, str]) -> str:
    there = "--container-image" in _output(["srun", "--help"], clean).stdout
    return "its controller answers; " + (
        "pyxis is there (--container-image)" if there else "no pyxis: CONTAINER_IMAGE is not usable"
    )


def _output(words: Sequence[str], clean: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, env=dict(clean), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"no answer in {TIMEOUT_S} s")


def _lines(text: str) -> list[str]:
    return [line.strip(" -") for line in text.splitlines() if line.strip(" -")] or ["it says nothing"]


def _last(text: str) -> str:
    return _lines(text)[-1]


def _first(text: str) -> str:
    return _lines(text)[0]
