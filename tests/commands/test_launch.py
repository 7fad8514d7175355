"""`mrl launch`: options become the scripts' variables, and what does not fit is refused."""

import shlex
import sys

import pytest

from mrl.commands.cli import main
from mrl.commands.launch import FOLDER, LaunchOptions, launch_command
from mrl.errors import UserError
from tests.e2e.runs import arguments

WORDS = ["train", "a config.yaml", "run.seed=1"]
ME = {"PYTHON": sys.executable}


def test_torchrun_on_one_host_and_on_several():
    alone = launch_command(LaunchOptions("torchrun", ranks_per_node=8), WORDS)
    assert alone.variables == ME | {"NPROC_PER_NODE": "8"}
    assert alone.argv == [str(FOLDER / "torchrun.sh"), *WORDS]
    several = launch_command(LaunchOptions("torchrun", nodes=4, ranks_per_node=8, node_rank=3, master_addr="n0"), WORDS)
    of_host = {"NPROC_PER_NODE": "8", "NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "n0"}
    assert several.variables == ME | of_host


def test_mpirun_starts_all_hosts_at_once():
    job = launch_command(LaunchOptions("mpirun", nodes=2, ranks_per_node=8, arguments=["--host", "a:8,b:8"]), WORDS)
    assert job.variables == ME | {"NPROC": "16", "MPIRUN_ARGS": "--host a:8,b:8"}
    assert job.argv == [str(FOLDER / "mpirun.sh"), *WORDS]


def test_sbatch_asks_for_nodes_and_gpus():
    script = str(FOLDER / "slurm.sbatch")
    start = LaunchOptions("sbatch", nodes=4, ranks_per_node=8, mode="srun", arguments=["--time=1:00:00"])
    job = launch_command(start, WORDS)
    assert job.variables == ME | {"MODE": "srun", "NPROC_PER_NODE": "8"}
    assert job.argv == ["sbatch", "--nodes=4", "--gpus-per-node=8", "--time=1:00:00", script, *WORDS]
    assert "--gpus-per-node=8" not in launch_command(LaunchOptions("sbatch", ranks_per_node=8, gpus=False), WORDS).argv
    assert launch_command(start, WORDS, dry_run=True).argv == [script, "--dry-run", *WORDS]


def test_a_container_has_a_python_of_its_own():
    job = launch_command(LaunchOptions("sbatch", container_image="/i.sqsh", container_mounts="/d:/d"), WORDS)
    assert "PYTHON" not in job.variables
    assert (job.variables["CONTAINER_IMAGE"], job.variables["CONTAINER_MOUNTS"]) == ("/i.sqsh", "/d:/d")


def test_apptainer_opens_the_image_instead_of_pyxis():
    start = LaunchOptions("sbatch", container_image="/i.sif", container_runtime="apptainer")
    assert launch_command(start, WORDS).variables["CONTAINER_RUNTIME"] == "apptainer"
    assert "CONTAINER_RUNTIME" not in launch_command(LaunchOptions("sbatch", container_image="/i"), WORDS).variables


def test_a_line_is_what_a_shell_reads():
    job = launch_command(LaunchOptions("mpirun", arguments=["--host", "a:8,b:8"]), WORDS)
    assert shlex.split(str(job)) == [f"{name}={value}" for name, value in job.variables.items()] + job.argv


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (LaunchOptions("torchrun", nodes=2), "needs --master-addr FIRST_HOST and --node-rank K"),
        (LaunchOptions("torchrun", nodes=2, node_rank=2, master_addr="n0"), "--node-rank is 2, expected 0 to 1"),
        (LaunchOptions("torchrun", arguments=["-x"]), "--launcher-args is only for --via mpirun or sbatch"),
        (LaunchOptions("torchrun", mode="srun"), "are only for --via sbatch"),
        (LaunchOptions("mpirun", container_image="/i.sqsh"), "are only for --via sbatch"),
        (LaunchOptions("sbatch", node_rank=1), "are only for --via torchrun"),
        (LaunchOptions("sbatch", container_runtime="apptainer"), "needs --container-image"),
        (LaunchOptions("mpirun", container_runtime="apptainer"), "are only for --via sbatch"),
    ],
    ids=[
        "no rank of the host",
        "no such host",
        "torchrun's arguments",
        "mode",
        "container",
        "rank of the host",
        "no image",
        "apptainer",
    ],
)
def test_options_that_do_not_fit_are_refused(start, said):
    with pytest.raises(UserError, match=said):
        launch_command(start, WORDS)


def test_a_layout_that_cannot_start_is_refused_before_it_is_submitted(tmp_path, capsys):
    _, config, *overrides = arguments(tmp_path)
    refused = ["launch", "--via", "sbatch", "--nodes", "3", config, *overrides, "parallel.tensor_model_parallel_size=2"]
    assert main(refused) == 2
    assert "3" in capsys.readouterr().err


def test_a_launcher_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    _, config, *overrides = arguments(tmp_path)
    assert main(["launch", "--via", "sbatch", config, *overrides]) == 2
    assert "cannot run sbatch: No such file or directory." in capsys.readouterr().err
