"""Checks of mpirun and its library, and of SLURM and its container plugin, by calling their programs.

`distributed/launcher_env.py` checks that a launcher's variables are consistent.
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
"""Program that prints its world size in one write, since mpirun interleaves the writes of ranks."""
VENDORS = (("OpenMPI", r"Open ?MPI|OpenRTE"), ("Intel-MPI", r"Intel"), ("MPICH", r"MPICH|HYDRA"))
SLURM = ("sbatch", "srun", "scontrol")


def check_mpi(clean: Mapping[str, str], *, wanted: bool, python: str = sys.executable) -> Iterator[Finding]:
    """Checks that mpirun and mpi4py's library are the same MPI, and starts two ranks.

    Args:
        clean: Environment variables without those of a launcher.
        wanted: True if the ranks were started with MPI.
        python: Python interpreter with mpi4py.
    """
    bad = problem if wanted else warning
    program = shutil.which("mpirun", path=clean.get("PATH"))
    library = _output([python, "-c", LIBRARY], clean)
    if program is None and library.returncode != 0:
        yield ok("MPI", "no mpirun and no mpi4py with a library: start ranks with torchrun or srun")
        return
    if program is None:
        yield warning("MPI", f"mpi4py has {_vendor(library.stdout)}, but mpirun is not on the PATH", "load its module")
        return
    own = _vendor(_output([program, "--version"], clean).stdout)
    if library.returncode != 0:
        yield warning(
            "MPI",
            f"{program} is {own}, but mpi4py finds no library ({_last(library.stderr)})",
            f"{to_install('mpi')}, and set MPI4PY_LIBMPI=/path/libmpi.so if the library is not on the default path",
        )
        return
    linked = _vendor(library.stdout)
    if own.split()[0] != linked.split()[0]:
        yield bad(
            "MPI",
            f"{program} is {own}, mpi4py has {linked}: each rank would see a world of one rank",
            "use that library's mpirun, or set MPI4PY_LIBMPI to the library of this mpirun",
        )
        return
    more = ["--oversubscribe"] if own.startswith("OpenMPI") else []
    done = _output([program, "-n", "2", *more, python, "-c", HELLO], clean)
    sizes = re.findall(r"size (\d+)", done.stdout)
    if done.returncode == 0 and sizes == ["2", "2"]:
        yield ok("MPI", f"{own}, mpi4py over {linked}: 2 ranks of {program} see each other")
    elif sizes:
        advice = "mpi4py uses another library: set MPI4PY_LIBMPI"
        yield bad("MPI", f"2 ranks of {program} see {', '.join(sizes)}", advice)
    else:
        yield warning("MPI", f"{own}: 2 ranks do not start: {_first(done.stderr)}", "try `mpirun -n 2 hostname`")


def _vendor(text: str) -> str:
    """Returns name and version of an MPI, such as "OpenMPI 4.1.4", from the output of mpirun or the library."""
    text = text.replace("\0", "")
    name = next((name for name, pattern in VENDORS if re.search(pattern, text)), "another-MPI")
    number = re.search(r"\d+\.\d+(\.\d+)?", text)
    return f"{name} {number[0]}" if number else name


def check_slurm(clean: Mapping[str, str], job: Mapping[str, str], launcher: str) -> Iterator[Finding]:
    """Checks SLURM's programs, its controller, the job of this process, and the container plugin.

    Args:
        clean: Environment variables without those of a launcher.
        job: SLURM_JOB_ID and SLURM_JOB_NUM_NODES, if set.
        launcher: Launcher of this process.
    """
    missing = [name for name in SLURM if shutil.which(name, path=clean.get("PATH")) is None]
    if len(missing) == len(SLURM):
        if "SLURM_JOB_ID" in job:
            yield ok("SLURM", f"in job {job['SLURM_JOB_ID']}; its programs are not in this container and not needed")
        else:
            yield ok("SLURM", "not on this machine")
        return
    if missing:
        yield warning("SLURM", f"{', '.join(missing)} not on the PATH", "load SLURM's module")
        return
    ping = _output(["scontrol", "ping"], clean)
    if ping.returncode != 0 or "UP" not in ping.stdout:
        lines = _lines(ping.stderr or ping.stdout)
        why = next((line for line in lines if "DOWN" in line or "fatal" in line), lines[0])
        yield warning(
            "SLURM",
            f"its controller does not answer: {why}",
            "check SLURM_CONF, and that this is a login or compute node; only sbatch and srun need it",
        )
        return
    yield ok("SLURM", _pyxis(clean))
    num_nodes = int(job.get("SLURM_JOB_NUM_NODES", "1"))
    if num_nodes > 1 and launcher == "none":
        yield warning(
            "SLURM",
            f"job {job.get('SLURM_JOB_ID')} has {num_nodes} nodes, but only this process was started",
            "to check all nodes: srun python -m mrl doctor, or sbatch launch/slurm.sbatch doctor",
        )


def _pyxis(clean: Mapping[str, str]) -> str:
    has_pyxis = "--container-image" in _output(["srun", "--help"], clean).stdout
    return "its controller answers; " + (
        "pyxis is installed (--container-image)" if has_pyxis else "no pyxis: CONTAINER_IMAGE cannot be used"
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
    return [line.strip(" -") for line in text.splitlines() if line.strip(" -")] or ["no output"]


def _last(text: str) -> str:
    return _lines(text)[-1]


def _first(text: str) -> str:
    return _lines(text)[0]
