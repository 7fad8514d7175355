"""Ranks of a call: they start, they end, and none is left behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mrl.distributed import local_ranks
from mrl.distributed.launch import get_launcher_env
from mrl.distributed.local_ranks import PORTS, RankError, free_port, run_ranks
from mrl.errors import UserError
from tests.ranks import PRELOAD
from tests.source import ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 60
SHORT_S = 3  # long enough to start processes of a server that runs, far from LIMIT_S


def run(function, folder, *arguments, size=3, time_limit_s=LIMIT_S):
    """PRELOAD is what other tests of this session need: the first call decides."""
    arguments, logs = [folder, *arguments], folder / "logs"
    return run_ranks(function, arguments, size=size, logs=logs, time_limit_s=time_limit_s, preload=PRELOAD)


def note(folder):
    here = get_launcher_env()
    (folder / str(here.rank)).write_text(f"{here.world_size} {here.launcher} {os.getpid()}")
    sys.stdout.write(f"hello from {here.rank}\n")


def misbehave(folder, how):
    note(folder)
    if get_launcher_env().rank == 1:
        if how == "mistake":
            error = UserError("rollout.n is odd")
            error.at = "step 3, gen"
            raise error
        if how == "defect":
            raise KeyError("weights")
        sys.stdout.flush()
        sys.stderr.write("no memory\n")
        sys.stderr.flush()
        os._exit(3)
    time.sleep(LIMIT_S)


def ranks_of(folder):
    return [int(file.read_text().split()[-1]) for file in folder.glob("[0-9]") if file.stat().st_size]


def test_each_rank_knows_its_place_and_has_its_own_log(tmp_path):
    ran = run(note, tmp_path)
    assert [(tmp_path / str(rank)).read_text()[:10] for rank in range(3)] == ["3 torchrun"] * 3
    assert [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(3)] == [
        f"hello from {rank}\n" for rank in range(3)
    ]
    assert ran.seconds < LIMIT_S and get_launcher_env().launcher == "none"
    assert not any(psutil.pid_exists(pid) for pid in ranks_of(tmp_path))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("mistake", "^rollout.n is odd$"),
        ("defect", "^rank 1: KeyError: 'weights'$"),
        ("death", "^rank 1 died with exit status 3; its last output:\nhello from 1\nno memory$"),
    ],
)
def test_one_rank_that_fails_ends_all_with_its_message(tmp_path, how, said):
    with pytest.raises(RankError, match=said) as failed:
        run(misbehave, tmp_path, how)
    assert failed.value.rank == 1 and failed.value.is_user_error is (how == "mistake")
    assert failed.value.at == ("step 3, gen" if how == "mistake" else "")
    assert how == "death" or failed.value.frames[-1] == ("test_local_ranks.py", "misbehave")
    assert not any(psutil.pid_exists(pid) for pid in ranks_of(tmp_path))


def test_ranks_that_do_not_end_are_ended_and_say_where_they_were(tmp_path):
    with pytest.raises(RankError, match=r"did not end in time: rank 0 in misbehave \(test_local_ranks.py\)"):
        run(misbehave, tmp_path, "sleep", size=1, time_limit_s=SHORT_S)
    assert not any(psutil.pid_exists(pid) for pid in ranks_of(tmp_path))


def test_ranks_end_with_the_process_that_started_them_even_by_kill_9(tmp_path):
    code = (
        "import sys; from pathlib import Path; from tests.distributed.test_local_ranks import misbehave, run_ranks\n"
        "if __name__ == '__main__':\n"
        "    folder = Path(sys.argv[1])\n"
        "    run_ranks(misbehave, [folder, 'sleep'], size=1, logs=folder / 'logs', time_limit_s=60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    try:
        wait_until(lambda: ranks_of(tmp_path), LIMIT_S)
    finally:
        starter.kill()
        starter.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks_of(tmp_path)), LIMIT_S)


def wait_until(holds, limit_s):
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_port_is_free_and_stays_so_until_the_ranks_listen(monkeypatch):
    """The system gives ports of its own range to any connection, also to one of the next second."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(PORTS) < lowest
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        number = taken.getsockname()[1]
        other = free_port()
        monkeypatch.setattr(local_ranks, "PORTS", [number] * 9 + [other])
        assert {free_port() for _ in range(5)} == {other}
