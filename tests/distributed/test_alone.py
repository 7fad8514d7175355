"""A rank that fails where the others wait for it in a collective ends the job, with its own message, in seconds."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from mrl.distributed.collectives import raise_on_all_ranks
from mrl.distributed.launcher_env import LauncherEnv
from mrl.distributed.local_ranks import fork_server_context, free_port
from mrl.distributed.watchdog.watchdog import Watchdog
from mrl.errors import UserError
from tests.ranks import PRELOAD

pytestmark = pytest.mark.slow

COLLECTIVE = timedelta(seconds=400)
SECONDS = 120
"""ALONE_S, the alarm, the others' leave, a busy machine; the collective's own time is 400 s."""


def be_rank(rank, port, failing, kind, file):
    """A rank's whole life, what it says in a file."""
    with file.open("wb") as output:
        os.dup2(output.fileno(), 2)
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False, timeout=COLLECTIVE)
    environment = LauncherEnv(rank, 2, rank, 2, 1, "torchrun")
    errors = {
        "disk": OSError(28, "No space left on device", "common.pt"), "user": UserError("a wrong key"),
        "defect": KeyError("lost"),
    }  # fmt: skip
    limits = {"collective_timeout_s": COLLECTIVE.seconds, "heartbeat_timeout_s": 60}
    try:
        with Watchdog(environment, **limits, advice=lambda: "advice") as watchdog:
            watchdog.start(store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=COLLECTIVE)
            with raise_on_all_ranks():
                if rank == failing:
                    raise errors[kind]
                dist.barrier()
    except UserError as error:
        sys.stderr.write(f"mrl: error: {error}\n")
        sys.exit(2)


@pytest.mark.parametrize(
    ("failing", "kind", "status", "said"),
    [
        (0, "disk", 2, "'common.pt' cannot be written: No space left on device"),
        (1, "user", 2, "a wrong key"),
        (1, "defect", 70, "KeyError: 'lost'"),
    ],
)
def test_it_ends_all_ranks_with_one_message(failing, kind, status, said, tmp_path):
    port, files = free_port(), [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    began = time.monotonic()
    ranks = [
        fork_server_context(PRELOAD).Process(target=be_rank, args=(rank, port, failing, kind, file))
        for rank, file in enumerate(files)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    told = "".join(file.read_text() for file in files)
    assert time.monotonic() - began < SECONDS, told
    assert [each.exitcode for each in ranks] == [status] * 2, told
    assert told.count("mrl: error") == 1 and said in told, told
