"""Programs on a PATH of the test's own: real ones, none, or scripts that answer as another MPI does."""

import os
import shutil
import subprocess
import sys

import pytest

from mrl.commands.doctor.launchers import check_mpi, check_slurm

NOBODY = """
ClusterName=none
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
MessageTimeout=2
AuthType=auth/none
NodeName=a
PartitionName=main Nodes=ALL
"""
"""A configuration of SLURM whose controller does not run."""
NO_PYTHON = str(shutil.which("false"))
"""Has no mpi4py."""
BASE = {"HOME": "/", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


MIXING = """
import socket, subprocess, sys
words = sys.argv[sys.argv.index("-c") - 1 :]
told = []
for _ in range(2):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.run(words, stdout=theirs, check=True)
    theirs.close()
    told.append(list(iter(lambda: ours.recv(4096), b"")))
for writes in zip(*told):
    print(b"".join(writes).decode(), end="")
"""
"""Starts two ranks that do not know each other, and mixes what they print as mpirun does: write by write."""


def told(findings):
    return [(each.level, each.found) for each in findings]


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.mpi
def test_the_mpi_of_this_machine_starts_two_ranks():
    ((level, found),) = told(check_mpi({**BASE, "PATH": os.environ["PATH"]}, wanted=True))
    assert level == "ok" and "2 ranks of" in found


@pytest.mark.mpi
def test_the_mpirun_of_another_mpi(tmp_path):
    program(tmp_path, "mpirun", "echo 'HYDRA build details:'; echo '    Version: 4.0.2'")
    for wanted, level in ((True, "problem"), (False, "warning")):
        ((got, found),) = told(check_mpi({**BASE, "PATH": f"{tmp_path}"}, wanted=wanted))
        assert got == level and "is MPICH 4.0.2, mpi4py has " in found


@pytest.mark.mpi
def test_an_mpirun_whose_ranks_are_alone(tmp_path):
    """It answers as the right one, and starts each rank in a world of its own, as a clashing one would."""
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    tmp_path.joinpath("version").write_text(version)
    alone = 'case $1 in --version) cat "$0-version";; *) while [ "$1" != "$PYTHON" ]; do shift; done; "$@"; "$@";; esac'
    program(tmp_path, "mpirun", alone)
    tmp_path.joinpath("version").rename(tmp_path / "mpirun-version")
    path = f"{tmp_path}:{os.environ['PATH']}"
    ((level, found),) = told(check_mpi({**BASE, "PATH": path, "PYTHON": sys.executable}, wanted=True))
    assert level == "problem" and found.endswith("see 1, 1")


@pytest.mark.mpi
def test_ranks_whose_output_is_mixed(tmp_path):
    (tmp_path / "mixing.py").write_text(MIXING)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "version").write_text(version)
    mixing = f'exec "{sys.executable}" "{tmp_path}/mixing.py" "$@"'
    program(tmp_path, "mpirun", f'case $1 in --version) cat "{tmp_path}/version";; *) {mixing};; esac')
    clean = {**BASE, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
    ((level, found),) = told(check_mpi(clean, wanted=True))
    assert level == "problem" and found.endswith("see 1, 1")


@pytest.mark.mpi
def test_an_mpirun_that_starts_nothing(tmp_path):
    program(
        tmp_path, "mpirun", 'case $1 in --version) echo "mpirun (Open MPI) 4.1.4";; *) echo no slots >&2; exit 1;; esac'
    )
    ((level, found),) = told(check_mpi({**BASE, "PATH": str(tmp_path)}, wanted=False))
    assert level == "warning" and ("no slots" in found or "mpi4py has MPICH" in found)


@pytest.mark.mpi
def test_a_library_without_mpirun(tmp_path):
    ((level, found),) = told(check_mpi({**BASE, "PATH": str(tmp_path)}, wanted=False))
    assert level == "warning" and "mpirun is not on the PATH" in found


@pytest.mark.slow  # starts a program of that name
def test_mpirun_without_mpi4py(tmp_path):
    program(tmp_path, "mpirun", 'echo "mpirun (Open MPI) 4.1.4"')
    ((level, found),) = told(check_mpi({"PATH": str(tmp_path)}, wanted=False, python=NO_PYTHON))
    assert level == "warning" and "mpi4py finds no library" in found


def test_a_machine_without_mpi(tmp_path):
    ((level, found),) = told(check_mpi({"PATH": str(tmp_path)}, wanted=False, python=NO_PYTHON))
    assert level == "ok" and found.startswith("no mpirun and no mpi4py")


def test_a_machine_without_slurm(tmp_path):
    assert told(check_slurm({"PATH": str(tmp_path)}, {}, "none")) == [("ok", "not on this machine")]
    program(tmp_path, "srun", "exit 0")
    assert told(check_slurm({"PATH": str(tmp_path)}, {}, "none")) == [("warning", "sbatch, scontrol not on the PATH")]


@pytest.mark.slurm
def test_a_controller_that_does_not_answer(tmp_path):
    conf = tmp_path / "slurm.conf"
    conf.write_text(NOBODY)
    ((level, found),) = told(check_slurm({"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)}, {}, "none"))
    assert level == "warning" and "its controller does not answer: Slurmctld(primary) at " in found


@pytest.mark.slow  # starts a program of that name
def test_pyxis_and_a_job_that_is_looked_at_from_one_process(tmp_path):
    for name, text in (("sbatch", ""), ("scontrol", "echo 'Slurmctld(primary) at n1 is UP'"), ("srun", "echo nothing")):
        program(tmp_path, name, text)
    clean = {"PATH": f"{tmp_path}:{os.path.dirname(shutil.which('sh'))}"}
    ((level, found),) = told(check_slurm(clean, {}, "none"))
    assert level == "ok" and "no pyxis" in found
    program(tmp_path, "srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE'")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    first, second = told(check_slurm(clean, job, "none"))
    assert "pyxis is installed" in first[1]
    assert second == ("warning", "job 7 has 2 nodes, but only this process was started")
    assert len(told(check_slurm(clean, job, "srun"))) == 1
