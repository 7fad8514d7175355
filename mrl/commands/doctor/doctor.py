"""`mrl doctor`: runs the checks of this folder on this machine, or on all hosts of a job.

Without a launcher it checks this machine. Under a launcher each host checks itself, then the ranks check the network
between them; rank 0 prints. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from mrl.commands.doctor import (
    clocks,
    collectives,
    devices,
    folder,
    host,
    launchers,
    network,
    ranks,
    run_files,
    versions,
)
from mrl.commands.doctor.bounded_gather import (
    GRACE_S,
    BoundedGather,
    Deadline,
    FailedRanksError,
    JobEndedError,
    MissingRanksError,
    ranks_not_entered,
    reconnect,
)
from mrl.commands.doctor.finding import Finding, findings_of, ok, problem
from mrl.commands.doctor.table import as_json, as_lines, as_table, merge_hosts, status_of
from mrl.config.config import Config, RunConfig, load, to_yaml
from mrl.distributed import launch
from mrl.distributed.launcher_env import LauncherEnv
from mrl.errors import UserError

Check = Callable[[], Iterable[Finding]]

HOST_TIMES = 4
"""Time limit of all checks of a host together, as a multiple of the limit of one check."""
LEAVING_S = 1.0
"""Delay before the exit of rank 0 after a failure: it serves the store, from which the others read the outcome."""
STAGE_ADVICE = {
    "meeting": "is the job's port open between the hosts, and does every host start its ranks?",
    "process group": "ranks reach rank 0 but not each other: firewall, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
}
"""Stage -> advice if ranks do not finish it."""
DEFAULT_ADVICE = "check the logs of those hosts, `py-spy dump`, memory, and disks that do not answer"


class Doctor:
    """One diagnosis; `run` returns the exit status."""

    def __init__(self, config: str | None, overrides: Sequence[str], *, json: bool, timeout_s: float) -> None:
        """Stores the options.

        Args:
            config: Config file; None: check only the machine.
            overrides: Overrides of the config.
            json: True to print JSON.
            timeout_s: Time limit for a missing rank and for a stage, s.
        """
        self._file, self._overrides, self._json, self._timeout_s = config, overrides, json, timeout_s
        self._config: Config | None = None
        self._environment = LauncherEnv()
        self._deadline: Deadline
        self._store: Any = None
        self._found: list[Finding] = []
        self._own: list[Finding] = []
        self._checking = ""
        self._announces = False
        self._hosts: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def run(self) -> int:
        """Collective over the job: runs all checks and prints the findings on rank 0."""
        self._deadline = Deadline(self._timeout_s + GRACE_S, self._on_timeout, self._announce)
        config_problems = []
        with self._deadline.stage("launcher"):
            try:
                self._environment = launch.get_launcher_env()
            except UserError as error:
                config_problems.append(problem("launcher", str(error), ""))
        self._announces = self._environment.rank == 0
        try:
            self._config = None if self._file is None else load(self._file, self._overrides)
        except UserError as error:
            config_problems.append(problem("config", str(error), ""))
        if self._environment.world_size > 1:
            return self._check_all_ranks(config_problems)
        self._found += config_problems
        self._found += self._check_this_host()
        return self._print()

    def _announce(self, stage: str) -> None:
        """Writes a line to stderr on rank 0 when a stage starts, since a stage may last until its time limit."""
        if self._announces:
            sys.stderr.write(f"mrl: doctor: {stage}\n")
            sys.stderr.flush()

    def _check_all_ranks(self, config_problems: list[Finding]) -> int:
        env = self._environment
        try:
            with self._deadline.stage("meeting"):
                self._store = launch.connect_store(self._timeout_s)
        except (RuntimeError, UserError) as error:
            if env.rank == 0:
                self._found += [*config_problems, problem("meeting", str(error), "")]
                return self._print()
            self._print_alone(str(error))
            return 2
        gather = self._meeting(self._store)
        completed, status = False, 2
        try:
            self._stages(gather, config_problems)
            completed = True
        except MissingRanksError as error:
            self._found.append(self._absent(error.stage, error.ranks))
        except FailedRanksError as error:
            self._found.append(self._failed(error))
        except JobEndedError:
            pass  # rank 0 reports the reason
        if env.rank == 0:
            status = self._print()
        with contextlib.suppress(JobEndedError):
            # waits for rank 0's report: a launcher would kill rank 0 if another rank exited before it
            status = gather.broadcast("end", status)
        if completed:
            with self._deadline.stage("end"):
                launch.shutdown_distributed()
            return status
        if env.rank == 0:
            time.sleep(LEAVING_S)
        sys.stdout.flush()
        os._exit(status)  # other threads may be blocked in a collective

    def _stages(self, gather: BoundedGather, config_problems: list[Finding]) -> None:
        """Collective over the job: runs all checks between ranks; rank 0 keeps the findings."""
        env = self._environment
        try:
            descriptions = gather.stage("meeting", self._description)
        except MissingRanksError as error:
            self._found += [*config_problems, self._absent(error.stage, error.ranks)]
            self._found += self._check_this_host()
            raise JobEndedError from error
        if descriptions is not None:
            self._hosts = ranks.hosts_of_ranks(descriptions)
            self._found.append(self._connected())
            self._add("hosts", partial(ranks.check_hosts, descriptions))
            self._add("same on all", partial(ranks.check_same, descriptions, self._hosts))
        hosts: dict[str, list[int]] = gather.broadcast("hosts", self._hosts)
        leaders = [own[0] for own in hosts.values()]

        own = gather.stage(
            "this host",
            lambda: [
                vars(each) for each in [*config_problems, *(self._check_this_host() if env.rank in leaders else [])]
            ],
            times=HOST_TIMES,
        )
        if own is not None:
            by_host = {
                name: [Finding(**each) for rank in members for each in own[rank]] for name, members in hosts.items()
            }
            self._found += merge_hosts(by_host)

        device = self._device()
        gather.stage("process group", lambda: self._join(device))
        wrong = gather.stage("all-reduce", lambda: collectives.wrong_sums(self._own_device(), env.rank, env.world_size))
        if wrong is not None:
            self._add("all-reduce", partial(collectives.check_sums, wrong))
        self._rates(gather, hosts)
        if len(hosts) > 1:
            self._between_hosts(gather, hosts, leaders)

    def _rates(self, gather: BoundedGather, hosts: Mapping[str, Sequence[int]]) -> None:
        env = self._environment
        seconds = gather.stage("bandwidth", lambda: collectives.time_all_reduces(self._own_device()))
        if seconds is not None:
            sizes, kind = (env.world_size, len(hosts)), self._own_device().type
            self._add("bandwidth", partial(collectives.check_all_reduce_rate, seconds[0], *sizes, kind))
        plan = collectives.schedule_pairs(hosts)
        pairs = gather.stage("pairs", lambda: collectives.pair_rates(plan, env.rank, self._own_device()))
        if pairs is not None:
            rates = {pair: rate for each in pairs for pair, rate in each.items()}
            self._add("bandwidth", partial(collectives.check_pairs, rates, hosts))

    def _between_hosts(self, gather: BoundedGather, hosts: Mapping[str, Sequence[int]], leaders: Sequence[int]) -> None:
        rank = self._environment.rank
        offsets = gather.stage("clocks", lambda: clocks.clock_offset(rank, leaders))
        others = {name: members[0] for name, members in hosts.items() if members[0] != 0}
        if offsets is not None:
            measured = {name: tuple(offsets[leader]) for name, leader in others.items()}
            self._add("clocks", partial(clocks.check_clocks, measured))
        token = gather.broadcast("token", secrets.token_hex(8))
        output, leads = self._output_dir(), rank in leaders

        def look() -> list[float | None]:  # rank 0 looks for the files of the other hosts
            return (
                folder.wait_for_probes(output, token, [str(leader) for leader in others.values()]) if rank == 0 else []
            )

        try:
            gather.stage(
                "shared folder, write", lambda: folder.write_probe(output, token, str(rank)) if leads else None
            )
            here = gather.stage(
                "shared folder, read", lambda: folder.wait_for_probes(output, token, ["0"]) if leads else [None]
            )
            there = gather.stage("shared folder, look", look)
        finally:
            if leads:
                folder.delete_probes(output, token)
        if here is not None and there is not None:
            waited: dict[str, float | None] = {}
            for (name, leader), seen in zip(others.items(), there[0], strict=True):
                both = (here[leader][0], seen)
                waited[name] = None if None in both else max(both)
            self._add("shared folder", partial(folder.check_shared, output, waited))

    def _add(self, topic: str, check: Check) -> None:
        self._found += findings_of(topic, check)

    def _meeting(self, store: Any) -> BoundedGather:
        env = self._environment
        return BoundedGather(_own(store), env.rank, env.world_size, self._timeout_s, self._deadline)

    def _description(self) -> dict[str, Any]:
        env = self._environment
        facts = {**versions.version_facts(), **devices.cuda_versions(), **network.interface_facts(env)}
        if self._config is not None:
            facts["config"] = hashlib.sha256(to_yaml(self._config).encode()).hexdigest()[:12]
        return ranks.describe_rank(env, facts)

    def _join(self, device: str) -> None:
        launch.init_distributed(
            device, timeout_s=self._timeout_s, store=PrefixStore("mrl-doctor-group", launch.job_store(self._store))
        )

    def _device(self) -> str:
        return (self._config.run if self._config is not None else RunConfig()).device

    def _own_device(self) -> Any:
        import torch

        if launch.choose_device(self._device()) == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def _output_dir(self) -> Path:
        return Path(".") if self._config is None else Path(self._config.run.output_dir)

    # Checks of a single host

    def _check_this_host(self) -> list[Finding]:
        """Runs the checks that need no other rank; `_on_timeout` reports those that finished if one hangs."""
        for topic, check in self._checks():
            self._checking = topic
            with self._deadline.stage(topic):
                self._own += findings_of(topic, check)
        self._checking = ""
        return self._own

    def _checks(self) -> Iterator[tuple[str, Check]]:
        env, clean = self._environment, launch.env_without_launcher()
        yield "packages", lambda: versions.check_versions(versions.ranges(), self._needed())
        for extra, (name, module) in versions.OPTIONAL.items():
            if versions.installed(name) is not None and name != "mpi4py":  # `check_mpi` covers mpi4py
                yield name, partial(self._imports, extra, name, module)
        yield "GPUs", self._gpus
        yield "CPU", self._cpu
        yield "host memory", lambda: host.check_memory(host.read_memory(), env.local_world_size)
        yield from self._limits()
        yield from self._network()
        yield "MPI", lambda: launchers.check_mpi(clean, wanted=env.launcher in ("mpirun", "mpi"))
        job = launch.get_env("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES")
        yield "SLURM", lambda: launchers.check_slurm(clean, job, env.launcher)
        if self._config is not None:
            yield from self._files(self._config)
        output = self._output_dir()
        yield (
            "output folder",
            lambda: folder.check_folder(output, self._checkpoint_bytes()),
        )

    def _imports(self, extra: str, name: str, module: str) -> Iterator[Finding]:
        return versions.check_import(name, module, self._timeout_s, needed=extra in self._needed())

    def _needed(self) -> set[str]:
        """Returns the extras of setup.py without which this run would be slow or not start."""
        needed = {"gpu"} if devices.read_gpu_count() else set()
        if self._environment.launcher in ("mpirun", "mpi"):
            needed.add("mpi")
        if self._config is not None and (extra := versions.engine_extra(self._config.rollout.name)) is not None:
            needed.add(extra)
        return needed

    def _gpus(self) -> Iterator[Finding]:
        gpus = devices.read_gpus()
        if gpus:
            yield from devices.check_gpus(gpus, self._environment)
            yield ok("GPUs", ", ".join(f"{name} {value}" for name, value in devices.cuda_versions().items()))
            return
        import torch

        hidden = launch.get_env("CUDA_VISIBLE_DEVICES").get("CUDA_VISIBLE_DEVICES")
        yield from devices.check_hidden_gpus(devices.nvidia_files(), torch.version.cuda, hidden)

    def _cpu(self) -> Iterator[Finding]:
        computes = not devices.read_gpu_count()
        dtype = None if self._config is None else self._config.model.dtype
        env = self._environment
        yield from devices.check_cpu(devices.read_cpu(), env.local_world_size, computes=computes, dtype=dtype)

    def _limits(self) -> Iterator[tuple[str, Check]]:
        env = self._environment
        files, locked = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
        inside = launch.get_env("container")
        yield "open files", lambda: host.check_open_files(files, env.world_size)
        yield "locked memory", lambda: host.check_locked_memory(locked, host.infiniband_adapters())
        yield "/dev/shm", host.check_shared_memory
        yield "container", lambda: host.check_container(host.infiniband_adapters(), host.container_type(inside))

    def _network(self) -> Iterator[tuple[str, Check]]:
        env, name = self._environment, socket.gethostname()
        chosen = launch.get_env("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        yield "network", lambda: network.check_interface(env, network.read_interfaces(), chosen)
        yield "host name", lambda: network.check_name(name, *network.resolve_name(name))
        if env.world_size == 1:  # otherwise the launcher uses the port
            port = launch.get_env("MASTER_PORT").get("MASTER_PORT", str(network.DEFAULT_PORT))
            yield "port", lambda: network.check_port(int(port), network.outgoing_ports())
        sizes = (env.world_size, env.local_world_size)
        yield "ports", lambda: network.check_outgoing(network.outgoing_ports(), *sizes)

    def _files(self, config: Config) -> Iterator[tuple[str, Check]]:
        yield "config", lambda: run_files.check_config(config, str(self._file), self._environment.world_size)
        for topic, path in run_files.models_of(config):
            yield topic, partial(run_files.check_model_files, path, topic)
        yield "data", lambda: run_files.check_data(config)

    def _checkpoint_bytes(self) -> int | None:
        from mrl.trainer.run_plan import load_arch_and_tokenizer

        if self._config is None:
            return None
        try:
            return run_files.checkpoint_bytes(self._config, load_arch_and_tokenizer(self._config)[0])
        except UserError:
            return None  # `check_config` reports it

    # Findings about ranks, and ends of the process

    def _connected(self) -> Finding:
        env = self._environment
        where = f"{self._store.host}:{self._store.port}"
        return ok("launcher", f"{env.launcher}: {env.world_size} ranks on {len(self._hosts)} host(s) met at {where}")

    def _absent(self, stage: str, missing: Sequence[int]) -> Finding:
        at = [
            f"{host} ({ranks.format_ranges(own)})" for host in self._hosts if (own := self._missing_on(host, missing))
        ]
        there = f" of {', '.join(at)}" if at else ""
        came = "did not come" if stage == "meeting" else f"did not finish '{stage}'"
        found = f"rank(s) {ranks.format_ranges(list(missing))}{there} {came} in {self._timeout_s:g} s"
        return problem(stage, found, STAGE_ADVICE.get(stage, DEFAULT_ADVICE))

    def _missing_on(self, name: str, missing: Sequence[int]) -> list[int]:
        return [rank for rank in self._hosts[name] if rank in missing]

    def _failed(self, error: FailedRanksError) -> Finding:
        first = min(error.errors)
        host_of = {rank: name for name, own in self._hosts.items() for rank in own}
        others = f" (and {len(error.errors) - 1} more rank(s))" if len(error.errors) > 1 else ""
        found = f"rank {first} on {host_of.get(first, 'its host')}{others}: {error.errors[first]}"
        return problem(error.stage, found, STAGE_ADVICE.get(error.stage, DEFAULT_ADVICE))

    def _on_timeout(self, stage: str) -> None:
        """Runs in the `Deadline` thread if this rank hangs in a stage: reports it and ends the process."""
        env, hangs = self._environment, f"no end after {self._timeout_s + GRACE_S:g} s"
        try:
            if env.rank == 0:
                self._found.append(self._hung(stage, hangs))
                self._found += self._own if self._checking else []
                status = self._print()
                if self._store is not None:
                    self._meeting(reconnect(self._store)).give_up("this host" if self._checking else stage, status)
                    time.sleep(LEAVING_S)
            elif self._checking:
                self._meeting(reconnect(self._store)).fail("this host", f"'{stage}' has {hangs}")
            elif self._store is not None:
                self._meeting(reconnect(self._store)).broadcast("end", None)
            elif stage == "meeting":
                where = f"{env.address}:{env.port}" if env.address else "an address that MPI provides"
                self._print_alone(f"rank {env.rank} cannot reach rank 0 at {where}: {hangs}; {STAGE_ADVICE[stage]}")
            else:
                self._print_alone(f"'{stage}' has {hangs}")
        except RuntimeError:  # rank 0, which serves the store, has exited
            pass
        finally:
            sys.stdout.flush()
            os._exit(2)

    def _hung(self, stage: str, hangs: str) -> Finding:
        env = self._environment
        if self._store is None or self._checking:
            return problem(stage, hangs, STAGE_ADVICE.get(stage, DEFAULT_ADVICE))
        missing = ranks_not_entered(_own(reconnect(self._store)), stage, env.world_size)
        if missing:
            return self._absent(stage, missing)
        return problem(stage, f"{hangs}, with all ranks in it", STAGE_ADVICE.get(stage, DEFAULT_ADVICE))

    def _print_alone(self, error: str) -> None:
        """Prints the error of a rank that could not connect, once per host, since rank 0 cannot report it."""
        if self._environment.local_rank == 0:
            sys.stderr.write(f"mrl doctor on {socket.gethostname()}: problem: {error}\n")

    def _print(self) -> int:
        with self._lock:
            if self._json:
                text = as_json(self._found, self._hosts)
            elif sys.stdout.isatty():
                text = as_table(self._found, shutil.get_terminal_size().columns)
            else:
                text = as_lines(self._found)
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        return status_of(self._found)


def _own(store: Store) -> Store:
    return PrefixStore("mrl-doctor", launch.job_store(store))
