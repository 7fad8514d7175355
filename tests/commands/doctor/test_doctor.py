"""`mrl doctor` as a user starts it: alone, with a mistake, a check that hangs, ranks that differ or do not come."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from mrl.distributed.local_ranks import fork_server_context
from tests.commands.doctor.test_versions import distribution
from tests.e2e import runs
from tests.ranks import PRELOAD
from tests.source import ROOT

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
BOUND_S = 60
"""Imports on two busy cores, the waits that were asked for, and room."""
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_"))
}
CLEAN |= {"OMP_NUM_THREADS": "1"}
QUICK = str(ROOT / "tests" / "commands" / "doctor" / "quick")
"""On the path before the installed packages: all but the first test are spared vLLM's import, ten seconds of a core."""


def doctor(folder, *words, wait=True, **variables):
    process = subprocess.Popen(
        [sys.executable, "-m", "mrl", "doctor", *words], cwd=folder, env=CLEAN | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return ended(process) if wait else process


def unannounced(err):
    """Returns the lines of stderr other than those that say which stage starts."""
    return [line for line in err.splitlines() if not line.startswith("mrl: doctor: ")]


def ended(process):
    try:
        return *process.communicate(timeout=TIMEOUT_S), process.returncode
    finally:
        process.kill()


def forked(folder, *words, **variables):
    """As `doctor`, in a process that was spared the imports; `said` gives what it gives."""
    out, err = (folder / f"rank{variables.get('RANK', 0)}.{stream}" for stream in ("out", "err"))
    variables = CLEAN | {"PYTHONPATH": QUICK} | variables
    process = fork_server_context(PRELOAD).Process(target=_main, args=(folder, words, variables, out, err))
    process.start()
    return process, out, err


def _main(folder, words, variables, out, err):
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["mrl", "doctor", *words]
    from mrl.__main__ import main

    sys.exit(main())


def said(process, out, err):
    process.join(TIMEOUT_S)
    status = process.exitcode
    process.kill()
    process.join()
    return out.read_text(), err.read_text(), status


def place(rank, port, *, apart=False):
    """Variables of one of two ranks, as torchrun would set them; `apart`: each as if on a host of its own."""
    local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} if apart else {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    numbers = {"RANK": rank, "WORLD_SIZE": 2, **local, "MASTER_PORT": port}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}


def test_alone_it_looks_at_this_machine_and_at_a_config(tmp_path):
    _, config, output = runs.arguments(tmp_path)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        out, err, status = doctor(tmp_path, config, output, "model.dtype=float32", "--json", MASTER_PORT=port)
    told = {each["topic"]: each for each in json.loads(out)["findings"]}
    assert unannounced(err) == [] and "mrl: doctor: packages" in err and status == 2  # the port
    assert told["port"]["level"] == "problem" and f"{port} (MASTER_PORT) is taken" in told["port"]["found"]
    levels = {"packages": "ok", "config": "ok", "output folder": ("ok", "warning"), "free space": "ok"}
    for topic, level in levels.items():
        assert told[topic]["level"] in level, told[topic]
    assert {"CPU", "host memory", "open files", "network", "ports", "MPI", "SLURM", "/dev/shm", "GPUs"} <= set(told)
    assert [path.name for path in tmp_path.iterdir()] == ["config-given.yaml"]


def test_a_mistake_in_the_config_or_the_launcher_is_one_line_of_the_table(tmp_path):
    _, config, _ = runs.arguments(tmp_path)
    out, err, status = said(*forked(tmp_path, config, "train.num_step=3", RANK="0", WORLD_SIZE="2"))
    problems = [line for line in out.splitlines() if line.startswith("problem")]
    assert (status, unannounced(err), len(problems)) == (2, [], 2)
    assert "torchrun's variables, but not LOCAL_RANK" in problems[0] and "'train.num_step' is unknown" in problems[1]


def test_a_check_that_hangs_is_ended_and_named(tmp_path):
    """A pipe that nobody writes to is read for ever, like a file on a server that is gone."""
    _, config, _ = runs.arguments(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    start = time.monotonic()
    words = [f"data.train_files=[{tmp_path}/pipe]", "data.task=null", "--timeout-s", "3"]
    out, _, status = said(*forked(tmp_path, config, *words))
    assert status == 2 and time.monotonic() - start < BOUND_S
    lines = out.splitlines()
    assert lines[0].startswith("problem") and "no end after 8 s" in lines[0] and lines[0].split()[1] == "data"
    assert any("host memory" in line for line in lines)  # what came before is told


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path):
    start = time.monotonic()
    out, _, status = said(*forked(tmp_path, "--timeout-s", "4", **place(0, runs.free_port())))
    assert status == 2 and time.monotonic() - start < BOUND_S
    (line,) = [line for line in out.splitlines() if line.startswith("problem")]
    assert "rank(s) 1 did not come in 4 s" in line and "is the job's port open" in line
    assert "host memory" in out  # it looked at its own host still


@pytest.mark.parametrize("there", [False, True], ids=["nobody", "one that says nothing"])
def test_a_rank_that_cannot_reach_the_first_says_so_itself(tmp_path, there):
    """torch waits for its time limit and a random delay where nobody listens, and for ever where it gets no answer."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if there:
            mute.listen()
        words = ["--timeout-s", "3"]
        out, err, status = said(*forked(tmp_path, *words, **place(1, mute.getsockname()[1], apart=True)))
    assert (out, status) == ("", 2)
    (line,) = [line for line in err.splitlines() if line.startswith("mrl doctor on ")]  # TCPStore logs beside it
    assert "cannot reach rank 0 at 127.0.0.1:" in line


def test_a_check_that_hangs_on_another_host_is_named_by_rank_0(tmp_path):
    _, config, _ = runs.arguments(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    port, start = runs.free_port(), time.monotonic()
    words = [config, "--timeout-s", "3"]
    first = forked(tmp_path, *words, **place(0, port, apart=True))
    hangs = ["data.task=null", f"data.train_files=[{tmp_path}/pipe]"]
    second = forked(tmp_path, *words, *hangs, **place(1, port, apart=True))
    (out, _, status), (silent, _, other) = said(*first), said(*second)
    assert (status, silent, other) == (2, "", 2) and time.monotonic() - start < 2 * BOUND_S
    assert any("rank 1 on " in line and "'data' has no end after 8 s" in line for line in out.splitlines()), out


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    """Two ranks; the second has another numpy by its metadata, a changed mrl and another config."""
    folder = tmp_path_factory.mktemp("different")
    other = folder / "other"
    shutil.copytree(ROOT / "mrl", other / "mrl", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "mrl" / "train.py").open("a") as stream:
        stream.write("# changed\n")
    shutil.copy(ROOT / "setup.py", other)
    distribution(other, "numpy", "1.99.0")
    _, config, _ = runs.arguments(folder)
    port = runs.free_port()
    paths = [os.pathsep.join((str(each), QUICK)) for each in (ROOT, other)]
    first = doctor(folder, config, wait=False, **place(0, port), PYTHONPATH=paths[0])
    second = doctor(other, config, "run.seed=4", wait=False, **place(1, port), PYTHONPATH=paths[1])
    return ended(first), ended(second)


def test_ranks_with_another_version_code_or_config_are_named(different):
    (out, _, status), _ = different
    same = [line for line in out.splitlines() if "same on all" in line]
    assert status == 2 and len(same) == 3 and all(line.startswith("problem") for line in same)
    assert any("mrl's code is" in line for line in same) and any("config is" in line for line in same)
    assert any("but 1.99.0 on rank(s) 1 (" in line for line in same)


def test_the_other_ranks_are_silent_and_the_sums_are_still_looked_at(different):
    (out, _, _), (second, errors, status) = different
    assert (second, status) == ("", 2) and "Traceback" not in errors
    assert "all-reduce" in out and "exact on 2 ranks" in out
