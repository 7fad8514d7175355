"""Who is where, and whether all ranks have the same: versions, code, config.

Owns the map of hosts to ranks, made from what each rank says of itself.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.distributed.launcher_env import Environment

MAX_SHOWN = 8
MAY_DIFFER = ("NVIDIA driver", "MTU")
"""A difference in these may work."""
ENVIRONMENT = "the same environment on each host: one shared folder, or one image"
ADVICE = {
    "config": "the same file on each host: put it into a shared folder",
    "MTU": "set the same one on all of them (ip link set dev ... mtu ...)",
    "NVIDIA driver": "install the same one on each host",
}


def introduce(environment: Environment, facts: Mapping[str, str]) -> dict[str, Any]:
    """What a rank says of itself.

    Args:
        environment: Of this rank.
        facts: What has to be equal on all ranks: name -> value.
    """
    return {
        "host": socket.gethostname(),
        "local_rank": environment.local_rank,
        "local_world_size": environment.local_world_size,
        "facts": dict(facts),
    }


def hosts_of_ranks(said: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Host -> its ranks; hosts of one name are told apart by a number.

    Args:
        said: `introduce` of each rank.
    """
    hosts: dict[str, list[int]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for rank, each in enumerate(said):
        key = (each["host"], each["local_rank"])
        seen[key] += 1
        hosts[each["host"] + (f"({seen[key]})" if seen[key] > 1 else "")].append(rank)
    return dict(hosts)


def check_hosts(said: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Which ranks are on which host, and whether that is a good order."""
    hosts = hosts_of_ranks(said)
    shown = "; ".join(f"{host}: {spans(ranks)}" for host, ranks in list(hosts.items())[:MAX_SHOWN])
    found = shown + (f"; and {len(hosts) - MAX_SHOWN} more hosts" if len(hosts) > MAX_SHOWN else "")
    clean = True
    names = Counter(each["host"] for each in said if each["local_rank"] == 0)
    if double := [name for name, count in names.items() if count > 1]:
        clean = False
        yield warning("hosts", f"{names[double[0]]} hosts are called {double[0]}", "give each host its own name")
    for host, ranks in hosts.items():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            clean = False
            yield warning(
                "hosts",
                f"{host} has ranks {spans(ranks)}: tensor parallel groups are consecutive ranks, and would span hosts",
                "give a host consecutive ranks (mpirun --map-by slot, srun --distribution=block)",
            )
            break
    if len(sizes := {len(ranks) for ranks in hosts.values()}) > 1:
        clean = False
        yield warning("hosts", f"{found}: between {min(sizes)} and {max(sizes)} ranks", "as many on each host")
    if clean:
        yield ok("hosts", found)


def check_same(said: Sequence[Mapping[str, Any]], hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Whether what has to be equal is equal on all ranks."""
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    names = dict.fromkeys(name for each in said for name in each["facts"])
    differing = False
    for name in names:
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(said):
            by_value[each["facts"].get(name, "none")].append(rank)
        if len(by_value) == 1:
            continue
        differing = True
        most = max(by_value, key=lambda value: len(by_value[value]))
        others = "; ".join(
            f"{value} on rank(s) {spans(ranks)} ({_some(dict.fromkeys(host_of[rank] for rank in ranks))})"
            for value, ranks in by_value.items()
            if value != most
        )
        level = warning if name in MAY_DIFFER else problem
        yield level("same on all", f"{name} is {most}, but {others}", ADVICE.get(name, ENVIRONMENT))
    if not differing:
        code = said[0]["facts"].get("mrl's code", "")
        yield ok("same on all", f"{', '.join(list(names)[:3])} ({code}) and {len(names) - 3} more")


def spans(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
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
