"""Real ranks for tests: processes over gloo, forked once per world size and reused by every test.

    from tests.ranks import run_ranks
    results = run_ranks(4, function, *args)     # [function(*args) on rank 0, ..., on rank 3]

`function` is a module-level function (it is imported by name in the ranks); arguments and results are pickled. In it
the default process group exists (`launch.init_distributed` ran); `torch.distributed.get_rank()` tells the rank.
A failing rank makes `run_ranks` raise RankError with that rank's traceback; the pool is then started anew. Ranks that
give no answer are ended and the call is made once more in new ones: now and then gloo never finishes making a group.
What really hangs, hangs twice.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, arbitrary_address, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import torch

from mrl.distributed.local_ranks import fork_server_context, free_port
from tests import imports
from tests.imports import PRELOAD

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

    launch.init_distributed("cpu", num_threads=1, timeout_s=2 * CALL_TIMEOUT_S)
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
    launch.shutdown_distributed()


class _Pool:
    def __init__(self, size: int) -> None:
        context = fork_server_context(PRELOAD)
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


class Server(forkserver.ForkServer):
    """Forked from the process of this session that has imported what all tests need, and these modules."""

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self._modules = modules

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()
        if self._forkserver_pid is None:
            address = arbitrary_address("AF_UNIX")
            reader, self._forkserver_alive_fd = os.pipe()  # it ends when nobody holds the other end
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                files = (listener.fileno(), reader)
                self._forkserver_pid = imports.fork("tests.ranks:serve", files, dict(os.environ), modules=self._modules)
            os.close(reader)
            self._forkserver_address = address

    def use(self) -> None:
        """From now on all that this process forks is forked from it."""
        for name in ("set_forkserver_preload", "ensure_running", "connect_to_new_process"):
            setattr(forkserver, name, getattr(self, name))

    def children(self) -> list[psutil.Process]:
        """What was forked from it and runs, with what that has started."""
        return [] if self._forkserver_pid is None else psutil.Process(self._forkserver_pid).children(recursive=True)


def serve(listener: int, alive: int, variables: dict[str, str]) -> None:
    os.environ.update(variables)  # what imports have set stays
    sys.warnoptions.append("ignore")
    gc.enable()
    with contextlib.suppress(SystemExit):
        forkserver.main(listener, alive, [])
    os._exit(0)


SERVER = Server()
"""The usual one of this process."""
_server = functools.cache(Server)


@contextlib.contextmanager
def server(*modules: str) -> Iterator[None]:
    """Inside the block all is forked from another server, which has imported these modules, too; its ranks end there.

    The server stays for the next block that asks for the same.
    """
    close_pools()
    _server(*modules).use()
    try:
        yield
    finally:
        close_pools()
        SERVER.use()


def pids() -> set[int]:
    """Of the ranks that are up."""
    return {process.pid for pool in _POOLS.values() for process in pool.processes}


@atexit.register
def close_pools() -> None:
    """Ends all ranks; the next call starts new ones."""
    for pool in list(_POOLS.values()):
        pool.close()
