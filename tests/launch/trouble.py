"""GRPO, or an engine, that makes trouble once; what and where is in TROUBLE.

    TROUBLE="KIND RANK UPDATE FILE"     KIND in the loss of rank RANK's update UPDATE, unless FILE is there; it is then

That is `algorithm.name=tests.launch.trouble:Trouble`. `rollout.name=tests.launch.trouble:Sampling` does so in its
UPDATE'th `generate`, `:Refitting` in its UPDATE'th refit, when half of the first bucket is stored. With
`algorithm.name=tests.launch.trouble:Beside` and `rollout.name=tests.launch.trouble:Streaming` the ranks that train
and those that sample first meet in update UPDATE and in the UPDATE'th `stream`, after some decode steps: what happens
then happens while both are at work.

`rollout.name=tests.launch.trouble:Slow` is told to stop and slow from then on, in its UPDATE'th call; KIND is not read.

The kinds: sleep (for ever), crawl (of `Streaming`: a second for each of CRAWLS forwards, then sleep), raise, mistake (a
UserError of one rank), kill (this process), down (this host, which is a network namespace: all its processes, once it
was heard here), wait (in a collective that the others never enter).
"""

import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mrl.algorithms.grpo import Grpo
from mrl.engines.native.engine import NativeEngine
from mrl.errors import UserError


class Trouble(Grpo):
    updates = 0

    def weigh(self, minibatch, reduce):
        self.updates += 1
        super().weigh(minibatch, reduce)

    def loss(self, logprobs_R, entropy_R, microbatch):
        maybe_make_trouble(self.updates)
        return super().loss(logprobs_R, entropy_R, microbatch)


class Beside(Trouble):
    def loss(self, logprobs_R, entropy_R, microbatch):
        meet("update", "stream", self.updates)
        return super().loss(logprobs_R, entropy_R, microbatch)


class Streaming(NativeEngine):
    streams = 0

    def generate_streaming(self, feed, sampling):
        self.streams += 1
        pulse, num_pulses, num_forwards, sampled = feed.poll, 0, 0, self.on_forward

        def crawling():
            nonlocal num_forwards
            num_forwards += num_pulses > 1
            if num_forwards <= CRAWLS:
                time.sleep(num_forwards > 0)
                sampled()
            else:
                maybe_make_trouble(self.streams)

        def troubled(finished, num_waiting):
            nonlocal num_pulses
            num_pulses += 1
            if num_pulses == 2:
                meet("stream", "update", self.streams)
                if self.on_forward is sampled:
                    maybe_make_trouble(self.streams)
            return pulse(finished, num_waiting)

        feed.poll = troubled
        if crawls(self.streams):
            self.on_forward = crawling
        return super().generate_streaming(feed, sampling)


class Slow(NativeEngine):
    calls = 0

    def _slow_down(self):
        """In its UPDATE'th call: the rank is told to stop, and each forward takes SLOW_S."""
        self.calls += 1
        _, rank, call, file = os.environ["TROUBLE"].split()
        if dist.get_rank() == int(rank) and self.calls == int(call) and not Path(file).exists():
            Path(file).touch()
            os.kill(os.getpid(), signal.SIGUSR1)
            self.on_forward = lambda: time.sleep(SLOW_S)

    def generate_streaming(self, feed, sampling):
        self._slow_down()
        return super().generate_streaming(feed, sampling)

    def generate(self, prompts, sampling):
        self._slow_down()
        return super().generate(prompts, sampling)


class Sampling(NativeEngine):
    calls = 0

    def generate(self, prompts, sampling):
        self.calls += 1
        maybe_make_trouble(self.calls)
        return super().generate(prompts, sampling)


class Refitting(NativeEngine):
    refits = 0

    def begin_update(self):
        self.refits += 1
        super().begin_update()

    def update_weights(self, bucket):
        super().update_weights(bucket[: len(bucket) // 2])
        if len(bucket) > 1:
            maybe_make_trouble(self.refits)
        super().update_weights(bucket[len(bucket) // 2 :])


CRAWLS = 9
SLOW_S = 0.4


def crawls(count):
    kind, rank, update, file = os.environ["TROUBLE"].split()
    return kind == "crawl" and dist.get_rank() == int(rank) and count == int(update) and not Path(file).exists()


MEET_S = 60


def meet(here, there, count):
    """Waits for the other kind of ranks, unless this is another update, or the trouble is over."""
    _, _, update, file = os.environ["TROUBLE"].split()
    if count != int(update) or Path(file).exists():
        return
    Path(f"{file}.{here}").touch()
    deadline = time.monotonic() + MEET_S
    while not Path(f"{file}.{there}").exists():
        assert time.monotonic() < deadline, f"no {there} beside this {here}"
        time.sleep(0.01)


def maybe_make_trouble(count):
    kind, rank, update, file = os.environ["TROUBLE"].split()
    if dist.get_rank() == int(rank) and count == int(update) and not Path(file).exists():
        Path(file).touch()
        make_trouble(kind)


def make_trouble(kind):
    if kind in ("sleep", "crawl"):
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
