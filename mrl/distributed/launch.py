"""Initializes and shuts down this process as one rank of the job; the only file that reads os.environ.

`init_distributed` selects the rank's device, sets its CPU threads and creates torch's default process group.
`launcher_env.py` interprets the launchers' variables, `rendezvous.py` connects ranks that torchrun did not start, and
`groups.py` has the process groups of the parallel layout. `get_launcher_env` does not import torch, so that a mistake
in the launcher's variables is reported at once.
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
from mrl.distributed.job_secret import TOKEN_VARIABLE
from mrl.distributed.launcher_env import TORCHRUN, LauncherEnv, device_index, read_launcher_env
from mrl.errors import ClusterError, UserError

OWN_DEVICE = "MRL_OWN_DEVICE"
"""Set by `hide_other_devices`: this process sees exactly one CUDA device, its own."""

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore


INTERFACE = "GLOO_SOCKET_IFNAME"
"""Network interface of gloo, which reads the variable each time it creates a group."""

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Network interface of NCCL's bootstrap; set here for jobs on one host only, otherwise NCCL chooses."""

_unset_by_shutdown: list[str] = []
"""Variables that `shutdown_distributed` removes, so that a later job of this process on other hosts does not inherit
them."""


_SAVED_ENVIRONMENT: list[LauncherEnv] = []
"""Launcher environment from before `scrubbed_env` changed the variables; empty outside of it."""


def get_launcher_env() -> LauncherEnv:
    """Returns rank, world size and the like as the launcher's variables give them; needs no process group.

    Call it before MPI is initialized: it disables OpenMPI's UCC component unless the user has set
    OMPI_MCA_coll_ucc_enable. TensorRT-LLM disables it too, but only at its import, after MPI_Init has read the setting.

    Raises:
        UserError: The launchers' variables are incomplete or contradict each other.
    """
    if _SAVED_ENVIRONMENT:
        return _SAVED_ENVIRONMENT[0]
    found = read_launcher_env(os.environ)
    if found.launcher in ("mpirun", "mpi", "srun"):
        os.environ.setdefault("OMPI_MCA_coll_ucc_enable", "0")
    return _sizes_from_mpi(found) if found.launcher == "mpi" else found


def choose_device(device: str) -> str:
    """Returns the device type, "cpu" or "cuda", for the value `device` of `run.device`.

    Raises:
        UserError: CUDA was requested and there is none, or the CPU was requested where Megatron would find CUDA
            devices.
    """
    import torch

    if device == "cpu" and torch.cuda.is_available():
        raise UserError("run.device=cpu, but torch sees CUDA devices. Hide them with CUDA_VISIBLE_DEVICES=''.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device=cuda, but torch sees no CUDA device. Use run.device=auto or cpu.")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def connect_store(timeout_s: float) -> TCPStore:
    """Collective over all ranks: connects to the store through which the ranks find each other.

    Needs no process group. Each rank returns as soon as it is connected, without waiting for the others.

    Raises:
        UserError: Rank 0 has no address that other hosts could reach, its port is taken, or MPI is not usable.
        ClusterError: Rank 0 cannot be reached.
    """
    from mrl.distributed import rendezvous

    env = get_launcher_env()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # set by torchrun
    over_mpi = env.launcher in ("mpirun", "mpi")
    store, secret = rendezvous.connect_store(
        env, timeout_s, served=served, token=job_token(make=over_mpi and env.rank == 0)
    )
    if over_mpi:
        os.environ[TOKEN_VARIABLE] = secret
    return store


def job_token(*, make: bool = False) -> str:
    """Returns the secret token of this job (`job_secret.py`); "" if the launcher set none.

    Args:
        make: Generate a token if there is none; for the first process of the job.
    """
    if make and not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = secrets.token_hex()
    return os.environ.get(TOKEN_VARIABLE, "")


def job_store(store: Store) -> PrefixStore:
    """Returns a view of `store` whose key prefix only processes of this job can compute."""
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(job_secret.derive_name(job_token(), "ranks"), store)


def serve_own_store() -> None:
    """Makes torchrun's ranks serve a store of their own from here on, a new one after each restart."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


def is_restart() -> bool:
    """Returns whether torchrun restarted these ranks after a failure (--max-restarts)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def cache_folder() -> Path | None:
    """Returns this user's cache folder for mrl, which may not exist yet; None if there is no home directory."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return found / "mrl" if found.is_absolute() else None


def get_env(*names: str) -> dict[str, str]:
    """Returns the given environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def env_without_launcher() -> dict[str, str]:
    """Returns all environment variables but those of a launcher, to start a program as from a plain shell."""
    prefixes = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_")
    removed = (*TORCHRUN, "HYDI_CONTROL_FD")
    kept = ("SLURM_CONF", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or not (name in removed or name.startswith(prefixes))
    }


def set_env(given: Mapping[str, str], *, unless_set: Mapping[str, str]) -> None:
    """Sets environment variables for the rest of this process; the user's own values win over `unless_set` only."""
    os.environ.update({**unless_set, **get_env(*unless_set), **given})


@contextmanager
def scrubbed_env(*, hide: Sequence[str], given: Mapping[str, str]) -> Iterator[None]:
    """Hides environment variables that start with one of `hide` and sets those of `given`, inside a `with` block.

    On exit every variable is restored, also those that the block changed. Meanwhile `get_launcher_env` returns its
    earlier value.
    """
    before = dict(os.environ)
    _SAVED_ENVIRONMENT.insert(0, get_launcher_env())
    for name in [name for name in before if name.startswith(tuple(hide))]:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        _SAVED_ENVIRONMENT.pop(0)


def hide_other_devices() -> None:
    """Hides the other ranks' CUDA devices from this process, for libraries that pick a device themselves.

    Call it before torch first queries CUDA devices. It changes nothing for ranks of MPI or srun: there these libraries
    read the launcher's local rank.
    """
    env = get_launcher_env()
    if env.launcher != "torchrun" or env.local_world_size == 1:
        return
    seen = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if len(seen) != 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[env.local_rank] if len(seen) > env.local_rank else str(env.local_rank)
    os.environ[OWN_DEVICE] = "1"


def init_distributed(
    device: str = "auto", *, num_threads: int = 0, timeout_s: float = 600.0, store: Store | None = None
) -> torch.device:
    """Collective over all ranks: sets this rank's device and CPU threads and creates the default process group.

    Args:
        device: Value of `run.device`: auto, cpu or cuda.
        num_threads: CPU threads of this rank; 0: the host's cores divided by its ranks.
        timeout_s: Timeout of the group's collectives, s.
        store: Store for the group, derived from the one that `connect_store` returned; None: calls `connect_store`.

    Returns:
        The device of this rank.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from mrl.distributed import gloo_device, rendezvous, safe_pickle

    env = get_launcher_env()
    kind = choose_device(device)
    rank_device = torch.device("cpu")
    torch.set_num_threads(num_threads or env.num_cpus or max(1, len(os.sched_getaffinity(0)) // env.local_world_size))
    if kind == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps TP collectives in launch order
        index = 0 if OWN_DEVICE in os.environ else device_index(env, torch.cuda.device_count())
        rank_device = torch.device(kind, index)
        torch.cuda.set_device(rank_device)
    chosen = os.environ.get(INTERFACE, "")
    if (name := rendezvous.choose_interface(env, chosen)) != chosen:
        _set_env_until_shutdown(INTERFACE, name)
    if kind == "cuda" and env.local_world_size == env.world_size and NCCL_INTERFACE not in os.environ:
        _set_env_until_shutdown(NCCL_INTERFACE, name)
    disable_cudnn_attention()
    safe_pickle.install()
    gloo_device.share_device(name)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if env.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        store = store or job_store(connect_store(timeout_s))
        raise_open_file_limit()
        dist.init_process_group(backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
        _check_all_reduce(rank_device, env.world_size)
    return rank_device


def disable_cudnn_attention() -> None:
    """Disables cuDNN attention in torch's scaled_dot_product_attention, for other libraries in this process too.

    cuDNN builds a plan for each new shape, which takes up to 0.5 s each for forward and backward, and packed batches
    have new shapes in every step. From 2.11 on torch prefers it on compute capability 9.0. TransformerEngine's
    attention is not affected.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def raise_open_file_limit() -> None:
    """Raises the limit of open files to the host's maximum: groups and stores open one connection per rank."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_all_reduce(device: torch.device, world_size: int) -> None:
    """Collective over all ranks: runs a first all-reduce on the device and checks the sum.

    NCCL creates a group's communicator at its first use, which waits for all ranks: a point-to-point message as the
    first operation would hang. It also detects a broken network early.
    """
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, device=device)
    dist.all_reduce(ones)
    if (found := ones.item()) != world_size:
        kind = "NCCL" if device.type == "cuda" else "gloo"
        raise ClusterError(
            f"the first {kind} all-reduce summed {world_size} ones to {found:g}. Run `mrl doctor` on the same hosts."
        )


def device_is_busy() -> bool:
    """Returns whether the default stream of this rank's GPU has unfinished work."""
    import torch

    return not torch.cuda.default_stream().query()


def _set_env_until_shutdown(name: str, value: str) -> None:
    os.environ[name] = value
    _unset_by_shutdown.append(name)


def shutdown_distributed(*, in_order: bool = True) -> None:
    """Collective over all ranks: destroys the process group. Ranks that exit without it sometimes die with SIGABRT.

    Args:
        in_order: Wait for the other ranks first; False after an error, when they may never arrive.
    """
    import torch.distributed as dist

    from mrl.distributed import mpi

    if dist.is_initialized():
        if in_order:
            dist.barrier()
        dist.destroy_process_group()
    for name in _unset_by_shutdown:
        os.environ.pop(name, None)
    _unset_by_shutdown.clear()
    if in_order:
        mpi.finalize()


def exec_program(variables: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """Replaces this process by another program (execvpe), with `get_env` added to the environment.

    Raises:
        UserError: The program cannot be run.
    """
    try:
        os.execvpe(argv[0], list(argv), {**os.environ, **variables})
    except OSError as error:
        raise UserError(
            f"cannot run {argv[0]}: {error.strerror}. Check that it is installed and on the PATH."
        ) from error


def set_rank_env(rank: int, size: int, port: int, secret: str) -> None:
    """Sets the environment of this process as torchrun would for one CPU rank of a job on this host.

    Args:
        rank: Rank, 0 .. size-1.
        size: Number of ranks of the job, all on this host.
        port: Port of the job's store on 127.0.0.1.
        secret: Token of the job.
    """
    for name in [name for name in os.environ if name.startswith(("SLURM_STEP_", "GROUP_", "TORCHELASTIC_"))]:
        del os.environ[name]  # set by an enclosing job
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    texts = {name: str(number) for name, number in numbers.items()}
    os.environ.update(texts, MASTER_ADDR="127.0.0.1", **{TOKEN_VARIABLE: secret})


@contextmanager
def override_env(**values: str) -> Iterator[None]:
    """Sets environment variables inside a `with` block, for processes started there, and restores them afterwards."""
    before = get_env(*values)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def device_name(device: torch.device) -> str:
    """Returns the device's model name, such as "NVIDIA H100 80GB HBM3"; "cpu" for the CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def _sizes_from_mpi(found: LauncherEnv) -> LauncherEnv:
    from mrl.distributed import mpi

    return mpi.add_mpi_sizes(found)
