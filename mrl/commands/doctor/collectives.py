"""Checks collectives between ranks: exact sums, and the bandwidth of all-reduce and of pairs of ranks.

Rates are those of the job's own transport: NCCL between GPUs, gloo between CPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.commands.doctor.ranks import format_ranges

COUNT = 4099
"""Elements of a sum; a prime, so that no split over ranks is even."""
DTYPES = (torch.int64, torch.float32, torch.bfloat16)
BF16_EXACT = 256
"""bf16 represents every integer up to this."""
SIZES = (4 << 10, 1 << 20, 16 << 20)
"""Sizes of the measured all-reduces, bytes."""
PAIR_BYTES = 4 << 20
REPEATS = 3
MAX_ROUNDS = 7
"""Largest number of partners with which a rank is measured on its host, and a host among the hosts."""
MIN_PAIRS = 3
SLOW_FACTOR = 3.0
"""Ratio to the median above which a pair counts as slow; noise of shared machines stays below it."""
MIN_GPU_HOST_RATE = 3e9
"""Bytes/s between GPU hosts below which NCCL probably uses plain sockets; a 40 Gbit/s link has 5e9."""
GB = 1e9


def addend(rank: int, world_size: int, dtype: torch.dtype, count: int = COUNT) -> Tensor:
    """Returns a rank's summand: integers whose sums over all ranks are exact in the dtype, in any order.

    Returns:
        [count] int64.
    """
    index = torch.arange(count)
    if dtype == torch.bfloat16:
        return ((index + rank) % max(2, -(-world_size // BF16_EXACT)) == 0).long()
    if dtype == torch.float32:
        return (rank % 16 + 1) * (index % 64 + 1)
    return (rank + 1) * (index + 1)


def wrong_sums(device: torch.device, rank: int, world_size: int) -> dict[str, int]:
    """Collective over the job: counts the wrong elements of an all-reduce, per dtype and device type.

    Args:
        device: Device of this rank.
        rank: Rank of this process according to its environment.
        world_size: Number of ranks.
    """
    found = {}
    for kind in dict.fromkeys([torch.device("cpu"), device]):
        for dtype in DTYPES:
            total = addend(rank, world_size, dtype).to(dtype).to(kind)
            dist.all_reduce(total)
            expected = torch.zeros(COUNT, dtype=torch.int64)
            for other in range(world_size):
                expected += addend(other, world_size, dtype)
            wrong = int((total.cpu().to(torch.int64) != expected).sum())
            found[f"{str(dtype).removeprefix('torch.')} on {kind.type}"] = wrong
    return found


def check_sums(wrong: Sequence[Mapping[str, int]]) -> Iterator[Finding]:
    """Checks that the sums of `wrong_sums` were exact on all ranks."""
    bad = {rank: {name: count for name, count in each.items() if count} for rank, each in enumerate(wrong)}
    bad = {rank: each for rank, each in bad.items() if each}
    if bad:
        rank, first = next(iter(bad.items()))
        name, count = next(iter(first.items()))
        yield problem(
            "all-reduce",
            f"wrong on rank(s) {format_ranges(list(bad))}: {count} of {COUNT} sums of {name} on rank {rank}",
            "do not train here: look for a broken link or GPU (NCCL_DEBUG=INFO, dcgmi diag), or for duplicate ranks",
        )
    else:
        yield ok("all-reduce", f"exact on {len(wrong)} ranks: {', '.join(wrong[0])}")


def time_all_reduces(device: torch.device) -> list[float]:
    """Collective over the job: returns the time of an all-reduce of each of `SIZES`, s, the best of `REPEATS`."""
    found = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(REPEATS + 1):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            _wait(device)
            times.append(time.perf_counter() - start)
        found.append(min(times[1:]))
    return found


def check_all_reduce_rate(seconds: Sequence[float], world_size: int, num_hosts: int, kind: str) -> Iterator[Finding]:
    """Checks the bus bandwidth as nccl-tests defines it: bytes x 2 (n - 1) / n / s.

    Args:
        seconds: Time for each of `SIZES`, s.
        world_size: Number of ranks.
        num_hosts: Number of hosts.
        kind: "cpu" or "cuda".
    """
    rates = [size * 2 * (world_size - 1) / world_size / each for size, each in zip(SIZES, seconds, strict=True)]
    shown = ", ".join(
        f"{_size(size)} in {1000 * each:.3g} ms ({rate / GB:.2g} GB/s)"
        for size, each, rate in zip(SIZES, seconds, rates, strict=True)
    )
    if kind == "cuda" and num_hosts > 1 and rates[-1] < MIN_GPU_HOST_RATE:
        yield warning(
            "bandwidth",
            f"all-reduce of {world_size} ranks: {shown}",
            "NCCL seems to use plain sockets: see NCCL_DEBUG=INFO, then set NCCL_IB_HCA or NCCL_SOCKET_IFNAME",
        )
    else:
        yield ok("bandwidth", f"all-reduce of {world_size} ranks: {shown}")


def rounds(members: Sequence[int], at_most: int = MAX_ROUNDS) -> list[list[tuple[int, int]]]:
    """Returns rounds in which each member is in at most one pair (circle method); all pairs occur once if unbounded.

    Args:
        members: Ranks.
        at_most: Largest number of rounds.
    """
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(min(len(ring) - 1, at_most)):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def schedule_pairs(hosts: Mapping[str, Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Returns rounds of pairs: first within all hosts concurrently, then between the first ranks of the hosts."""
    inside = [rounds(ranks) for ranks in hosts.values()]
    merged = [
        [pair for each in inside if number < len(each) for pair in each[number]]
        for number in range(max(len(each) for each in inside))
    ]
    return merged + rounds([ranks[0] for ranks in hosts.values()])


def pair_rates(plan: Sequence[Sequence[tuple[int, int]]], rank: int, device: torch.device) -> dict[str, float]:
    """Collective over the job: returns the bytes/s of the pairs that start with this rank, from round trips."""
    found = {}
    tensor = torch.zeros(PAIR_BYTES // 4, device=device)
    for pairs in plan:
        dist.barrier()
        for a, b in pairs:
            if rank not in (a, b):
                continue
            times = []
            for _ in range(REPEATS + 1):
                start = time.perf_counter()
                for sender, receiver in ((a, b), (b, a)):
                    if rank == sender:
                        dist.send(tensor, receiver)
                    else:
                        dist.recv(tensor, sender)
                _wait(device)
                times.append(time.perf_counter() - start)
            if rank == a:
                found[f"{a}-{b}"] = 2 * PAIR_BYTES / min(times[1:])
    return found


def check_pairs(rates: Mapping[str, float], hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Checks the bandwidth between ranks of a host and between hosts, and finds pairs far slower than the median.

    Args:
        rates: "a-b" -> bytes/s.
        hosts: Host -> its ranks.
    """
    host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}
    kinds: dict[str, dict[str, float]] = {"ranks of a host": {}, "hosts": {}}
    for pair, rate in rates.items():
        a, b = (host_of[int(rank)] for rank in pair.split("-"))
        if a == b:
            kinds["ranks of a host"][f"{pair} on {a}"] = rate
        else:
            kinds["hosts"][f"{a} and {b}"] = rate
    for kind, found in kinds.items():
        if found:
            yield _slowest(kind, found)


def _slowest(kind: str, rates: Mapping[str, float]) -> Finding:
    middle = statistics.median(rates.values())
    pair = min(rates, key=lambda pair: rates[pair])
    text = (
        f"between {kind}: median {middle / GB:.2g} GB/s of {len(rates)} pair(s), slowest {pair}: {rates[pair] / GB:.2g}"
    )
    if len(rates) >= MIN_PAIRS and rates[pair] * SLOW_FACTOR < middle:
        slow = [name for name, rate in rates.items() if rate * SLOW_FACTOR < middle]
        part = f" ({len(slow)} are that slow{_in_all(slow)})"
        return warning("bandwidth", text + part, "check that cable, switch port or GPU, or exclude the host")
    return ok("bandwidth", text)


def _in_all(slow: Sequence[str]) -> str:
    """Returns a text that names the host or rank that all slow pairs share, or ""."""
    shared = set.intersection(*({*name.replace(" and ", " ").split()} for name in slow)) - {"on"}
    return f", all with {', '.join(sorted(shared))}" if len(slow) > 1 and shared else ""


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
