"""GRPO that makes trouble once: `algorithm.name=tests.launch.trouble:Trouble`, with what and where in TROUBLE.

    TROUBLE="KIND RANK UPDATE FILE"     KIND in the loss of rank RANK's update UPDATE, unless FILE is there; it is then

The kinds: sleep (for ever), raise, mistake (a UserError of one rank), kill (this process), down (this host, which is a
network namespace: all its processes, once it was heard here), wait (in a collective that the others never enter).
"""

import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mrl.algorithms.grpo import Grpo
from mrl.errors import UserError


class Trouble(Grpo):
    updates = 0

    def weigh(self, minibatch, reduce):
        self.updates += 1
        super().weigh(minibatch, reduce)

    def loss(self, logprobs_R, entropy_R, microbatch):
        kind, rank, update, file = os.environ["TROUBLE"].split()
        if dist.get_rank() == int(rank) and self.updates == int(update) and not Path(file).exists():
            Path(file).touch()
            make_trouble(kind)
        return super().loss(logprobs_R, entropy_R, microbatch)


def make_trouble(kind):
    if kind == "sleep":
        while True:
            time.sleep(1000)
    elif kind == "raise":
        raise ArithmeticError("a planted error")
    elif kind == "mistake":
        raise UserError("a planted mistake.")
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    elif kind == "down":
        time.sleep(3)  # three beats of the watchdog
        host = os.readlink("/proc/self/ns/net")
        others = [process.pid for process in psutil.process_iter() if is_on(process.pid, host)]
        for pid in [*sorted(set(others) - {os.getpid()}), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    elif kind == "wait":
        dist.all_reduce(torch.zeros(1), group=dist.group.WORLD)


def is_on(pid, host):
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == host
    except OSError:
        return False
