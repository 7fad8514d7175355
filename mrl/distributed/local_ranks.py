"""Runs a function on the CPU ranks of a temporary job on this host (`run_ranks`).

The ranks are forked from a server that has already imported their modules, so that eight start in the time and memory
of one. Each has torchrun's variables and its own log. A failing rank ends the others, and no rank outlives the calling
process.
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

from mrl.config.config import RolloutConfig
from mrl.distributed import launch
from mrl.errors import UserError

OTHERS_S = 3.0
"""Time for the other ranks to report their errors after a first failure, s."""
STACKS_S = 1.0
"""Time for ranks to write their stacks after a timeout, s."""
MEMORY_INTERVAL_S = 0.5
"""Shortest interval between memory measurements, s; longer if a measurement is slow, as the kernel walks all pages."""
MEMORY_CPU_FRAC = 0.05
"""Largest share of a core for the memory measurements."""
LAST_LINES = 3
"""Number of log lines shown for a rank that died without reporting an error."""
PORTS = range(20_000, 32_000)
"""Candidate ports, outside of the range that Linux gives to outgoing connections, so that a free one stays free."""
TRAINING = (
    "mrl.train",
    f"mrl.engines.{RolloutConfig.name}.engine",
    "torch._dynamo",
    "mrl.observability.report",
    "torch.utils.tensorboard",
)
"""Modules to preload for training ranks. torch imports `_dynamo` with the first optimizer, which takes half of its
first step, and bokeh, for rank 0's report, takes a second."""
TOKENIZERS = "transformers.models.auto.tokenization_auto"
"""Module to preload for ranks that read a tokenizer."""
_STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class RankUsage:
    """Time and memory that a job's ranks used.

    Attributes:
        seconds: Time from the start of the first rank to the end of the last, s.
        cpu_s: CPU time of all ranks, s.
        peak_bytes: Peak memory of the ranks and their child processes, bytes; a shared page counts once.
    """

    seconds: float
    cpu_s: float
    peak_bytes: int


class RankError(RuntimeError):
    """A rank failed or the job timed out.

    Attributes:
        rank: Rank that reported first.
        is_user_error: The rank raised a UserError, whose message is meant for the user.
        at: Phase that the UserError names; "": none.
        frames: (file name, function) of the rank's stack, outermost first.
    """

    def __init__(
        self, message: str, *, rank: int, is_mistake: bool, at: str = "", frames: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.rank, self.is_user_error, self.at, self.frames = rank, is_mistake, at, tuple(frames)


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    size: int,
    logs: Path,
    time_limit_s: float,
    preload: Sequence[str] = (),
) -> RankUsage:
    """Runs a function on every rank of a temporary job and waits for all of them.

    Args:
        function: Importable function; torchrun's variables are in its environment.
        arguments: Positional arguments, the same for each rank.
        size: Number of ranks.
        logs: Folder to create; rank 3 prints to `rank3.log` there.
        time_limit_s: Ranks are killed after this time, s.
        preload: Modules that the server imports; only the first call in this process has an effect.

    Returns:
        Time and memory used.

    Raises:
        RankError: The first failure, or a timeout with the position of each rank.
    """
    logs.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    context = fork_server_context(preload)
    port = free_port()
    secret = secrets.token_hex()
    ranks: list[ForkServerProcess] = []
    pipes: dict[Connection, int] = {}
    with _Memory(ranks) as memory:
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                identity = (rank, size, port, secret)
                process = context.Process(
                    target=_rank, args=(function, tuple(arguments), identity, logs / f"rank{rank}.log", sender)
                )
                process.start()
                sender.close()
                ranks.append(process)
                pipes[receiver] = rank
            cpu_s = _collect(pipes, ranks, logs, started + time_limit_s)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
    return RankUsage(time.monotonic() - started, cpu_s, memory.peak)


def fork_server_context(preload: Sequence[str]) -> ForkServerContext:
    """Returns a multiprocessing context that forks CPU-only processes from a server with `preload` imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    search_path = os.pathsep.join(path for path in sys.path if path)  # older Pythons' servers do not inherit sys.path
    with launch.override_env(
        OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=search_path, PYTHONWARNINGS="ignore"
    ):
        forkserver.ensure_running()
    return context


def free_port() -> int:
    """Returns a free port of this host that the system does not assign to outgoing connections."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _collect(pipes: dict[Connection, int], ranks: list[ForkServerProcess], logs: Path, deadline: float) -> float:
    """Waits for all ranks and returns their total CPU time, s."""
    waiting, cpu_s = dict(pipes), 0.0
    failures: list[RankError] = []
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                raise _timeout_error(waiting, ranks, logs)
            break
        for pipe in (pipe for pipe in list(waiting) if pipe in ready):
            rank = waiting.pop(pipe)
            try:
                message = pipe.recv()
                answer = RankError(**message) if isinstance(message, dict) else float(message)
            except EOFError:
                ranks[rank].join(STACKS_S)
                answer = _exit_error(rank, ranks[rank].exitcode, logs / f"rank{rank}.log")
            if isinstance(answer, RankError):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + OTHERS_S)
            else:
                cpu_s += answer
    if failures:  # ranks that lose a connection fail too; a UserError explains more than a broken connection
        raise next((failure for failure in failures if failure.is_user_error), failures[0])
    return cpu_s


def _exit_error(rank: int, status: int | None, log: Path) -> RankError:
    lines = [line for line in _text(log).splitlines() if line.strip()][-LAST_LINES:]
    why = " (often because the host ran out of memory)" if status == -signal.SIGKILL else ""
    output = "\n".join(["; its last output:", *lines]) if lines else " without any output"
    return RankError(f"rank {rank} died with exit status {status}{why}{output}", rank=rank, is_mistake=False)


def _timeout_error(waiting: dict[Connection, int], ranks: list[ForkServerProcess], logs: Path) -> RankError:
    for rank in waiting.values():
        if (pid := ranks[rank].pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _STACK_SIGNAL)
    time.sleep(STACKS_S)
    stacks = {rank: _stack(logs / f"rank{rank}.log") for rank in waiting.values()}
    where = "; ".join(f"rank {rank} in {_innermost(stack)}" for rank, stack in stacks.items())
    first = min(stacks)
    message = f"the ranks did not end in time: {where}. Their stacks are in '{logs}'."
    return RankError(message, rank=first, is_mistake=False, frames=stacks[first])


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


def _stack(log: Path) -> list[tuple[str, str]]:
    """Returns the main thread's frames that faulthandler wrote last, outermost first."""
    text = _text(log).rpartition("most recent call first)")[2]
    return [(Path(file).name, name) for file, name in re.findall(r'File "(.+)", line \d+ in (\S+)', text)][::-1]


def _innermost(stack: list[tuple[str, str]]) -> str:
    return " < ".join(f"{name} ({file})" for file, name in stack[:-4:-1]) or "an unknown place"


class _Memory:
    """Context manager whose thread measures the peak memory of ranks and their child processes."""

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
        pause_s = MEMORY_INTERVAL_S
        while not self._end.wait(pause_s):
            began = time.thread_time()
            self.peak = max(self.peak, sum(_memory_of(rank.pid) for rank in tuple(self._ranks)))
            pause_s = max(MEMORY_INTERVAL_S, (time.thread_time() - began) / MEMORY_CPU_FRAC)


def _memory_of(pid: int | None) -> int:
    """Returns the memory of a process and its children in bytes, a shared page divided among its users (PSS)."""
    total = 0
    with contextlib.suppress(psutil.Error):
        rank = psutil.Process(pid)
        for each in (rank, *rank.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                full = each.memory_full_info()
                total += getattr(full, "pss", full.uss)
    return total


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    identity: tuple[int, int, int, str],
    log: Path,
    pipe: Connection,
) -> None:
    rank = identity[0]
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(_STACK_SIGNAL, all_threads=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    launch.set_rank_env(*identity)
    gc.freeze()  # keeps later garbage collections from scanning the imported modules
    try:
        function(*arguments)
        answer: Any = sum(os.times()[:4])
    except BaseException as error:  # noqa: BLE001 -- any failure must reach the calling process
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
