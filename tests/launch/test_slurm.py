"""launch/slurm.sbatch on a real SLURM of two nodes: trains both ways, is queued again, leaves nobody behind."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from mrl.distributed.host_list import expand_host_list
from tests import warm
from tests.e2e import runs
from tests.e2e import told as told_run
from tests.source import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
WORDS = (*told_run.OWN, "train.num_steps=3", "reward.time_limit_s=300", "parallel.tensor_model_parallel_size=2")
JOB_TIMEOUT_S = 240
FORWARD_TIMEOUT_S = 120

RANK = """#!/usr/bin/env bash
# In the place of python: says what it was started with, and ends with the status that the folder holds.
trap 'exit 75' TERM
echo "start $SLURM_PROCID $*" >> "$FOLDER/said"
echo "$SLURM_JOB_END_TIME" > "$FOLDER/ends"
until [ -e "$FOLDER/end" ]; do sleep 0.1; done
exit "$(cat "$FOLDER/end")"
"""


def submit(cluster, folder, *words, **variables):
    """`words` may begin with options of sbatch."""
    options = [word for word in words if word.startswith("--")]
    words = words[len(options) :]
    variables = {"PYTHON": sys.executable, "NPROC_PER_NODE": "1", "PYTHONPATH": str(ROOT), **variables}
    return cluster.submit(folder, "--nodes=2", "--output=batch.out", *options, SCRIPT, *words, **variables)


def told(folder):
    return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(Path(folder).rglob("*.[lo][ou][gt]")))


@pytest.mark.parametrize(("mode", "on_a_node", "samples"), [("torchrun", 1, 20), ("srun", 2, 10)])
def test_a_job_of_two_nodes_is_told_of_its_end_and_goes_on_to_the_same_numbers(
    mode, on_a_node, samples, cluster, tmp_path
):
    """SLURM itself places two ranks on a node; the end is told in the second step, whose 32 samples all ranks share."""
    runs.train_in_pool(tmp_path / "whole", WORDS, 2 * on_a_node)
    uninterrupted = (tmp_path / "whole" / "run" / "metrics.jsonl").read_text()
    _, *words = runs.arguments(tmp_path, WORDS)
    held = {told_run.TELL: f"0 score {samples} SIGCONT", told_run.MARK: str(tmp_path / "told")}
    held["PYTHON_EXEC" if mode == "torchrun" else "PYTHON"] = warm.python()  # of the ranks
    job = submit(cluster, tmp_path, *words, MODE=mode, NPROC_PER_NODE=str(on_a_node), **held)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for((tmp_path / "told").exists, JOB_TIMEOUT_S)
    cluster.output("scancel", "--batch", "--signal=USR1", job)
    state = cluster.wait(job, JOB_TIMEOUT_S)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), told(tmp_path)
    assert metrics.read_text() == uninterrupted
    assert "USR1: told to the ranks" in (tmp_path / "batch.out").read_text()
    logs = {path.name.split("-")[1]: path.read_text() for path in (tmp_path / f"slurm-{job}").iterdir()}
    assert sorted(logs) == ["0", "1"]
    assert logs["0"].count("mrl: stopped by SIGUSR1 after step 1; its checkpoint was written.\n") == 1
    assert "mrl: " not in logs["1"]
    wait_for(lambda: not alive(words[0]))


@pytest.fixture
def rank(tmp_path):
    """A stand-in for python, whose processes are known by the folder in their command line."""
    path = tmp_path / "rank"
    path.write_text(RANK)
    path.chmod(0o755)
    return str(path)


def lines(folder):
    return (folder / "said").read_text().splitlines() if (folder / "said").exists() else []


def wait_for(condition, timeout_s=FORWARD_TIMEOUT_S):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(path):
    return [process for process in psutil.process_iter(["cmdline"]) if path in (process.info["cmdline"] or ())]


def test_a_job_that_ends_with_the_requeue_status_runs_again_and_resumes(cluster, rank, tmp_path):
    job = submit(cluster, tmp_path, "--time=9", "c.yaml", MODE="srun", PYTHON=rank, FOLDER=str(tmp_path))
    wait_for(lambda: len(lines(tmp_path)) == 2)
    ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int((tmp_path / "ends").read_text())))
    assert ends == cluster.state(job)["EndTime"]
    cluster.output("scancel", "--signal=TERM", job)  # as a preemption with a grace time: steps only
    wait_for(lambda: cluster.state(job).get("Restarts") == "1")
    tmp_path.joinpath("end").write_text("0")
    state = cluster.wait(job, JOB_TIMEOUT_S)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), told(tmp_path)
    first, again = sorted(lines(tmp_path))[:1], sorted(lines(tmp_path))[1:2]
    assert first == ["start 0 -m mrl train c.yaml"] and again == ["start 0 -m mrl train c.yaml run.resume=auto"]


def test_another_status_is_the_jobs_and_is_not_queued_again(cluster, rank, tmp_path):
    tmp_path.joinpath("end").write_text("2")
    job = submit(cluster, tmp_path, "train", "c.yaml", MODE="srun", PYTHON=rank, FOLDER=str(tmp_path))
    state = cluster.wait(job, JOB_TIMEOUT_S)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "2:0", "0")


def test_a_cancelled_job_leaves_no_process(cluster, rank, tmp_path):
    job = submit(cluster, tmp_path, "train", "c.yaml", MODE="srun", PYTHON=rank, FOLDER=str(tmp_path))
    wait_for(lambda: len(lines(tmp_path)) == 2)
    assert alive(rank)
    cluster.output("scancel", job)
    assert cluster.wait(job, JOB_TIMEOUT_S)["JobState"] == "CANCELLED"
    wait_for(lambda: not alive(rank))
    state = cluster.state(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), told(
        tmp_path
    )  # though its ranks ended with 75


@pytest.mark.parametrize("text", ["node7", "node[1-3,07-09],login", "rack[1-2]-gpu[01-02]", "10.0.0.[9-11]"])
def test_scontrol_reads_a_node_list_alike(text, cluster):
    assert cluster.output("scontrol", "show", "hostnames", text).split() == expand_host_list(text)
