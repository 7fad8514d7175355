"""Timing of several programs in alternation, each in its own process.

Separate processes keep threads, environment variables and random state apart. All get the same number of threads, and
those that wait use no CPU time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

from bench.measure import seconds
from mrl.distributed import launch

Action = Callable[[], object]
Maker = Callable[[], AbstractContextManager[Action]]
"""Picklable context manager factory that creates the timed action inside the process, such as a `partial`."""

PATIENCE_S = 30.0
"""Time limit for a process to exit, seconds."""


@dataclass
class Turns:
    """Times of one program, one value per call.

    Attributes:
        wall_s: Wall-clock times, seconds.
        processor_s: Processor times of all its threads and processes, seconds.
    """

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median wall-clock time, seconds."""
        return statistics.median(self.wall_s)

    @property
    def cores(self) -> float:
        """Average number of busy processors."""
        return sum(self.processor_s) / sum(self.wall_s)


def take_turns(makers: Mapping[str, Maker], repeats: int, device: torch.device, num_threads: int) -> dict[str, Turns]:
    """Times `repeats` calls of each program in alternation, after one warm-up call of each.

    Args:
        makers: Factory of each program's action, by name.
        repeats: Number of rounds.
        device: Device that is synchronised for timing.
        num_threads: Threads of each program.

    Raises:
        RuntimeError: A program failed; its traceback is included.
    """
    contenders: dict[str, _Contender] = {}
    found = {name: Turns() for name in makers}
    try:
        with launch.override_env(OMP_NUM_THREADS=str(num_threads)):
            for name, maker in makers.items():  # one at a time, since they share the cores
                contenders[name] = _Contender(name, maker, device, num_threads)
                contenders[name].call()
        for _ in range(repeats):
            for name, contender in contenders.items():
                wall, processor = contender.call()
                found[name].wall_s.append(wall)
                found[name].processor_s.append(processor)
    finally:
        for contender in contenders.values():
            contender.close()
    return found


class _Contender:
    """Process of one program, as seen by the parent."""

    def __init__(self, name: str, maker: Maker, device: torch.device, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, maker, device, num_threads), name=name)
        self._process.start()
        other.close()

    def call(self) -> Sequence[float]:
        """Runs the action once; returns wall-clock and processor seconds."""
        try:
            self._pipe.send(None)
            times, failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(PATIENCE_S)
            raise RuntimeError(f"'{self._name}' exited unexpectedly with status {self._process.exitcode}") from error
        if failure:
            raise RuntimeError(f"'{self._name}' failed:\n{failure}")
        found: Sequence[float] = times
        return found

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection[Any, Any], maker: Maker, device: torch.device, num_threads: int) -> None:
    """Runs the action once per message until the pipe is closed; the body of the process."""
    sys.stdout.flush()
    os.dup2(2, 1)  # stdout is reserved for the parent's results
    try:
        torch.set_num_threads(num_threads)
        with maker() as action:
            while _has_request(pipe):
                before = _processor_s()
                wall = seconds(action, device)
                pipe.send(((wall, _processor_s() - before), None))
    except Exception:  # noqa: BLE001 -- the parent raises it
        pipe.send((None, traceback.format_exc()))
    finally:
        pipe.close()


def _has_request(pipe: Connection[Any, Any]) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _processor_s() -> float:
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
