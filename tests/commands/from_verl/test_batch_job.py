"""The job of SLURM is read from a script, its variables reach the script, and the command is sbatch's."""

import pytest

from mrl.commands.cli import _parse
from mrl.commands.from_verl.batch_job import batch_job, job_of_words
from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate
from mrl.commands.launch import LaunchOptions, launch_command

RUN = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm"


@pytest.fixture(autouse=True)
def outside_a_job(tmp_path, monkeypatch):
    for name in (
        "NNODES",
        "JOB_NUM_NODES",
        "GPUS_PER_NODE",
        "GPUS_ON_NODE",
        "CPUS_PER_TASK",
        "JOB_NAME",
        "JOB_NODELIST",
    ):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("#SBATCH --nodes=2\n#SBATCH -p a,b\n", {"nodes": "2", "partition": "a,b"}),
        ("#SBATCH -N4 --time 1:00:00 # a comment\n", {"nodes": "4", "time": "1:00:00"}),
        ('#SBATCH --account="my project"\n', {"account": "my project"}),
        ("#SBATCH --exclusive\n", {"exclusive": ""}),
        ("set -e\nsrun --nodes=1 python x.py\n", {}),
        ("if true; then sbatch other.sh; fi\n", {}),
        ("# srun python x.py\n##SBATCH --nodes=2\n", None),
        ("python srun.py --srun 1\n./srun_all.sh\n", None),
        ("", None),
    ],
)
def test_the_options_of_a_script_are_read(script, options):
    found = batch_job(script)
    assert (None if found is None else found.options) == options


@pytest.mark.parametrize(
    ("lines", "variables"),
    [
        (
            "--nodes=2-4 --gpus-per-node=h100:8",
            {"NNODES": "2", "JOB_NUM_NODES": "2", "GPUS_PER_NODE": "8", "GPUS_ON_NODE": "8"},
        ),
        ("--gres=shard:1,gpu:4", {"GPUS_PER_NODE": "4", "GPUS_ON_NODE": "4"}),
        ("--gres=fpga:2 -c 16 -J name", {"CPUS_PER_TASK": "16", "JOB_NAME": "name"}),
    ],
)
def test_the_variables_of_a_job_follow_from_its_options(lines, variables):
    job = batch_job(f"#SBATCH {lines}\n")
    first = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert job is not None and job.variables() == first | {f"SLURM_{name}": value for name, value in variables.items()}


def test_a_script_of_slurm_is_translated_to_its_hosts_and_to_sbatch(tmp_path, monkeypatch):
    script = (
        "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --gres=gpu:8\n#SBATCH --partition=a\nset -eu\n"
        'nodes=($(scontrol show hostnames "${SLURM_JOB_NODELIST:-}"))\n'
        "for ((i = 1; i < SLURM_JOB_NUM_NODES; i++)); do srun -w ${nodes[$i]} ray start & done\n"
        f"srun -w ${{nodes[0]}} {RUN} trainer.nnodes=$SLURM_NNODES trainer.n_gpus_per_node=$SLURM_GPUS_ON_NODE\n"
    )
    (tmp_path / "run.slurm").write_text(script)
    found = translate(read_settings(["run.slurm"]))
    command = found.command("run.yaml")
    assert command == "mrl launch --via sbatch --nodes 3 --gpus-per-node 8 --launcher-args=--partition=a run.yaml"
    assert found.world_size == 24 and found.lost == []
    parsed = _parse(command.split()[1:])
    start = LaunchOptions(parsed.via, parsed.nodes, parsed.gpus_per_node, arguments=parsed.launcher_args.split())
    assert launch_command(start, ["train", "run.yaml"]).argv[:4] == [
        "sbatch",
        "--nodes=3",
        "--gpus-per-node=8",
        "--partition=a",
    ]
    monkeypatch.setenv("SLURM_NNODES", "5")  # inside a job, its own variables are used
    assert translate(read_settings(["run.slurm"])).num_nodes == 5


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (f"srun --partition=a --gpus-per-node=8 {RUN} trainer.nnodes=2",
         "mrl launch --via sbatch --nodes 2 --gpus-per-node 8 --launcher-args=--partition=a C"),
        (f"{RUN} trainer.nnodes=1 trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1",
         "mrl train C"),
        (f"{RUN} trainer.n_gpus_per_node=4", "mrl launch --via torchrun --nodes 1 --gpus-per-node 4 C"),
        (f"srun {RUN} actor_rollout_ref.rollout.name=trtllm",
         "SRUN_ARGS=--mpi=pmix mrl launch --via sbatch --nodes 1 --gpus-per-node 8 --mode srun C"),
        (f"{RUN} actor_rollout_ref.rollout.name=trtllm", "mrl launch --via mpirun --nodes 1 --gpus-per-node 8 C"),
    ],
)  # fmt: skip
def test_the_launcher_is_that_of_the_run(words, command):
    assert translate(read_settings(words.split())).command("C") == command


def test_only_words_before_the_trainer_are_a_launcher():
    assert job_of_words(["nohup", "/usr/bin/srun", "-N", "2"]).options == {"nodes": "2"}
    assert job_of_words(["nohup", "python3"]) is None
