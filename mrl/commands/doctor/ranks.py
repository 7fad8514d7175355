"""Checks of the placement of ranks on hosts, and that versions, code and config are the same on all ranks."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.distributed.launcher_env import LauncherEnv

MAX_SHOWN = 8
MAY_DIFFER = ("NVIDIA driver", "MTU")
"""Facts whose difference is only a warning."""
ENVIRONMENT = "use the same environment on each host: a shared folder or a container image"
ADVICE = {
    "config": "use the same file on each host: put it into a shared folder",
    "MTU": "set the same MTU on all hosts (ip link set dev ... mtu ...)",
    "NVIDIA driver": "install the same driver on each host",
}


def describe_rank(environment: LauncherEnv, facts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the description of this rank that rank 0 gathers.

    Args:
        environment: Environment of this rank.
        facts: Values that must agree on all ranks, by name.
    """
    return {
        "host": socket.gethostname(),
        "local_rank": environment.local_rank,
        "local_world_size": environment.local_world_size,
        "facts": dict(facts),
    }


def hosts_of_ranks(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns the ranks of each host; hosts with the same name get a number.

    Args:
        descriptions: Result of `describe_rank` of each rank.
    """
    hosts: dict[str, list[int]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for rank, each in enumerate(descriptions):
        key = (each["host"], each["local_rank"])
        seen[key] += 1
        hosts[each["host"] + (f"({seen[key]})" if seen[key] > 1 else "")].append(rank)
    return dict(hosts)


def check_hosts(descriptions: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Checks the placement of ranks on hosts."""
    hosts = hosts_of_ranks(descriptions)
    shown = "; ".join(f"{host}: {format_ranges(ranks)}" for host, ranks in list(hosts.items())[:MAX_SHOWN])
    found = shown + (f"; and {len(hosts) - MAX_SHOWN} more hosts" if len(hosts) > MAX_SHOWN else "")
    clean = True
    names = Counter(each["host"] for each in descriptions if each["local_rank"] == 0)
    if double := [name for name, count in names.items() if count > 1]:
        clean = False
        yield warning("hosts", f"{names[double[0]]} hosts have the name {double[0]}", "give each host a unique name")
    for host, ranks in hosts.items():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            clean = False
            yield warning(
                "hosts",
                f"{host} has ranks {format_ranges(ranks)}: tensor parallel groups are consecutive ranks, and would "
                "span hosts",
                "place consecutive ranks on a host (mpirun --map-by slot, srun --distribution=block)",
            )
            break
    if len(sizes := {len(ranks) for ranks in hosts.values()}) > 1:
        clean = False
        advice = "start the same number of ranks on each host"
        yield warning("hosts", f"{found}: between {min(sizes)} and {max(sizes)} ranks", advice)
    if clean:
        yield ok("hosts", found)


def check_same(descriptions: Sequence[Mapping[str, Any]], hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Checks that the facts of `describe_rank` agree on all ranks."""
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    names = dict.fromkeys(name for each in descriptions for name in each["facts"])
    differing = False
    for name in names:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(descriptions):
            by_value[each["facts"].get(name, "none")].append(rank)
        if len(by_value) == 1:
            continue
        differing = True
        most = max(by_value, key=lambda value: len(by_value[value]))
        others = "; ".join(
            f"{value} on rank(s) {format_ranges(ranks)} ({_some(dict.fromkeys(host_of[rank] for rank in ranks))})"
            for value, ranks in by_value.items()
            if value != most
        )
        level = warning if name in MAY_DIFFER else problem
        yield level("same on all", f"{name} is {most}, but {others}", ADVICE.get(name, ENVIRONMENT))
    if not differing:
        code = descriptions[0]["facts"].get("mrl's code", "")
        yield ok("same on all", f"{', '.join(list(names)[:3])} ({code}) and {len(names) - 3} more")


def format_ranges(ranks: Sequence[int]) -> str:
    """Returns ranks as ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _some(names: Mapping[str, None]) -> str:
    shown = list(names)[:MAX_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
