"""Finds the ranks that cause a hang, from the state that every rank publishes, and composes the final message.

These are pure functions; `watchdog.py` reads and writes the store.
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
from mrl.distributed.job_secret import AuthenticationError

MAX_SHOWN_RANKS = 4
"""Number of ranks whose stacks are printed."""


EXAMPLE_LINES = 6
"""Stack lines shown of a waiting rank."""

GONE = "is gone: its process has ended"
"""Finding for a rank whose process no longer exists on its host."""

DONE = "done"
"""Value of `RankState.left` for a rank that reached the end of the job."""


@dataclass(frozen=True)
class RankState:
    """State that a rank publishes.

    Attributes:
        rank: Global rank.
        host: Hostname.
        pid: Process id on that host.
        space: Name of the process-id namespace; ranks with equal names can see each other's processes.
        where: Current step and phase, "step 12, reward".
        where_s: Time in this phase, s.
        beat: Heartbeat counter, which grows as long as the rank lives.
        waits_s: Time that the main thread has waited in one collective, s; None: it is in none.
        sampled_s: Time since the engine's last forward, s; None: no forward yet.
        broken: Error of a failed collective; "": none.
        left: Reason why the rank left the job; "": it has not.
        stack: Stack of the main thread, published after an alarm.
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
        """Returns the state as JSON."""
        return json.dumps(asdict(self))


def decode(data: bytes) -> RankState:
    """Parses a rank's state from the store.

    Raises:
        AuthenticationError: It is malformed, so no rank wrote it.
    """
    try:
        return RankState(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise AuthenticationError("a rank's published state is malformed, so no rank of this job wrote it") from error


def encode_end_record(secret: str, text: str, status: int, speaker: int) -> str:
    """Returns the authenticated end-of-job record for the store.

    Args:
        secret: Job token.
        text: Message.
        status: Exit status of every rank.
        speaker: Rank that prints the message.
    """
    data = json.dumps({"text": text, "status": status, "speaker": speaker}).encode()
    return job_secret.sign_data(secret, "end", data).decode()


def decode_end_record(secret: str, sealed: bytes) -> dict[str, Any]:
    """Parses and verifies an end-of-job record.

    Raises:
        AuthenticationError: It was not written with this job's token.
    """
    end: dict[str, Any] = json.loads(job_secret.verify_data(secret, "end", sealed))
    return end


def pid_namespace() -> str:
    """Returns a name of this process's pid namespace: boot id, pid namespace and network namespace.

    The network namespace is included because one of its own makes a separate host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # unique: no other process is visible


def diagnose(states: Mapping[int, RankState], gone: Mapping[int, str], size: int) -> str:
    """Returns a message that names the ranks that block the others and shows their stacks.

    Args:
        states: Last state of each rank that started.
        gone: Ranks that do not answer -> what is known about it.
        size: Number of ranks of the job.
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
            [*(f"{state} left the job at {state.where}: {state.left}." for state in left[:MAX_SHOWN_RANKS]), *stacks]
        )
    late = _late(states)
    if late and len(late) < len(alive):
        late_ranks = f"{late[0]} is" if len(late) == 1 else f"{format_ranks([state.rank for state in late])} are"
        waited = max((state.waits_s or 0.0 for state in waiting), default=0.0)
        rest = format_ranks([state.rank for state in alive if state not in late])
        have = "has" if len(alive) - len(late) == 1 else "have"
        head = f"{late_ranks} late: {rest} {have} waited {waited:.0f} s in a collective."
        return "\n".join([head, *_details(late), *_example(waiting)])
    alive_ranks = format_ranks([state.rank for state in alive])
    head = f"{alive_ranks} wait for each other, in collectives that do not match or cannot complete."
    return "\n".join([head, *_details(_distinct(alive))])


def are_sampling(states: Mapping[int, RankState], within_s: float) -> bool:
    """Returns whether all ranks that others wait for are sampling, with a forward in the last `within_s` seconds.

    If every rank seems to wait, as between two forwards, one sampling rank is enough.
    """
    sampling = {state.rank for state in states.values() if state.sampled_s is not None and state.sampled_s <= within_s}
    return bool(sampling) and sampling.issuperset(state.rank for state in _late(states))


def caused_by_other_ranks(states: Mapping[int, RankState], gone: Mapping[int, str], size: int) -> bool:
    """Returns whether other ranks caused a failed collective; arguments as for `diagnose`."""
    return bool(gone or len(states) < size or _left(states) or _late(states))


def format_ranks(numbers: Iterable[int]) -> str:
    """Formats rank numbers, such as "rank 3" or "ranks 0-7, 16"."""
    known = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in known:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(known) == 1 else 'ranks'} {shown}"


def describe_last_phase(state: RankState) -> str:
    """Describes the last known phase of a rank that cannot send its stack."""
    return f"Its last report came from {state.where}, for {state.where_s:.0f} s; its stack is unknown."


def _left(states: Mapping[int, RankState]) -> list[RankState]:
    return [state for state in states.values() if state.left not in ("", DONE)]


def _late(states: Mapping[int, RankState]) -> list[RankState]:
    return [state for state in states.values() if state.waits_s is None and not state.broken and not state.left]


def _missing(
    states: Mapping[int, RankState], gone: Mapping[int, str], absent: Sequence[int], alive: Collection[RankState]
) -> str:
    lines = [f"{format_ranks(absent)} never started."] if absent else []
    hosts: dict[str, list[RankState]] = {}
    for rank in sorted(gone):
        hosts.setdefault(states[rank].host, []).append(states[rank])
    ended = {states[rank].host for rank, known in gone.items() if known == GONE}
    lost = [host for host in hosts if host not in {state.host for state in alive} | ended]
    for host in lost[:MAX_SHOWN_RANKS]:
        lines.append(
            f"No rank of this job answers on host {host}: {format_ranks([state.rank for state in hosts[host]])}."
        )
    if len(lost) > MAX_SHOWN_RANKS:
        lines.append(f"... nor on {len(lost) - MAX_SHOWN_RANKS} more hosts.")
    lines += [
        f"{states[rank]} {gone[rank]}. {describe_last_phase(states[rank])}" for rank in sorted(gone)[:MAX_SHOWN_RANKS]
    ]
    if len(gone) > MAX_SHOWN_RANKS:
        lines.append(f"... and {len(gone) - MAX_SHOWN_RANKS} more: {format_ranks(sorted(gone)[MAX_SHOWN_RANKS:])}")
    waiting = [state for state in alive if state.waits_s is not None]
    return "\n".join([*lines, *_example(waiting)])


def _details(states: Sequence[RankState]) -> list[str]:
    lines = []
    for state in states[:MAX_SHOWN_RANKS]:
        lines.append(f"{state}, at {state.where} for {state.where_s:.0f} s:")
        lines.append(textwrap.indent(state.stack, "  "))
    if len(states) > MAX_SHOWN_RANKS:
        lines.append(f"... and {len(states) - MAX_SHOWN_RANKS} more")
    return lines


def _example(waiting: Sequence[RankState]) -> list[str]:
    if not waiting:
        return []
    longest = max(waiting, key=lambda state: state.waits_s or 0.0)
    innermost = "\n".join(longest.stack.splitlines()[-EXAMPLE_LINES:])
    return [
        f"One of the waiting ranks, {longest}, at {longest.where} for {longest.where_s:.0f} s:",
        textwrap.indent(innermost, "  "),
    ]


def _distinct(states: Sequence[RankState]) -> list[RankState]:
    """Returns the first rank of each distinct position in the code."""
    return list({(state.where, state.stack): state for state in reversed(states)}.values())[::-1]
