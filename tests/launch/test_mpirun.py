"""launch/mpirun.sh with a real MPI: the numbers of torchrun, one message for a mistake, and singletons refused."""

import os
import subprocess
import sys

import pytest

from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.source import ROOT

pytestmark = pytest.mark.mpi
TIMEOUT_S = 240


def mpirun(folder, *words, ranks=2, **variables):
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NPROC": str(ranks),
        "MPIRUN_ARGS": "--oversubscribe" if "Open MPI" in version else "", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables,
    }  # fmt: skip
    return subprocess.run(
        [str(ROOT / "launch" / "mpirun.sh"), *words], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_mpirun_trains_to_the_same_numbers(expected, tmp_path):
    done = mpirun(tmp_path, *runs.arguments(tmp_path, SHORT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected


def test_a_mistake_is_told_once(tmp_path):
    done = mpirun(tmp_path, *runs.arguments(tmp_path, ["train.num_step=3"]))
    assert done.returncode == 2
    assert done.stderr.count("mrl: error: config key 'train.num_step' is unknown") == 1


def test_ranks_that_mpi4py_does_not_know_of_are_refused(tmp_path):
    """As with the mpirun of another library: every process is alone in its own MPI world."""
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    alone |= {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "1"}
    code = "from mrl.distributed import mpi; from mrl.distributed.launch import environment; mpi.tell(1, environment())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert "UserError: the launcher started 2 ranks, but mpi4py sees 1: its MPI library (" in done.stderr
