"""Compares the clocks of the hosts with rank 0's: a host sends a message, rank 0 answers with its time.

The uncertainty is half of the round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.commands.doctor.finding import Finding, ok, problem, warning

PINGS = 5
MAX_SKEW_S = 1.0
"""Largest skew, s, at which timestamps of files and logs of different hosts can be ordered."""
MUNGE_S = 300.0
"""Validity of a munge credential, s (munged(8), --ttl), with which SLURM's hosts authenticate each other."""
NS = 1e9


def clock_offset(
    rank: int, leaders: Sequence[int], now: Callable[[], int] = time.time_ns
) -> tuple[float, float] | None:
    """Collective over `leaders`: measures this host's clock against rank 0's; the best of `PINGS` round trips.

    Args:
        rank: Rank of this process.
        leaders: First rank of each host, rank 0 first.
        now: Clock, ns.

    Returns:
        (s that this clock is ahead, uncertainty in s); None on rank 0 and on ranks that are not leaders.
    """
    if rank not in leaders:
        return None
    message = torch.zeros(1, dtype=torch.int64)
    best: tuple[float, float] | None = None
    for other in [each for each in leaders[1:] if rank in (0, each)]:
        for _ in range(PINGS):
            if rank == 0:
                dist.recv(message, other)
                message[0] = now()
                dist.send(message, other)
                continue
            start = now()
            dist.send(message, 0)
            dist.recv(message, 0)
            stop = now()
            found = (((start + stop) / 2 - int(message)) / NS, (stop - start) / 2 / NS)
            best = found if best is None or found[1] < best[1] else best
    return best


def check_clocks(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Checks the skew of all hosts.

    Args:
        offsets: Host -> (s ahead of rank 0's clock, uncertainty in s).
    """
    worst = max(offsets, key=lambda host: abs(offsets[host][0]) - offsets[host][1])
    ahead, error = offsets[worst]
    skew = max(0.0, abs(ahead) - error)
    text = f"{worst}'s is {ahead:+.4f} s from rank 0's, +-{error:.4f}"
    advice = "synchronize the clocks of all hosts with chrony or ntpd"
    if skew > MUNGE_S:
        yield problem("clocks", text, advice)
    elif skew > MAX_SKEW_S:
        yield warning("clocks", text, advice)
    else:
        yield ok("clocks", f"of {len(offsets) + 1} hosts agree; {text}")
