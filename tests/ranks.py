"""Real ranks for tests: processes over gloo, forked once per world size and reused by every test.

    from tests.ranks import run_ranks
    results = run_ranks(4, function, *args)     # [function(*args) on rank 0, ..., on rank 3]

`function` is a module-level function (it is imported by name in the ranks); arguments and results are pickled. In it
the default process group exists (`mrl.distributed.launch.start` ran); `torch.distributed.get_rank()` tells the rank.
A failing rank makes `run_ranks` raise RankError with that rank's traceback; the pool is then started anew. Ranks that
give no answer are ended and the call is made once more in new ones: now and then gloo never finishes making a group.
What really hangs, hangs twice.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, arbitrary_address, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from mrl.distributed.local_ranks import TOKENIZERS, TRAINING, forks, free_port

PRELOAD = (*TRAINING, TOKENIZERS, "tests.first_run", "pytest")
"""Of the one server that a test process has: whatever a test forks comes from it."""
START_TIMEOUT_S = 120
CALL_TIMEOUT_S = 240


class RankError(AssertionError):
    pass


class NoAnswerError(RankError):
    pass


class _Pickler(ForkingPickler):
    """Tensors travel as their bytes: torch would give each a shared memory of its own, which takes 20 times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.requires_grad or value.is_sparse or not value.numel():
            return NotImplemented
        return tensor_of, (bytes_of(value), value.dtype, tuple(value.shape))


def bytes_of(tensor: torch.Tensor) -> bytes:
    own = tensor.detach().clone(memory_format=torch.contiguous_format)  # what numpy has seen is never resized again
    return own.view(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape)).clone()  # which can be resized, too


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _worker(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    from mrl.distributed import launch

    launch.start("cpu", num_threads=1, timeout_s=2 * CALL_TIMEOUT_S)
    gc.freeze()  # Megatron collects garbage again and again: what was imported is none
    gc.get_freeze_count = lambda: 1  # a run asks for it, and it counts by walking through all of them
    pipe.send(("ok", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)  # the test process is gone
        if task is None:
            break
        function, args, kwargs = task
        try:
            pipe.send_bytes(_pickled(("ok", function(*args, **kwargs))))
        except BaseException:  # noqa: BLE001 -- whatever it is, the test must see it
            pipe.send(("error", traceback.format_exc()))
    launch.stop()


class _Pool:
    def __init__(self, size: int) -> None:
        context = forks(PRELOAD)
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(rank, size, port, theirs), daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._collect(START_TIMEOUT_S)

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> list[Any]:
        task = _pickled((function, args, kwargs))
        for pipe in self.pipes:
            pipe.send_bytes(task)
        return self._collect(CALL_TIMEOUT_S)

    def _collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = wait(list(waiting), timeout)
            if not ready:
                self.kill()
                raise NoAnswerError(f"ranks {sorted(waiting.values())} gave no answer in {timeout} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    status, value = pipe.recv()
                except EOFError:
                    status, value = "error", "the process died"
                if status == "error":
                    self.kill()
                    raise RankError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        if _POOLS.get(len(self.processes)) is self:
            del _POOLS[len(self.processes)]


_POOLS: dict[int, _Pool] = {}


def run_ranks(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """The results of `function(*args, **kwargs)` on each of `size` ranks."""
    try:
        return _pool(size).call(function, args, kwargs)
    except NoAnswerError as error:
        warnings.warn(f"{error}; calling {function.__name__} again in new ranks", stacklevel=2)
        return _pool(size).call(function, args, kwargs)


def _pool(size: int) -> _Pool:
    if size not in _POOLS:
        _POOLS[size] = _Pool(size)
    return _POOLS[size]


class _Server(forkserver.ForkServer):
    """Forked from the one that this process has, and so spared what that has imported."""

    def __init__(self, preload: Sequence[str]) -> None:
        super().__init__()
        context = forks(PRELOAD)
        reader, writer = context.Pipe(duplex=False)  # it ends when nobody holds the other end
        with socket.socket(socket.AF_UNIX) as listener:
            address = arbitrary_address("AF_UNIX")
            listener.bind(address)
            listener.listen()
            self.process = context.Process(target=_serve, args=(listener, reader, preload), daemon=True)
            self.process.start()
        reader.close()
        self._forkserver_address, self._forkserver_pid = address, self.process.pid
        self._forkserver_alive_fd = os.dup(writer.fileno())
        writer.close()

    def ensure_running(self) -> None:
        assert self.process.is_alive(), "the server of forks has ended"


def _serve(listener: socket.socket, alive: Connection, preload: Sequence[str]) -> None:
    forkserver.main(listener.detach(), os.dup(alive.fileno()), list(preload))


_SERVERS: dict[tuple[str, ...], _Server] = {}


@contextlib.contextmanager
def server(*modules: str) -> Iterator[None]:
    """Inside the block all is forked from another server, which has imported these modules, too; its ranks end there.

    The server stays for the next block that asks for the same.
    """
    close_pools()
    found = _SERVERS.get(modules) or _SERVERS.setdefault(modules, _Server(modules))
    names = ("set_forkserver_preload", "ensure_running", "connect_to_new_process")
    usual = {name: getattr(forkserver, name) for name in names}
    for name in names:
        setattr(forkserver, name, getattr(found, name))
    try:
        yield
    finally:
        close_pools()
        for name, function in usual.items():
            setattr(forkserver, name, function)


def pids() -> set[int]:
    """Of the ranks and the further servers that are up."""
    processes = [process for pool in _POOLS.values() for process in pool.processes]
    return {process.pid for process in (*processes, *(each.process for each in _SERVERS.values()))}


@atexit.register
def close_pools() -> None:
    """Ends all ranks; the next call starts new ones."""
    for pool in list(_POOLS.values()):
        pool.close()
