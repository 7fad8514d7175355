"""A rank that fails where the others wait for it in a collective ends the job, with its own message, in seconds."""

import subprocess
import sys
import time

import pytest

from tests.e2e.runs import free_port
from tests.source import ROOT

RANK = """
import sys, torch.distributed as dist
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from mrl.cli import main
from mrl.distributed.collectives import together
from mrl.distributed.environment import Environment
from mrl.survival.watchdog import Watchdog
from mrl.errors import UserError

rank, port, failing, kind = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=400))
environment = Environment(rank, 2, rank, 2, 1, "torchrun")
errors = {"disk": OSError(28, "No space left on device", "common.pt"), "user": UserError("a wrong key"),
          "defect": KeyError("lost")}
try:
    with Watchdog(environment, collective_timeout_s=400, heartbeat_timeout_s=60, advice=lambda: "advice") as watchdog:
        watchdog.start(store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=400))
        with together():
            if rank == failing:
                raise errors[kind]
            dist.barrier()
except UserError as error:
    print(f"mrl: error: {error}", file=sys.stderr)
    sys.exit(2)
"""
SECONDS = 120
"""ALONE_S, the alarm, the others' leave, the import of torch on a busy machine; the collective's own time is 400 s."""


@pytest.mark.parametrize(
    ("failing", "kind", "status", "said"),
    [
        (0, "disk", 2, "'common.pt' cannot be written: No space left on device"),
        (1, "user", 2, "a wrong key"),
        (1, "defect", 70, "KeyError: 'lost'"),
    ],
)
def test_it_ends_all_ranks_with_one_message(failing, kind, status, said):
    port = str(free_port())
    words = [port, str(failing), kind]
    began = time.monotonic()
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [each.communicate(timeout=200)[1] for each in ranks]
    assert time.monotonic() - began < SECONDS, told
    assert [each.returncode for each in ranks] == [status] * 2, told
    assert "".join(told).count("mrl: error") == 1 and said in "".join(told), told
