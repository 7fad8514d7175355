"""Starts and stops this process as a rank of the job; the one reader of os.environ.

Owns the device of the rank, its threads and the default process group. What the launchers' variables mean is in
`launcher_env.py`, where ranks without torchrun meet in `rendezvous.py`, the process groups of the parallel layout in
`groups.py`. `environment` needs no torch, so that a mistake is told before torch is imported.
"""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mrl.distributed import job_secret
from mrl.distributed.job_secret import TOKEN
from mrl.distributed.launcher_env import TORCHRUN, Environment, device_index, read
from mrl.errors import ClusterError, UserError

OWN_DEVICE = "MRL_OWN_DEVICE"
"""Set by `see_own_device_only`: the one CUDA device that this process sees is its own."""

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


INTERFACE = "GLOO_SOCKET_IFNAME"
"""gloo reads it whenever it makes a group."""

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""By which NCCL's ranks find each other; left to NCCL where there are several hosts."""

_set_by_start: list[str] = []
"""Variables that `stop` takes away: a job on other hosts that this process starts later must not find them."""


_OUTSIDE: list[Environment] = []
"""What the launcher said before `scrubbed_variables` changed the variables; empty outside of it."""


def environment() -> Environment:
    """What the launcher says of this process; no process group is needed.

    Whoever starts MPI comes here first; it runs without its UCC component unless the user said otherwise. TensorRT-LLM
    turns that off too, but at its import, when MPI_Init has read the setting.

    Raises:
        UserError: The launchers' variables are incomplete or contradict each other.
    """
    if _OUTSIDE:
        return _OUTSIDE[0]
    found = read(os.environ)
    if found.launcher in ("mpirun", "mpi", "srun"):
        os.environ.setdefault("OMPI_MCA_coll_ucc_enable", "0")
    return _of_mpi(found) if found.launcher == "mpi" else found


def choose_device(wanted: str) -> str:
    """The device kind that `run.device` asks for: cpu or cuda.

    Raises:
        UserError: CUDA was asked for and there is none, or the CPU where Megatron would find CUDA devices.
    """
    import torch

    if wanted == "cpu" and torch.cuda.is_available():
        raise UserError("run.device=cpu on a machine with CUDA: hide its devices too, by CUDA_VISIBLE_DEVICES=''.")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device=cuda, but torch sees no CUDA device. Use run.device=auto or cpu.")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def meet(timeout_s: float) -> TCPStore:
    """Collective over the job: the store where its ranks find each other, before there is a process group.

    Returns at once on each rank that reaches it, whoever else is there.

    Args:
        timeout_s: Wait for the store, s.

    Raises:
        UserError: Rank 0 has no address that other hosts could reach, its port is taken, or MPI is not usable.
        ClusterError: Rank 0 cannot be reached.
    """
    from mrl.distributed import rendezvous

    env = environment()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own word to its ranks
    over_mpi = env.launcher in ("mpirun", "mpi")
    store, secret = rendezvous.meet(env, timeout_s, served=served, token=job_token(make=over_mpi and env.rank == 0))
    if over_mpi:
        os.environ[TOKEN] = secret
    return store


def job_token(*, make: bool = False) -> str:
    """The token of this process's job; "" where its launcher gave it none.

    Args:
        make: This process may choose one, where it has none: it is the first of the job.
    """
    if make and not os.environ.get(TOKEN):
        os.environ[TOKEN] = secrets.token_hex()
    return os.environ.get(TOKEN, "")


def private(store: Store) -> PrefixStore:
    """The part of a store in which only processes of this job know the names."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(job_secret.name(job_token(), "ranks"), store)


def share_no_store() -> None:
    """Ranks of torchrun serve a store of their own from here on, a new one after each restart."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def is_restart() -> bool:
    """Whether torchrun has started these ranks again after a failure (--max-restarts)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def cache_folder() -> Path | None:
    """Where this user's programs keep what they can make again; it need not be there yet. None: there is no home."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return found / "mrl" if found.is_absolute() else None


def variables(*names: str) -> dict[str, str]:
    """Those of the variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def variables_without_launcher() -> dict[str, str]:
    """All variables but those that a launcher left, for a program that is to be started as if by hand."""
    left = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
    kept = ("SLURM_CONF", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    mine = (*TORCHRUN, "HYDI_CONTROL_FD")
    return {
        name: value for name, value in os.environ.items() if name in kept or not (name in mine or name.startswith(left))
    }


def give_variables(given: Mapping[str, str], *, unless_set: Mapping[str, str]) -> None:
    """Sets variables of a library for as long as the process lives; the user's own go before `unless_set`."""
    os.environ.update({**unless_set, **variables(*unless_set), **given})


@contextmanager
def scrubbed_variables(*, hide: Sequence[str], given: Mapping[str, str]) -> Iterator[None]:
    """Inside, variables that begin with one of `hide` are not set, and those of `given` are.

    Afterwards all is as before; what the code inside sets itself is undone too. `environment` is that of before.
    """
    before = dict(os.environ)
    _OUTSIDE.insert(0, environment())
    for name in [name for name in before if name.startswith(tuple(hide))]:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        _OUTSIDE.pop(0)


def see_own_device_only() -> None:
    """Hides the other ranks' CUDA devices from this process, for libraries that would choose one themselves.

    It must come before anything asks torch for CUDA devices. Ranks that MPI or srun started are left alone: there the
    libraries know the rank.
    """
    env = environment()
    if env.launcher != "torchrun" or env.local_world_size == 1:
        return
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(seen) != 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[env.local_rank] if len(seen) > env.local_rank else str(env.local_rank)
    os.environ[OWN_DEVICE] = "1"


def start(
    device: str = "auto", *, num_threads: int = 0, timeout_s: float = 600.0, store: Store | None = None
) -> torch.device:
    """Collective over the job: makes this process a rank with a device, threads and the default process group.

    Args:
        device: `run.device`.
        num_threads: CPU threads of this rank; 0: the host's cores divided by its ranks.
        timeout_s: A collective that waits longer fails, s.
        store: A part of what `meet` gave; None: met here.

    Returns:
        The device of this rank.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from mrl.distributed import gloo_device, rendezvous, safe_pickle

    env = environment()
    kind = choose_device(device)
    own = torch.device("cpu")
    torch.set_num_threads(num_threads or env.num_cpus or max(1, len(os.sched_getaffinity(0)) // env.local_world_size))
    if kind == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps TP collectives in launch order
        index = 0 if OWN_DEVICE in os.environ else device_index(env, torch.cuda.device_count())
        own = torch.device(kind, index)
        torch.cuda.set_device(own)
    chosen = os.environ.get(INTERFACE, "")
    if (name := rendezvous.choose_interface(env, chosen)) != chosen:
        _set_until_stop(INTERFACE, name)
    if kind == "cuda" and env.local_world_size == env.world_size and NCCL_INTERFACE not in os.environ:
        _set_until_stop(NCCL_INTERFACE, name)
    choose_attention()
    safe_pickle.install()
    gloo_device.share_device(name)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if env.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        store = store or private(meet(timeout_s))
        allow_sockets()
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
        _exchange(own, env.world_size)
    return own


def choose_attention() -> None:
    """Keeps torch's attention, also that of other libraries in this process, away from cuDNN.

    cuDNN builds a plan for each new shape, up to half a second each way, and packed batches have new shapes in every
    step. torch prefers it on compute capability 9.0 from 2.11 on. TransformerEngine's attention is not affected.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def allow_sockets() -> None:
    """As many open files as the host allows: groups have a connection to each of their ranks, and so have stores."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _exchange(device: torch.device, world_size: int) -> None:
    """Collective over the job: a first sum on the device.

    NCCL makes a group's communicator at its first use, for which it waits for all ranks: a first message between two of
    them would wait for ever. And a network that does not carry it is found here.

    Raises:
        ClusterError: The sum is wrong.
    """
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if (found := ones.item()) != world_size:
        kind = "NCCL" if device.type == "cuda" else "gloo"
        raise ClusterError(f"{kind} adds {world_size} ones up to {found:g}. Try `mrl doctor` on the same hosts.")


def device_is_busy() -> bool:
    """Whether the GPU of this rank has work left that the main thread may wait for."""
    import torch

    return not torch.cuda.default_stream().query()


def _set_until_stop(name: str, value: str) -> None:
    os.environ[name] = value
    _set_by_start.append(name)


def stop(*, in_order: bool = True) -> None:
    """Collective over the job: leaves the process group. Ranks that exit without it sometimes die with SIGABRT.

    Args:
        in_order: Wait for the others first; False after an error, when they may never come.
    """
    import torch.distributed as dist

    from mrl.distributed import mpi

    if dist.is_initialized():
        if in_order:
            dist.barrier()
        dist.destroy_process_group()
    for name in _set_by_start:
        os.environ.pop(name, None)
    _set_by_start.clear()
    if in_order:
        mpi.end()


def become(variables: Mapping[str, str], words: Sequence[str]) -> NoReturn:
    """This process goes on as another program, with `variables` added to its own.

    Raises:
        UserError: There is no such program.
    """
    try:
        os.execvpe(words[0], list(words), {**os.environ, **variables})
    except OSError as error:
        raise UserError(f"cannot run {words[0]}: {error.strerror}. Is it installed, and on the PATH?") from error


def become_rank(rank: int, size: int, port: int, secret: str) -> None:
    """This process is a rank on this host's CPUs from here on, as torchrun would have started it.

    Args:
        rank: 0 .. size-1.
        size: Ranks of the job, all on this host.
        port: Where they meet.
        secret: The job's token.
    """
    for name in [name for name in os.environ if name.startswith(("SLURM_STEP_", "GROUP_", "TORCHELASTIC_"))]:
        del os.environ[name]  # of the job that this one runs inside of
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()}, MASTER_ADDR="127.0.0.1", **{TOKEN: secret})


@contextmanager
def changed_variables(**values: str) -> Iterator[None]:
    """Inside, processes that are started find these variables; afterwards they are what they were."""
    before = variables(*values)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def device_name(device: torch.device) -> str:
    """Such as "cpu" or "NVIDIA H100 80GB HBM3"."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _of_mpi(found: Environment) -> Environment:
    from mrl.distributed import mpi

    return mpi.complete(found)
