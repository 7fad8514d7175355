"""What the scripts of launch/ would run, without running it."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.e2e.runs import arguments
from tests.source import ROOT

SCRIPTS = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix in (".sh", ".sbatch"))
WORDS = ["train", "a config.yaml", "run.seed=1"]


def dry_run(script, **variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "N"))}
    done = subprocess.run(
        [ROOT / "launch" / script, "--dry-run", *WORDS], env=clean | variables, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, shlex.split(done.stdout), done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_ends_with_the_same_words_and_says_nothing_else(script):
    status, words, errors = dry_run(script.name)
    assert (status, errors) == (0, "")
    assert words[-5:] == ["-m", "mrl", *WORDS]


def test_torchrun_takes_its_variables():
    _, words, _ = dry_run("torchrun.sh", NNODES="4", NODE_RANK="3", NPROC_PER_NODE="8", MASTER_ADDR="n0", PYTHON="py")
    assert words[:5] == ["py", "-m", "mrl.distributed.watchdog.torchrun", "--nnodes", "4"]
    assert words[5:13] == ["--nproc-per-node", "8", "--node-rank", "3", "--master-addr", "n0", "--master-port", "29500"]


def test_mpirun_takes_its_variables():
    _, words, _ = dry_run("mpirun.sh", NPROC="16", MPIRUN="mpiexec", MPIRUN_ARGS="--host a:8,b:8")
    assert words[:8] == ["mpiexec", "-n", "16", "--bind-to", "none", "--host", "a:8,b:8", "python"]


@pytest.mark.parametrize("given", [None, "1"])
@pytest.mark.parametrize("script", ["mpirun.sh", "slurm.sbatch"])
def test_ranks_of_mpi_start_without_its_ucc_component_unless_told_otherwise(script, given):
    look = f"trap 'printenv OMPI_MCA_coll_ucc_enable' EXIT; . launch/{script} --dry-run train c.yaml"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
    variables = clean | ({} if given is None else {"OMPI_MCA_coll_ucc_enable": given})
    done = subprocess.run(
        ["bash", "-c", look], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == (given or "0")


JOB = {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "4", "SLURM_CPUS_ON_NODE": "64", "NPROC_PER_NODE": "8"}


def test_slurm_starts_one_torchrun_on_each_node():
    _, words, _ = dry_run("slurm.sbatch", **JOB, MASTER_ADDR="n0")
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--cpus-per-task=64"} <= set(words)
    assert " ".join(words).endswith(
        "--nnodes 4 --nproc-per-node 8 --master-addr n0 --master-port 20345 -m mrl train a config.yaml run.seed=1"
    )


def test_slurm_starts_every_rank_in_a_container():
    container = {"CONTAINER_IMAGE": "/i.sqsh", "CONTAINER_MOUNTS": "/d:/d", "SRUN_ARGS": "--mpi=pmix --exact"}
    _, words, _ = dry_run("slurm.sbatch", **JOB, **container, MODE="srun")
    assert {"--ntasks=32", "--ntasks-per-node=8", "--cpus-per-task=8", "--mpi=pmix", "--exact"} <= set(words)
    assert {"--container-image=/i.sqsh", "--container-mounts=/d:/d"} <= set(words)


@pytest.mark.parametrize(("mode", "tasks"), [("srun", 32), ("torchrun", 4)])
def test_slurm_starts_every_rank_with_apptainer(mode, tasks):
    container = {"CONTAINER_RUNTIME": "apptainer", "CONTAINER_IMAGE": "/i.sif", "CONTAINER_MOUNTS": "/d:/d,/e:/f"}
    _, words, _ = dry_run("slurm.sbatch", **JOB, **container, MODE=mode, MASTER_ADDR="n0", PYTHON="py")
    assert f"--ntasks={tasks}" in words and not [word for word in words if word.startswith("--container")]
    at = words.index("apptainer")
    assert words[at + 1 : at + 7] == ["exec", "--nv", "--bind", "/d:/d,/e:/f", "/i.sif", "bash"]
    assert words[at + 9] == "py" and words[-5:] == ["-m", "mrl", *WORDS]


def test_apptainer_starts_the_rank_with_its_arguments_and_ignores_the_signal(tmp_path):
    """The words after srun's options, run with an `apptainer` that executes the rest."""
    (tmp_path / "apptainer").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    (tmp_path / "py").write_text('#!/bin/sh\nkill -USR1 $$\nprintf "%s\\n" "$@"\n')
    for name in ("apptainer", "py"):
        (tmp_path / name).chmod(0o755)
    container = {"CONTAINER_RUNTIME": "apptainer", "CONTAINER_IMAGE": "/i.sif"}
    _, words, _ = dry_run("slurm.sbatch", **JOB, **container, MODE="srun", PYTHON=str(tmp_path / "py"))
    command = words[words.index("bash") :]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["-m", "mrl", *WORDS]


@pytest.mark.parametrize(
    "variables", [{"CONTAINER_RUNTIME": "docker", "CONTAINER_IMAGE": "i"}, {"CONTAINER_RUNTIME": "apptainer"}]
)
def test_slurm_refuses_another_runtime_and_one_without_an_image(variables):
    status, _, errors = dry_run("slurm.sbatch", **variables)
    assert status == 2 and "CONTAINER_" in errors and errors.count("\n") == 1


def test_slurm_refuses_another_mode():
    status, _, errors = dry_run("slurm.sbatch", MODE="ssh")
    assert status == 2 and errors == "MODE=ssh: give torchrun or srun\n"


@pytest.mark.shellcheck
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("via", ["torchrun", "mpirun", "sbatch"])
def test_mrl_launch_prints_its_own_line_and_the_scripts(via, tmp_path):
    _, config, *overrides = arguments(tmp_path)
    words = ["launch", config, *overrides, "--via", via, "--gpus-per-node", "2", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "mrl", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    first, second = done.stdout.splitlines()
    assert shlex.split(first)[-3:] == shlex.split(second)[-3:] == ["train", config, *overrides]
    assert shlex.split(second)[-5:-3] == ["-m", "mrl"]
