"""Clocks of the hosts, compared with rank 0's.

Owns the exchange: a host sends, rank 0 answers with its time; half of the way there and back is the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.commands.doctor.finding import Finding, ok, problem, warning

PINGS = 5
MAX_SKEW_S = 1.0
"""Times of files and logs of several hosts can be put in order."""
MUNGE_S = 300.0
"""A credential of munge, by which SLURM's hosts trust each other, is valid so long (munged(8), --ttl)."""
NS = 1e9


def offset(rank: int, leaders: Sequence[int], now: Callable[[], int] = time.time_ns) -> tuple[float, float] | None:
    """Collective over `leaders`: (seconds that this host's clock is ahead of rank 0's, its error) of the best of a few.

    Args:
        rank: This one.
        leaders: A rank of each host, rank 0 the first.
        now: The clock, ns.

    Returns:
        None on rank 0, and on ranks that are no leader.
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
    """Host -> (seconds ahead of rank 0's clock, error)."""
    worst = max(offsets, key=lambda host: abs(offsets[host][0]) - offsets[host][1])
    ahead, error = offsets[worst]
    skew = max(0.0, abs(ahead) - error)
    text = f"{worst}'s is {ahead:+.4f} s from rank 0's, +-{error:.4f}"
    advice = "let chrony or ntpd keep the clocks of all hosts"
    if skew > MUNGE_S:
        yield problem("clocks", text, advice)
    elif skew > MAX_SKEW_S:
        yield warning("clocks", text, advice)
    else:
        yield ok("clocks", f"of {len(offsets) + 1} hosts agree; {text}")
