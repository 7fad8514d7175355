"""Ranks of their own for rollouts by each launcher, on two hosts; trouble on one of either kind ends the job."""

import json
import os
import subprocess

import pytest

from tests import warm
from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.launch.hosts import Hosts, NoRightsError
from tests.launch.test_mpirun import mpirun
from tests.launch.test_slurm import JOB_TIMEOUT_S, submit, told
from tests.launch.test_survival import COLLECTIVE_S, HEARTBEAT_S, TIMEOUT_S, Job, one_message
from tests.source import ROOT

pytestmark = pytest.mark.slow

FILE = ROOT / "configs" / "grpo_qwen3-8b_2x8_tp2_vllm_roles.yaml"
OWN = (*SHORT, "rollout.nnodes=1", "rollout.n_gpus_per_node=1")
"""The last rank samples."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank that does both has in its metrics.jsonl, but for how far refits went."""
    return apart(runs.train_in_pool(tmp_path_factory.mktemp("alone"), SHORT, 1))


def apart(lines):
    return [{key: value for key, value in line.items() if not key.startswith("refit/")} for line in lines]


# launchers ------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_mpirun_starts_ranks_of_both_kinds(alone, tmp_path):
    done = mpirun(tmp_path, *runs.arguments(tmp_path, OWN))
    assert done.returncode == 0, done.stdout + done.stderr
    assert apart(runs.metrics(tmp_path)) == alone


@pytest.mark.netns
def test_torchrun_starts_a_host_that_trains_and_one_that_samples(alone, tmp_path):
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    environment = {
        **os.environ, "PYTHON": warm.python(), "PYTHON_EXEC": warm.python(), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "NNODES": "2", "MASTER_ADDR": hosts.address(0),
    }  # fmt: skip
    try:
        words = [str(ROOT / "launch" / "torchrun.sh"), *runs.arguments(tmp_path, OWN)]
        statuses, said = hosts.run(words, environment, tmp_path, TIMEOUT_S)
    finally:
        hosts.down()
    assert statuses == [0, 0], said
    assert apart(runs.metrics(tmp_path)) == alone


@pytest.mark.slurm
def test_slurm_starts_a_node_that_trains_and_one_that_samples(alone, cluster, tmp_path):
    _, *words = runs.arguments(tmp_path, OWN)
    job = submit(cluster, tmp_path, *words, MODE="srun", MASTER_PORT=str(runs.free_port()))
    state = cluster.wait(job, JOB_TIMEOUT_S)
    assert state["JobState"] == "COMPLETED", told(tmp_path)
    assert apart(runs.metrics(tmp_path)) == alone


def test_launch_refuses_ranks_that_cannot_be_split_so_and_starts_those_that_can(tmp_path):
    def launch(num_nodes):
        words = ["launch", "--via", "sbatch", "--nodes", num_nodes, "--gpus-per-node", "8", str(FILE), "--dry-run"]
        command = [warm.python(), "-m", "mrl", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    done, refused = launch("2"), launch("1")
    assert done.returncode == 0 and "--nodes=2" in done.stdout + done.stderr, done
    assert refused.returncode == 2
    assert "rollout.nnodes=1 x rollout.n_gpus_per_node=8 leaves none of this job's 8 rank(s) to train" in refused.stderr


# trouble --------------------------------------------------------------------------------------------------------------

WATCHED = (
    *SHORT, "checkpoint.interval=1", f"run.collective_timeout_s={COLLECTIVE_S}",
    f"run.heartbeat_timeout_s={HEARTBEAT_S}", "rollout.num_ranks=2",
)  # fmt: skip
"""One rank that trains, two that sample."""


def run(job, *overrides):
    return job.run("torchrun.sh", (*WATCHED, *overrides), NPROC_PER_NODE="3", MASTER_PORT=str(runs.free_port()))


@pytest.mark.timing
@pytest.mark.parametrize(
    ("setting", "rank", "phase"),
    [
        ("rollout.name=tests.launch.trouble:Sampling", 2, "gen"),
        ("algorithm.name=tests.launch.trouble:Trouble", 0, "update_actor"),
    ],
    ids=["samples", "trains"],
)
def test_a_rank_of_either_kind_that_hangs_is_named_with_its_stack(setting, rank, phase, tmp_path):
    status, said = run(Job(tmp_path, "sleep", rank), "train.warm_start.num_steps=0", setting)
    message = one_message(said, status)
    assert message.startswith(f"rank {rank} (host ") and "is late: rank" in message, said
    assert f", at step 2, {phase}" in message and "in make_trouble\n      time.sleep(1000)\n" in message, said
    assert f"The last checkpoint in {tmp_path}/run is of step 1: the same command resumes from it.\n" in message


@pytest.mark.timing
def test_a_refit_that_fails_half_way_on_one_rank_ends_all_and_the_run_goes_on_identically(tmp_path):
    """Nothing is sampled with the weights that are half new; the other rank that samples has new ones whole."""
    whole = runs.train_in_pool(tmp_path / "whole", WATCHED, 3)
    job = Job(tmp_path, "raise", 2, update=2)
    status, said = run(job, "rollout.name=tests.launch.trouble:Refitting")
    message = one_message(said, status)
    assert message.startswith("rank 2 (host ") and ") failed at step 2, update_weights:\nTraceback" in message, said
    assert "ArithmeticError: a planted error" in message
    assert [line["step"] for line in runs.metrics(tmp_path) if "actor/grad_norm" in line] == [1]
    status, said = run(job, "rollout.name=tests.launch.trouble:Refitting")
    assert status == 0 and "resumed from" in said, said
    assert runs.metrics(tmp_path) == whole
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert samples == (tmp_path / "whole" / "run" / "samples.jsonl").read_text().splitlines()
    assert all(json.loads(line)["step"] <= 2 for line in samples)
