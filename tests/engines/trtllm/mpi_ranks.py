"""Runs a function on the ranks of a real MPI job, once; as `tests/ranks.py`, whose ranks have no MPI.

    results = run_mpi(4, function, *args)     # [function(*args) on rank 0, ..., on rank 3]

`function` is a module-level function; the stand-in is on the path of the ranks.
"""

import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import warm
from tests.engines.trtllm.conftest import STANDIN
from tests.source import ROOT

TIMEOUT_S = 180


def mpirun(size, *words, **variables):
    """A finished `mpirun` of Python with these words."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{STANDIN}", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables,
    }  # fmt: skip
    more = ["--oversubscribe"] if "Open MPI" in version else []
    command = ["mpirun", "-n", str(size), "--bind-to", "none", *more, warm.python(), *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def run_mpi(size, function, *args, **variables):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((function, args)))
        done = mpirun(size, "-m", "tests.engines.trtllm.mpi_ranks", str(folder), **variables)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def main(folder):
    gc.disable()  # what is imported is no garbage, now and later
    from mrl.distributed import launch

    launch.init_distributed("cpu", num_threads=1)
    function, args = pickle.loads((folder / "task").read_bytes())
    gc.freeze()
    gc.enable()
    (folder / str(launch.get_launcher_env().rank)).write_bytes(pickle.dumps(function(*args)))
    launch.shutdown_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
