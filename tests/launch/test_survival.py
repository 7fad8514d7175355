"""A rank that hangs, raises or is gone ends the whole job, by each launcher, with one message; or all start again."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests import warm
from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.launch.hosts import Hosts, NoRightsError
from tests.source import ROOT

pytestmark = [pytest.mark.timing, pytest.mark.slow]
TIMEOUT_S = 240
END_S = 60
"""From the trouble to the end of the job; acceptance says so for a lost host: not raised for busy machines."""
GONE_S = 60
"""mpirun and SLURM take some seconds for what is left of a job."""

COLLECTIVE_S, HEARTBEAT_S = 12, 20
RECOVERABLE = (*SHORT, "checkpoint.interval=1", f"run.collective_timeout_s={COLLECTIVE_S}",
    f"run.heartbeat_timeout_s={HEARTBEAT_S}", "algorithm.name=tests.launch.trouble:Trouble")  # fmt: skip
OVERRIDES = (*RECOVERABLE, "train.warm_start.num_steps=0")

BY = [
    "torchrun",
    pytest.param("mpirun", marks=pytest.mark.mpi),
    pytest.param("srun", marks=pytest.mark.slurm),
]


class Job:
    """A run of two ranks that gets into trouble in update 3, which is in step 2."""

    def __init__(self, folder, kind, rank, update=3, python=None):
        self.folder, self.file = folder, folder / "trouble"
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": python or warm.python(), "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": python or warm.python(), "TROUBLE": f"{kind} {rank} {update} {self.file}",
        }  # fmt: skip

    def run(self, script, overrides=OVERRIDES, **variables):
        """The exit status of a script of launch/, and all that it said."""
        done = subprocess.run(
            [str(ROOT / "launch" / script), *runs.arguments(self.folder, overrides)], cwd=self.folder,
            env=self.environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        self.check_end()
        return done.returncode, done.stdout

    def run_by(self, launcher, request):
        if launcher == "torchrun":
            return self.run("torchrun.sh", NPROC_PER_NODE="2", MASTER_PORT=str(runs.free_port()))
        if launcher == "mpirun":
            version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
            root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            return self.run(
                "mpirun.sh", NPROC="2", MPIRUN_ARGS="--oversubscribe" if "Open MPI" in version else "", **root
            )
        cluster = request.getfixturevalue("cluster")
        words = ["--nodes=2", "--output=batch.out", str(ROOT / "launch" / "slurm.sbatch")]
        own = {name: self.environment[name] for name in ("PYTHON", "PYTHON_EXEC", "PYTHONPATH", "TROUBLE")}
        job = cluster.submit(
            self.folder,
            *words,
            *runs.arguments(self.folder, OVERRIDES),
            MODE="srun",
            NPROC_PER_NODE="1",
            MASTER_PORT=str(runs.free_port()),
            **own,
        )
        state = cluster.wait(job, TIMEOUT_S)
        self.check_end()
        told = "".join(path.read_text() for path in sorted(self.folder.glob("slurm-*/*.log")))
        return int(state["ExitCode"].partition(":")[0]), told

    def check_end(self):
        """The job came to its end in time, and nobody is left."""
        assert not self.file.exists() or time.time() - self.file.stat().st_mtime < END_S
        deadline = time.monotonic() + GONE_S
        while left := self.alive():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)

    def alive(self):
        """The processes that were started for this run, and those that they started."""
        place = os.fsencode(f"TROUBLE={self.environment['TROUBLE']}")
        return [process for process in psutil.process_iter() if place in variables(process).split(b"\0")]


def variables(process):
    if process.pid == os.getpid():
        return b""
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def one_message(told, status, expected_status=70):
    assert status == expected_status, told
    assert told.count("mrl: error: ") == 1, told
    return told.partition("mrl: error: ")[2]


@pytest.mark.parametrize("launcher", BY)
def test_a_rank_that_sleeps_for_ever_is_named_with_its_stack(launcher, request, tmp_path):
    status, told = Job(tmp_path, "sleep", 1).run_by(launcher, request)
    message = one_message(told, status)
    assert message.startswith("rank 1 (host "), told
    assert "is late: rank 0 has waited" in message and ", at step 2, update_actor for " in message, told
    assert "in make_trouble\n      time.sleep(1000)\n" in message, told
    assert f"The last checkpoint in {tmp_path}/run is of step 1: the same command resumes from it.\n" in message


@pytest.mark.parametrize("launcher", BY)
def test_a_rank_that_raises_speaks_for_all(launcher, request, tmp_path):
    """With the processes that a user has: those of the other tests are forked, see `tests/warm`."""
    status, told = Job(tmp_path, "raise", 1, python=sys.executable).run_by(launcher, request)
    message = one_message(told, status)
    assert message.startswith("rank 1 (host ") and ") failed at step 2, update_actor:\nTraceback" in message, told
    assert told.count("\nArithmeticError: a planted error\n") == told.count("Traceback") == 1, told


@pytest.mark.slurm
def test_rank_0_takes_the_store_with_it_and_is_named(request, tmp_path):
    """Its process has to be gone for others as soon as it is killed: a forked one waits for its server."""
    status, told = Job(tmp_path, "kill", 0, python=sys.executable).run_by("srun", request)
    message = one_message(told, status or 137, status or 137)  # srun's status is that of one of the two
    assert "rank 0 (host " in message and " is gone" in message, told


def test_a_mistake_of_one_rank_ends_all_with_its_status_and_no_restart(tmp_path):
    job = Job(tmp_path, "mistake", 1)
    status, told = job.run("torchrun.sh", NPROC_PER_NODE="2", MASTER_PORT=str(runs.free_port()), MAX_RESTARTS="2")
    message = one_message(told, status, 2)
    assert message.startswith("a planted mistake.\nRaised on rank 1 (host "), told
    assert "Traceback" not in told


def test_killed_ranks_start_again_and_reach_the_same_numbers(expected, tmp_path):
    job = Job(tmp_path, "kill", 1)
    status, told = job.run(
        "torchrun.sh", RECOVERABLE, NPROC_PER_NODE="2", MASTER_PORT=str(runs.free_port()), MAX_RESTARTS="1"
    )
    message = one_message(told, status, 0)
    assert (
        message.startswith("rank 1 (host ") and "is gone: its process has ended. Its last report came from" in message
    ), told
    assert "resumed from" in message
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected


@pytest.fixture
def hosts():
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield hosts
    hosts.down()


def words_and_variables(hosts, job, overrides):
    words = [str(ROOT / "launch" / "torchrun.sh"), *runs.arguments(job.folder, overrides)]
    return words, {**job.environment, "NNODES": "2", "MASTER_ADDR": hosts.address(0)}


@pytest.mark.netns
def test_a_lost_host_ends_the_other_which_names_it(hosts, tmp_path):
    job = Job(tmp_path, "down", 1)
    statuses, told = hosts.run(*words_and_variables(hosts, job, OVERRIDES), tmp_path, TIMEOUT_S)
    job.check_end()
    message = one_message(told, statuses[0])
    assert f"No rank of this job answers on host {hosts.names[1]}: rank 1.\nrank 1 (host " in message, told
    assert "Its last report came from step " in message, told


@pytest.mark.netns
def test_a_lost_host_that_is_started_again_joins_and_the_numbers_are_the_same(hosts, expected, tmp_path):
    job = Job(tmp_path, "down", 1)
    words, variables = words_and_variables(hosts, job, RECOVERABLE)
    variables["MAX_RESTARTS"] = "3"  # the one that comes back before torchrun has missed it costs another one
    files = [tmp_path / name for name in ("host0", "host1", "host1-again")]
    stays, lost = (hosts.start(n, words, {**variables, "NODE_RANK": str(n)}, files[n]) for n in range(2))
    try:
        lost.wait(TIMEOUT_S)
        back = hosts.start(1, words, {**variables, "NODE_RANK": "1"}, files[2])
        assert [process.wait(TIMEOUT_S) for process in (stays, back)] == [0, 0], files[0].read_text()
    finally:
        for process in job.alive():
            process.kill()
    told = files[0].read_text()
    message = told.partition("mrl: error: ")[2]
    assert message.startswith(f"No rank of this job answers on host {hosts.names[1]}: rank 1."), told
    assert "resumed from" in message
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected
