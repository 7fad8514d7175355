"""`mrl doctor`: what is wrong here, between the hosts and with a config, before a run finds out.

Owns which checks run where, and in which order; each check is in a file beside this one. Alone, it looks at this
machine. Under a launcher each host looks at itself, then the ranks look at each other; rank 0 prints. Every wait has a
bound.
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
    AbsentError,
    Deadline,
    EndedError,
    FailedError,
    Meeting,
    not_entered,
    reconnect,
)
from mrl.commands.doctor.finding import Finding, findings_of, ok, problem
from mrl.commands.doctor.table import as_json, as_lines, as_table, put_together, status_of
from mrl.config.config import Config, RunConfig, load, to_yaml
from mrl.distributed import launch
from mrl.distributed.launcher_env import Environment
from mrl.errors import UserError

Check = Callable[[], Iterable[Finding]]

HOST_TIMES = 4
"""Checks of a host come one after the other, each with its own time limit; all of them together have this many."""
LEAVING_S = 1.0
"""Rank 0 serves the store: after a failure it lets the others read how it ended."""
WAYS = {
    "meeting": "is the job's port open between the hosts, and does every host start?",
    "process group": "ranks reach rank 0 but not each other: firewall, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
}
"""Stage -> what to do where ranks do not come to its end."""
ELSE = "look at those hosts: their logs, `py-spy dump`, memory, disks that do not answer"


class Doctor:
    """One examination; `run` returns the exit status."""

    def __init__(self, config: str | None, overrides: Sequence[str], *, json: bool, timeout_s: float) -> None:
        """What is asked.

        Args:
            config: File; None: the machine only.
            overrides: Of the config.
            json: Print JSON.
            timeout_s: Wait for a rank, and for one stage, s.
        """
        self._file, self._overrides, self._json, self._timeout_s = config, overrides, json, timeout_s
        self._config: Config | None = None
        self._environment = Environment()
        self._deadline: Deadline
        self._store: Any = None
        self._found: list[Finding] = []
        self._own: list[Finding] = []
        self._checking = ""
        self._announces = False
        self._hosts: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def run(self) -> int:
        """Collective over the job: looks at everything, prints on rank 0."""
        self._deadline = Deadline(self._timeout_s + GRACE_S, self._late, self._announce)
        mistakes = []
        with self._deadline.stage("launcher"):
            try:
                self._environment = launch.environment()
            except UserError as error:
                mistakes.append(problem("launcher", str(error), ""))
        self._announces = self._environment.rank == 0
        try:
            self._config = None if self._file is None else load(self._file, self._overrides)
        except UserError as error:
            mistakes.append(problem("config", str(error), ""))
        if self._environment.world_size > 1:
            return self._of_all(mistakes)
        self._found += mistakes
        self._found += self._of_this_host()
        return self._print()

    def _announce(self, stage: str) -> None:
        """Writes a line to stderr, on the first rank, when a stage starts: some take as long as their time limit."""
        if self._announces:
            sys.stderr.write(f"mrl: doctor: {stage}\n")
            sys.stderr.flush()

    def _of_all(self, mistakes: list[Finding]) -> int:
        env = self._environment
        try:
            with self._deadline.stage("meeting"):
                self._store = launch.meet(self._timeout_s)
        except (RuntimeError, UserError) as error:
            if env.rank == 0:
                self._found += [*mistakes, problem("meeting", str(error), "")]
                return self._print()
            self._say_alone(str(error))
            return 2
        meeting = self._meeting(self._store)
        whole, status = False, 2
        try:
            self._stages(meeting, mistakes)
            whole = True
        except AbsentError as error:
            self._found.append(self._absent(error.stage, error.ranks))
        except FailedError as error:
            self._found.append(self._failed(error))
        except EndedError:
            pass  # rank 0 says why
        if env.rank == 0:
            status = self._print()
        with contextlib.suppress(EndedError):
            status = meeting.tell("end", status)  # a rank that left before rank 0 has spoken would end it
        if whole:
            with self._deadline.stage("end"):
                launch.stop()
            return status
        if env.rank == 0:
            time.sleep(LEAVING_S)
        sys.stdout.flush()
        os._exit(status)  # other threads may wait in a collective for ever

    def _stages(self, meeting: Meeting, mistakes: list[Finding]) -> None:
        """Collective over the job: everything between ranks; findings are kept on rank 0."""
        env = self._environment
        try:
            said = meeting.stage("meeting", self._introduction)
        except AbsentError as error:
            self._found += [*mistakes, self._absent(error.stage, error.ranks)]
            self._found += self._of_this_host()
            raise EndedError from error
        if said is not None:
            self._hosts = ranks.hosts_of_ranks(said)
            self._found.append(self._met())
            self._look("hosts", partial(ranks.check_hosts, said))
            self._look("same on all", partial(ranks.check_same, said, self._hosts))
        hosts: dict[str, list[int]] = meeting.tell("hosts", self._hosts)
        leaders = [own[0] for own in hosts.values()]

        own = meeting.stage(
            "this host",
            lambda: [vars(each) for each in [*mistakes, *(self._of_this_host() if env.rank in leaders else [])]],
            times=HOST_TIMES,
        )
        if own is not None:
            by_host = {
                name: [Finding(**each) for rank in members for each in own[rank]] for name, members in hosts.items()
            }
            self._found += put_together(by_host)

        device = self._device()
        meeting.stage("process group", lambda: self._join(device))
        wrong = meeting.stage(
            "all-reduce", lambda: collectives.wrong_sums(self._own_device(), env.rank, env.world_size)
        )
        if wrong is not None:
            self._look("all-reduce", partial(collectives.check_sums, wrong))
        self._rates(meeting, hosts)
        if len(hosts) > 1:
            self._between_hosts(meeting, hosts, leaders)

    def _rates(self, meeting: Meeting, hosts: Mapping[str, Sequence[int]]) -> None:
        env = self._environment
        seconds = meeting.stage("bandwidth", lambda: collectives.time_all_reduces(self._own_device()))
        if seconds is not None:
            sizes, kind = (env.world_size, len(hosts)), self._own_device().type
            self._look("bandwidth", partial(collectives.check_all_reduce_rate, seconds[0], *sizes, kind))
        plan = collectives.schedule(hosts)
        pairs = meeting.stage("pairs", lambda: collectives.pair_rates(plan, env.rank, self._own_device()))
        if pairs is not None:
            rates = {pair: rate for each in pairs for pair, rate in each.items()}
            self._look("bandwidth", partial(collectives.check_pairs, rates, hosts))

    def _between_hosts(self, meeting: Meeting, hosts: Mapping[str, Sequence[int]], leaders: Sequence[int]) -> None:
        rank = self._environment.rank
        offsets = meeting.stage("clocks", lambda: clocks.offset(rank, leaders))
        others = {name: members[0] for name, members in hosts.items() if members[0] != 0}
        if offsets is not None:
            measured = {name: tuple(offsets[leader]) for name, leader in others.items()}
            self._look("clocks", partial(clocks.check_clocks, measured))
        token = meeting.tell("token", secrets.token_hex(8))
        output, leads = self._output_dir(), rank in leaders

        def look() -> list[float | None]:
            return folder.find(output, token, [str(leader) for leader in others.values()]) if rank == 0 else []

        try:
            meeting.stage("shared folder, write", lambda: folder.leave(output, token, str(rank)) if leads else None)
            here = meeting.stage("shared folder, read", lambda: folder.find(output, token, ["0"]) if leads else [None])
            there = meeting.stage("shared folder, look", look)
        finally:
            if leads:
                folder.tidy(output, token)
        if here is not None and there is not None:
            waited: dict[str, float | None] = {}
            for (name, leader), seen in zip(others.items(), there[0], strict=True):
                both = (here[leader][0], seen)
                waited[name] = None if None in both else max(both)
            self._look("shared folder", partial(folder.check_shared, output, waited))

    def _look(self, topic: str, check: Check) -> None:
        self._found += findings_of(topic, check)

    def _meeting(self, store: Any) -> Meeting:
        env = self._environment
        return Meeting(_own(store), env.rank, env.world_size, self._timeout_s, self._deadline)

    def _introduction(self) -> dict[str, Any]:
        env = self._environment
        facts = {**versions.facts(), **devices.cuda_versions(), **network.interface_facts(env)}
        if self._config is not None:
            facts["config"] = hashlib.sha256(to_yaml(self._config).encode()).hexdigest()[:12]
        return ranks.introduce(env, facts)

    def _join(self, device: str) -> None:
        launch.start(
            device, timeout_s=self._timeout_s, store=PrefixStore("mrl-doctor-group", launch.private(self._store))
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

    # What a host looks at by itself

    def _of_this_host(self) -> list[Finding]:
        """Everything that needs no other rank; what was found so far is kept for `_late`."""
        for topic, check in self._checks():
            self._checking = topic
            with self._deadline.stage(topic):
                self._own += findings_of(topic, check)
        self._checking = ""
        return self._own

    def _checks(self) -> Iterator[tuple[str, Check]]:
        env, clean = self._environment, launch.variables_without_launcher()
        yield "packages", lambda: versions.check_versions(versions.ranges(), self._needed())
        for extra, (name, module) in versions.OPTIONAL.items():
            if versions.installed(name) is not None and name != "mpi4py":  # its library is looked at by `check_mpi`
                yield name, partial(self._imports, extra, name, module)
        yield "GPUs", self._gpus
        yield "CPU", self._cpu
        yield "host memory", lambda: host.check_memory(host.read_memory(), env.local_world_size)
        yield from self._limits()
        yield from self._network()
        yield "MPI", lambda: launchers.check_mpi(clean, wanted=env.launcher in ("mpirun", "mpi"))
        job = launch.variables("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES")
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
        """Extras of setup.py without which this run would be slow or not start."""
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

        hidden = launch.variables("CUDA_VISIBLE_DEVICES").get("CUDA_VISIBLE_DEVICES")
        yield from devices.check_hidden_gpus(devices.nvidia_files(), torch.version.cuda, hidden)

    def _cpu(self) -> Iterator[Finding]:
        computes = not devices.read_gpu_count()
        dtype = None if self._config is None else self._config.model.dtype
        env = self._environment
        yield from devices.check_cpu(devices.read_cpu(), env.local_world_size, computes=computes, dtype=dtype)

    def _limits(self) -> Iterator[tuple[str, Check]]:
        env = self._environment
        files, locked = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
        inside = launch.variables("container")
        yield "open files", lambda: host.check_open_files(files, env.world_size)
        yield "locked memory", lambda: host.check_locked_memory(locked, host.infiniband_adapters())
        yield "/dev/shm", host.check_shared_memory
        yield "container", lambda: host.check_container(host.infiniband_adapters(), host.container_kind(inside))

    def _network(self) -> Iterator[tuple[str, Check]]:
        env, name = self._environment, socket.gethostname()
        chosen = launch.variables("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        yield "network", lambda: network.check_interface(env, network.read_interfaces(), chosen)
        yield "host name", lambda: network.check_name(name, *network.look_up(name))
        if env.world_size == 1:  # else the launcher has it
            port = launch.variables("MASTER_PORT").get("MASTER_PORT", str(network.DEFAULT_PORT))
            yield "port", lambda: network.check_port(int(port), network.outgoing_ports())
        sizes = (env.world_size, env.local_world_size)
        yield "ports", lambda: network.check_outgoing(network.outgoing_ports(), *sizes)

    def _files(self, config: Config) -> Iterator[tuple[str, Check]]:
        yield "config", lambda: run_files.check_config(config, str(self._file), self._environment.world_size)
        for topic, path in run_files.models_of(config):
            yield topic, partial(run_files.check_model_files, path, topic)
        yield "data", lambda: run_files.check_data(config)

    def _checkpoint_bytes(self) -> int | None:
        from mrl.trainer.resolve import load_model_facts

        if self._config is None:
            return None
        try:
            return run_files.checkpoint_bytes(self._config, load_model_facts(self._config)[0])
        except UserError:
            return None  # told by `check_config`

    # Endings

    def _met(self) -> Finding:
        env = self._environment
        where = f"{self._store.host}:{self._store.port}"
        return ok("launcher", f"{env.launcher}: {env.world_size} ranks on {len(self._hosts)} host(s) met at {where}")

    def _absent(self, stage: str, missing: Sequence[int]) -> Finding:
        at = [f"{host} ({ranks.spans(own)})" for host in self._hosts if (own := self._missing_on(host, missing))]
        there = f" of {', '.join(at)}" if at else ""
        came = "did not come" if stage == "meeting" else f"did not end '{stage}'"
        found = f"rank(s) {ranks.spans(list(missing))}{there} {came} in {self._timeout_s:g} s"
        return problem(stage, found, WAYS.get(stage, ELSE))

    def _missing_on(self, name: str, missing: Sequence[int]) -> list[int]:
        return [rank for rank in self._hosts[name] if rank in missing]

    def _failed(self, error: FailedError) -> Finding:
        first = min(error.errors)
        host_of = {rank: name for name, own in self._hosts.items() for rank in own}
        others = f" (and {len(error.errors) - 1} more rank(s))" if len(error.errors) > 1 else ""
        found = f"rank {first} on {host_of.get(first, 'its host')}{others}: {error.errors[first]}"
        return problem(error.stage, found, WAYS.get(error.stage, ELSE))

    def _late(self, stage: str) -> None:
        """In another thread: this rank hangs in a stage; the process ends here."""
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
                self._meeting(reconnect(self._store)).tell("end", None)
            elif stage == "meeting":
                where = f"{env.address}:{env.port}" if env.address else "an address that MPI would tell"
                self._say_alone(f"rank {env.rank} cannot reach rank 0 at {where}: {hangs}; {WAYS[stage]}")
            else:
                self._say_alone(f"'{stage}' has {hangs}")
        except RuntimeError:  # the store is gone, and rank 0 with it
            pass
        finally:
            sys.stdout.flush()
            os._exit(2)

    def _hung(self, stage: str, hangs: str) -> Finding:
        env = self._environment
        if self._store is None or self._checking:
            return problem(stage, hangs, WAYS.get(stage, ELSE))
        missing = not_entered(_own(reconnect(self._store)), stage, env.world_size)
        if missing:
            return self._absent(stage, missing)
        return problem(stage, f"{hangs}, with all ranks in it", WAYS.get(stage, ELSE))

    def _say_alone(self, error: str) -> None:
        """What stopped a rank that has not met the others: nobody else can tell; once for each host."""
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
    return PrefixStore("mrl-doctor", launch.private(store))
