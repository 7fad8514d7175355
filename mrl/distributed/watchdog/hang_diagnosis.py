"""Whose fault it is that a job stands still, told from what each rank says of itself.

Owns `RankState`, what a rank tells the others, and the message that ends the job. It asks nobody; `watchdog.py` does.
"""

from __future__ import annotations

import json
import os
import socket
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mrl.distributed import job_secret
from mrl.distributed.job_secret import StrangerError

SHOWN = 4
"""Ranks whose stacks are printed; of thousands the first ones tell enough."""


EXAMPLE_LINES = 6
"""Of a rank that waits: what for is told by its step and phase, and where by a few lines."""

GONE = "is gone: its process has ended"
"""What is known of a rank whose host sees no such process any more."""

DONE = "done"
"""How a rank left that came to the end of the job."""


@dataclass(frozen=True)
class RankState:
    """What a rank says of itself.

    Attributes:
        rank: Global rank.
        host: Its hostname.
        pid: On that host.
        space: Of the process ids: ranks that say the same can see each other's processes.
        where: "step 12, reward".
        where_s: For how long, s.
        beat: Grows as long as the rank lives.
        waits_s: For how long its main thread has waited in one collective, s; None: it waits in none.
        sampled_s: Since its engine last made a forward, s; None: it made none.
        broken: Why its collective failed; "" none did.
        left: How it left the job; "" it did not.
        stack: Of its main thread, once it was asked for.
    """

    rank: int
    host: str
    pid: int
    space: str = ""
    where: str = "the start"
    where_s: float = 0.0
    beat: int = 0
    waits_s: float | None = None
    sampled_s: float | None = None
    broken: str = ""
    left: str = ""
    stack: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def encode(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))


def decode(data: bytes) -> RankState:
    """From the store.

    Raises:
        StrangerError: No rank wrote this.
    """
    try:
        return RankState(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise StrangerError("no rank of this job wrote what is there as a rank's state") from error


def seal_end(secret: str, text: str, status: int, speaker: int) -> str:
    """The message that ends the job, the exit status and the rank that prints it, for the store.

    Args:
        secret: The job's token.
        text: The message.
        status: Of every rank.
        speaker: Which rank prints it.
    """
    data = json.dumps({"text": text, "status": status, "speaker": speaker}).encode()
    return job_secret.seal(secret, "end", data).decode()


def open_end(secret: str, sealed: bytes) -> dict[str, Any]:
    """From the store.

    Raises:
        StrangerError: No rank wrote this.
    """
    end: dict[str, Any] = json.loads(job_secret.unseal(secret, "end", sealed))
    return end


def process_space() -> str:
    """Of this process's id: the boot of the kernel, and the namespaces; a network of its own is a host of its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # sees nobody but itself


def judge(states: Mapping[int, RankState], gone: Mapping[int, str], size: int) -> str:
    """Names the ranks that hold up the others, and shows what they do.

    Args:
        states: Of each rank that ever came, as last heard.
        gone: Ranks that give no answer -> what is known of that.
        size: Ranks of the job.
    """
    absent = sorted(set(range(size)) - set(states))
    left = _left(states)
    alive = [state for state in states.values() if not state.left and state.rank not in gone]
    waiting = [state for state in alive if state.waits_s is not None]
    if absent or gone:
        return _missing(states, gone, absent, alive)
    if left:
        stacks = _details([state for state in left if state.stack])
        return "\n".join(
            [*(f"{state} left the job at {state.where}: {state.left}." for state in left[:SHOWN]), *stacks]
        )
    late = _late(states)
    if late and len(late) < len(alive):
        who = f"{late[0]} is" if len(late) == 1 else f"{ranks([state.rank for state in late])} are"
        waited = max((state.waits_s or 0.0 for state in waiting), default=0.0)
        rest = ranks([state.rank for state in alive if state not in late])
        have = "has" if len(alive) - len(late) == 1 else "have"
        head = f"{who} late: {rest} {have} waited {waited:.0f} s in a collective."
        return "\n".join([head, *_details(late), *_example(waiting)])
    who = ranks([state.rank for state in alive])
    head = f"{who} wait for each other, in collectives that do not meet or cannot be done."
    return "\n".join([head, *_details(_one_of_each(alive))])


def are_sampling(states: Mapping[int, RankState], within_s: float) -> bool:
    """Whether all ranks that others wait for sample, and have made a forward within so many seconds.

    Where all seem to wait, between two forwards, one that has is enough.
    """
    sampling = {state.rank for state in states.values() if state.sampled_s is not None and state.sampled_s <= within_s}
    return bool(sampling) and sampling.issuperset(state.rank for state in _late(states))


def is_somebody_to_blame(states: Mapping[int, RankState], gone: Mapping[int, str], size: int) -> bool:
    """Whether a collective that failed on one rank failed because of others; arguments as of `judge`."""
    return bool(gone or len(states) < size or _left(states) or _late(states))


def ranks(numbers: Iterable[int]) -> str:
    """Such as "rank 3" or "ranks 0-7, 16"."""
    known = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in known:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(known) == 1 else 'ranks'} {shown}"


def _left(states: Mapping[int, RankState]) -> list[RankState]:
    return [state for state in states.values() if state.left not in ("", DONE)]


def _late(states: Mapping[int, RankState]) -> list[RankState]:
    return [state for state in states.values() if state.waits_s is None and not state.broken and not state.left]


def _missing(
    states: Mapping[int, RankState], gone: Mapping[int, str], absent: Sequence[int], alive: Collection[RankState]
) -> str:
    lines = [f"{ranks(absent)} never came."] if absent else []
    hosts: dict[str, list[RankState]] = {}
    for rank in sorted(gone):
        hosts.setdefault(states[rank].host, []).append(states[rank])
    ended = {states[rank].host for rank, known in gone.items() if known == GONE}
    lost = [host for host in hosts if host not in {state.host for state in alive} | ended]
    for host in lost[:SHOWN]:
        lines.append(f"Nothing of this job answers on host {host}: {ranks([state.rank for state in hosts[host]])}.")
    if len(lost) > SHOWN:
        lines.append(f"... nor on {len(lost) - SHOWN} more hosts.")
    for rank in sorted(gone)[:SHOWN]:
        last = f"It was last heard at {states[rank].where}, for {states[rank].where_s:.0f} s, and has no stack to show."
        lines.append(f"{states[rank]} {gone[rank]}. {last}")
    if len(gone) > SHOWN:
        lines.append(f"... and {len(gone) - SHOWN} more: {ranks(sorted(gone)[SHOWN:])}")
    waiting = [state for state in alive if state.waits_s is not None]
    return "\n".join([*lines, *_example(waiting)])


def _details(states: Sequence[RankState]) -> list[str]:
    lines = []
    for state in states[:SHOWN]:
        lines.append(f"{state}, at {state.where} for {state.where_s:.0f} s:")
        lines.append(textwrap.indent(state.stack, "  "))
    if len(states) > SHOWN:
        lines.append(f"... and {len(states) - SHOWN} more")
    return lines


def _example(waiting: Sequence[RankState]) -> list[str]:
    if not waiting:
        return []
    longest = max(waiting, key=lambda state: state.waits_s or 0.0)
    innermost = "\n".join(longest.stack.splitlines()[-EXAMPLE_LINES:])
    return [
        f"One that waits, {longest}, at {longest.where} for {longest.where_s:.0f} s:",
        textwrap.indent(innermost, "  "),
    ]


def _one_of_each(states: Sequence[RankState]) -> list[RankState]:
    """The first rank of each place in the code."""
    return list({(state.where, state.stack): state for state in reversed(states)}.values())[::-1]
