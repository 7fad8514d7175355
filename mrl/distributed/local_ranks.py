"""Ranks of a job on this host's CPUs, for as long as a call lasts: `run_ranks` starts them and ends every one of them.

Owns their start, their end and what they took. They are forked from one server that has imported what they need, so
that eight of them start in the time and the memory of one; each has torchrun's variables and a log of its own. A rank
that fails ends the others, and none outlives the process that asked for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from mrl.distributed import launch
from mrl.errors import UserError

OTHERS_S = 3.0
"""After a failure the other ranks get this long to say what happened to them."""
STACKS_S = 1.0
"""Ranks that are out of time get this long to write where they are."""
SAMPLE_S = 0.5
"""Between two looks at the ranks' memory, and longer where a look takes long: the kernel goes through every page."""
LOOK_FRAC = 0.05
"""Of a core, at most, for those looks."""
LAST_LINES = 3
"""Of a rank that died without telling why."""
PORTS = range(20_000, 32_000)
"""Below those that Linux gives to whoever asks for any: one of these is still free when the first rank is up."""
TRAINING = (
    "mrl.train",
    "mrl.engines.native.engine",
    "torch._dynamo",
    "mrl.observability.report",
    "torch.utils.tensorboard",
)
"""Modules of a rank that trains; torch imports `_dynamo` with the first optimizer, in half of the first one's time, and
bokeh, which draws rank 0's report, takes a second."""
TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""Module of a rank that reads a tokenizer's folder."""
_STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Ran:
    """What ranks took.

    Attributes:
        seconds: From the start of the first to the end of the last.
        cpu_s: Processor time of all of them.
        peak_bytes: Most memory that they and their own processes held together; a page that several share counts once.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int


class RankError(RuntimeError):
    """A rank failed, or did not end in time.

    Attributes:
        rank: Which one spoke first.
        is_mistake: It was a UserError: the message is for the user as it stands.
        at: What a UserError says of the phase; "".
        frames: (file's name, function) of the rank's stack, outermost first.
    """

    def __init__(
        self, message: str, *, rank: int, is_mistake: bool, at: str = "", frames: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.rank, self.is_mistake, self.at, self.frames = rank, is_mistake, at, tuple(frames)


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    size: int,
    logs: Path,
    time_limit_s: float,
    preload: Sequence[str] = (),
) -> Ran:
    """Calls a function on every rank of a job of its own and waits for all of them.

    Args:
        function: Of a module; it finds torchrun's variables in its environment.
        arguments: For it, the same on each rank.
        size: Ranks.
        logs: Folder, to be made; rank 3 prints into `rank3.log` there.
        time_limit_s: Ranks that take longer are ended.
        preload: Modules that the server imports; the first call of this process decides.

    Raises:
        RankError: The first failure; or no end in time, with where each rank was.
    """
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    context = forks(preload)
    port = free_port()
    secret = secrets.token_hex()
    ranks: list[ForkServerProcess] = []
    pipes: dict[Connection, int] = {}
    with _Memory(ranks) as memory:
        try:
            for rank in range(size):
                mine, theirs = context.Pipe(duplex=False)
                place = (rank, size, port, secret)
                process = context.Process(
                    target=_rank, args=(function, tuple(arguments), place, logs / f"rank{rank}.log", theirs)
                )
                process.start()
                theirs.close()
                ranks.append(process)
                pipes[mine] = rank
            cpu_s = _collect(pipes, ranks, logs, started + time_limit_s)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
    return Ran(time.monotonic() - started, cpu_s, memory.peak)


def forks(preload: Sequence[str]) -> ForkServerContext:
    """What starts processes without a GPU from this process's server, which has imported `preload`.

    Args:
        preload: Modules; the first call of this process decides.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    found_in = os.pathsep.join(path for path in sys.path if path)  # older servers do not ask for sys.path
    with launch.changed_variables(
        OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=found_in, PYTHONWARNINGS="ignore"
    ):
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """A port of this host that nothing listens on, and that the system gives to no connection until it is used."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _collect(pipes: dict[Connection, int], ranks: list[ForkServerProcess], logs: Path, deadline: float) -> float:
    """Processor time of all ranks, once each has answered."""
    waiting, cpu_s = dict(pipes), 0.0
    failures: list[RankError] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                raise _out_of_time(waiting, ranks, logs)
            break
        for pipe in (pipe for pipe in list(waiting) if pipe in ready):
            rank = waiting.pop(pipe)
            try:
                told = pipe.recv()
                answer = RankError(**told) if isinstance(told, dict) else float(told)
            except EOFError:
                ranks[rank].join(STACKS_S)
                answer = _death(rank, ranks[rank].exitcode, logs / f"rank{rank}.log")
            if isinstance(answer, RankError):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            else:
                cpu_s += answer
    if failures:  # ranks that lost a neighbour fail too: a user's mistake explains more than a broken connection
        raise next((failure for failure in failures if failure.is_mistake), failures[0])
    return cpu_s


def _death(rank: int, status: int | None, log: Path) -> RankError:
    words = [line for line in _text(log).splitlines() if line.strip()][-LAST_LINES:]
    why = " (often the end of the machine's memory)" if status == -signal.SIGKILL else ""
    said = "\n".join(["; its last words:", *words]) if words else " without a word"
    return RankError(f"rank {rank} died with exit status {status}{why}{said}", rank=rank, is_mistake=False)


def _out_of_time(waiting: dict[Connection, int], ranks: list[ForkServerProcess], logs: Path) -> RankError:
    for rank in waiting.values():
        if (pid := ranks[rank].pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _STACK_SIGNAL)
    time.sleep(STACKS_S)
    stacks = {rank: _stack(logs / f"rank{rank}.log") for rank in waiting.values()}
    where = "; ".join(f"rank {rank} in {_innermost(stack)}" for rank, stack in stacks.items())
    first = min(stacks)
    message = f"it did not end in time: {where}. Their stacks are in '{logs}'."
    return RankError(message, rank=first, is_mistake=False, frames=stacks[first])


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


def _stack(log: Path) -> list[tuple[str, str]]:
    """The main thread's frames that faulthandler wrote last, outermost first."""
    text = _text(log).rpartition("most recent call first)")[2]
    return [(Path(file).name, name) for file, name in re.findall(r'File "(.+)", line \d+ in (\S+)', text)][::-1]


def _innermost(stack: list[tuple[str, str]]) -> str:
    """Of the frames that a reader can place: not those of the libraries that wait."""
    return " < ".join(f"{name} ({file})" for file, name in stack[:-4:-1]) or "an unknown place"


class _Memory:
    """Looks at what ranks and their own processes hold, in a thread, inside a `with` block."""

    def __init__(self, ranks: Sequence[ForkServerProcess]) -> None:
        self.peak = 0
        self._ranks = ranks
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = SAMPLE_S
        while not self._end.wait(pause_s):
            began = time.thread_time()
            self.peak = max(self.peak, sum(_held(rank.pid) for rank in tuple(self._ranks)))
            pause_s = max(SAMPLE_S, (time.thread_time() - began) / LOOK_FRAC)


def _held(pid: int | None) -> int:
    """What a process and those that it started hold, with its part of what they share with others."""
    held = 0
    with contextlib.suppress(psutil.Error):
        rank = psutil.Process(pid)
        for each in (rank, *rank.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                full = each.memory_full_info()
                held += getattr(full, "pss", full.uss)
    return held


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    place: tuple[int, int, int, str],
    log: Path,
    pipe: Connection,
) -> None:
    """A rank's whole life."""
    rank = place[0]
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(_STACK_SIGNAL, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    launch.become_rank(*place)
    gc.freeze()  # a checkpoint collects garbage: what the server imported is none
    try:
        function(*arguments)
        answer: Any = sum(os.times()[:4])
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the one who asked must know
        traceback.print_exc()
        is_mistake = isinstance(error, UserError)
        answer = {
            "message": str(error) if is_mistake else f"rank {rank}: {type(error).__name__}: {error}",
            "rank": rank,
            "is_mistake": is_mistake,
            "at": getattr(error, "at", ""),
            "frames": [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(error.__traceback__)],
        }
    with contextlib.suppress(OSError):
        pipe.send(answer)
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
