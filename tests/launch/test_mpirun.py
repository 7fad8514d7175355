"""launch/mpirun.sh with a real MPI: the numbers of torchrun, one message for a mistake, and singletons refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.source import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TIMEOUT_S = 240


@pytest.fixture(params=["mpirun", "mpirun.mpich"])
def library(request, tmp_path_factory):
    """What starts the ranks by an mpirun and lets mpi4py load its library: the system's own, and MPICH beside it."""
    if request.param == "mpirun":
        return {}
    found = sorted(Path("/usr/lib").glob("*/libmpich.so.12"))
    if not (shutil.which(request.param) and found):
        pytest.skip("no mpirun.mpich with its libmpich.so.12 here")
    folder = tmp_path_factory.mktemp("mpich")
    (folder / "libmpi.so.12").symlink_to(found[0])  # the name of the MPI ABI, which Debian does not give it
    return {
        "MPIRUN": request.param, "LD_LIBRARY_PATH": str(folder), "MPI4PY_LIBMPI": str(folder / "libmpi.so.12"),
    }  # fmt: skip


def mpirun(folder, *words, ranks=2, **variables):
    program = variables.get("MPIRUN", "mpirun")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": warm.python(), "PYTHONPATH": str(ROOT), "NPROC": str(ranks),
        "MPIRUN_ARGS": "--oversubscribe" if "Open MPI" in version else "", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables,
    }  # fmt: skip
    return subprocess.run(
        [str(ROOT / "launch" / "mpirun.sh"), *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_mpirun_trains_to_the_same_numbers(expected, tmp_path, library):
    done = mpirun(tmp_path, *runs.arguments(tmp_path, SHORT), PYTHON=sys.executable, **library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected


def test_a_mistake_is_told_once(tmp_path, library):
    done = mpirun(tmp_path, *runs.arguments(tmp_path, ["train.num_step=3"]), **library)
    assert done.returncode == 2
    assert done.stderr.count("mrl: error: config key 'train.num_step' is unknown") == 1


def test_ranks_that_mpi4py_does_not_know_of_are_refused(tmp_path):
    """As with the mpirun of another library: every process is alone in its own MPI world."""
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    alone |= {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "1"}
    code = "from mrl.distributed import launch, mpi; mpi.broadcast(1, launch.get_launcher_env())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert "UserError: the launcher started 2 ranks, but mpi4py sees 1: its MPI library (" in done.stderr
