"""Programs that are measured beside each other, each in a process of its own, taking turns.

Owns their processes: what one of them does to its process (threads, variables, random numbers) does not reach the next,
all are given the same number of threads before they start, and those that wait for their turn use no processor.
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
"""Makes what is measured, inside the process; picklable, such as a `partial` of a function of a module."""

PATIENCE_S = 30.0
"""For a process that is to end."""


@dataclass
class Turns:
    """What one of them took, a value for each call.

    Attributes:
        wall_s: By the clock.
        processor_s: Of all its threads and processes.
    """

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """By the clock."""
        return statistics.median(self.wall_s)

    @property
    def cores(self) -> float:
        """Processors that it kept busy, on average."""
        return sum(self.processor_s) / sum(self.wall_s)


def take_turns(makers: Mapping[str, Maker], repeats: int, device: torch.device, num_threads: int) -> dict[str, Turns]:
    """Times of `repeats` calls of each, one after the other, after a first call of each that is not counted.

    Args:
        makers: Name -> what makes it.
        repeats: Rounds.
        device: Whose clock is waited for.
        num_threads: Of each.

    Raises:
        RuntimeError: One of them failed; what it said is told.
    """
    contenders: dict[str, _Contender] = {}
    found = {name: Turns() for name in makers}
    try:
        with launch.changed_variables(OMP_NUM_THREADS=str(num_threads)):
            for name, maker in makers.items():  # one at a time: they would share the cores
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
    """One process, as its parent sees it."""

    def __init__(self, name: str, maker: Maker, device: torch.device, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, maker, device, num_threads), name=name)
        self._process.start()
        other.close()

    def call(self) -> Sequence[float]:
        """Seconds by the clock and of processors."""
        try:
            self._pipe.send(None)
            times, failure = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(PATIENCE_S)
            raise RuntimeError(f"'{self._name}' ended by itself, with status {self._process.exitcode}") from error
        if failure:
            raise RuntimeError(f"'{self._name}' failed:\n{failure}")
        found: Sequence[float] = times
        return found

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection[Any, Any], maker: Maker, device: torch.device, num_threads: int) -> None:
    """The other side: one call for each word, until the pipe is closed."""
    sys.stdout.flush()
    os.dup2(2, 1)  # the parent's output is its figures
    try:
        torch.set_num_threads(num_threads)
        with maker() as action:
            while _asked(pipe):
                before = _processor_s()
                wall = seconds(action, device)
                pipe.send(((wall, _processor_s() - before), None))
    except Exception:  # noqa: BLE001 -- the parent raises it
        pipe.send((None, traceback.format_exc()))
    finally:
        pipe.close()


def _asked(pipe: Connection[Any, Any]) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _processor_s() -> float:
    """Of this process and those that it started, s."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
