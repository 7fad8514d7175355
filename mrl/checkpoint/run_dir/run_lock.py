"""Lock on a run folder: one job at a time trains into it, also where several hosts share the disk.

Each job that acquires the lock adds the file with the next number to `owner/`, by a hard link, which only one job can
create. The highest number is the owner. When its job ends, the file is renamed to `.free`. So numbers only grow, and if
two jobs find the same dead owner, only one of them gets the next number.

    owner/00000003.json    host, process, start time, SLURM job; touched every few seconds while the job runs

Any rank that can see the owner's process decides exactly whether it runs: same kernel, same process id, and the same
start time of the process, since ids are reused. A SLURM job that was requeued takes over from its earlier run.
Otherwise the file is watched for as long as its owner may be silent. This uses only the local clock and whether the
file changes, because clocks of hosts differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch.distributed as dist

from mrl.checkpoint.io.atomic_files import write_file
from mrl.distributed import launch
from mrl.distributed.collectives import broadcast_from_rank_0, raise_on_all_ranks
from mrl.errors import UserError

BEATS = 8
"""Heartbeats (touches of the file) per allowed time of silence."""

MAX_SILENCE_S = 600.0
"""Upper bound of an owner's allowed silence, seconds; a file with a larger value is invalid."""

POLL_S = 0.25
"""Interval between reads of a file that is watched, seconds."""

_NAME = re.compile(r"(\d{8})\.(json|free)")


@dataclass(frozen=True)
class LockOwner:
    """The job that trains into a folder, described by its rank 0; stored as JSON.

    Attributes:
        host: Host name.
        pid: Process id of rank 0.
        space: Scope of the process id: boot id of the kernel, and pid namespace.
        born: Start time of the process, in the kernel's units.
        ranks: World size of the job.
        since: Wall-clock time of the start, for people.
        silent_s: Time without a heartbeat after which the owner counts as dead, seconds.
        job: SLURM job id; "" without SLURM.
        life: SLURM's restart count of the job.
        token: Random text that identifies this attempt to acquire the lock.
    """

    host: str
    pid: int
    space: str
    born: str
    ranks: int
    since: str
    silent_s: float
    job: str = ""
    life: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host} ({self.ranks} rank(s){job}, since {self.since})"

    @property
    def stop(self) -> str:
        """Command that stops the job."""
        return f"scancel {self.job}" if self.job else f"`kill {self.pid}` on {self.host}"

    def is_alive(self) -> bool | None:
        """Returns whether the owner's process runs; None if it cannot be seen from this process."""
        return None if self.space != _pid_namespace() else _start_time(self.pid) == self.born

    def precedes(self, other: LockOwner) -> bool:
        """Returns whether this is an earlier run, ended by SLURM, of the same job as `other`."""
        return self.job != "" and self.job == other.job and self.life < other.life


def current_owner(ranks: int, silent_s: float) -> LockOwner:
    """Describes this process as an owner.

    Args:
        ranks: World size of the job.
        silent_s: Allowed time without a heartbeat, seconds.
    """
    slurm = launch.get_env("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    life = slurm.get("SLURM_RESTART_COUNT", "")
    return LockOwner(
        socket.gethostname(), os.getpid(), _pid_namespace(), _start_time(os.getpid()), ranks,
        time.strftime("%Y-%m-%dT%H:%M:%S%z"), silent_s, slurm.get("SLURM_JOB_ID", ""),
        int(life) if life.isdecimal() else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class LockFile:
    """A file of `owner/`; `owner` is None if the file is free or not readable as an owner's."""

    number: int
    is_free: bool
    owner: LockOwner | None


class RunLock:
    """The lock held by this job, from `acquire_run_lock` to `close`; without effect on ranks other than 0.

    Attributes:
        notes: One line if the lock was taken over from a job that did not end properly.
    """

    def __init__(self, claims: LockFiles | None, number: int, notes: list[str]) -> None:
        """Wraps the acquired claim; called by `acquire_run_lock`."""
        self.notes = notes
        self._claims, self._number = claims, number
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start_heartbeat(self, silent_s: float, on_lost: Callable[[str], object]) -> None:
        """Starts the heartbeat thread; it calls `on_lost` with a message if another job has taken the folder."""
        if self._claims is not None:
            args = (self._claims, silent_s / BEATS, on_lost)
            self._thread = threading.Thread(target=self._heartbeat, args=args, name="owner", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Checks that this job still owns the folder; called before steps that two jobs must not both do.

        Raises:
            UserError: Another job has taken the folder.
        """
        if self._claims is not None and (why := self._claims.lost(self._number)):
            raise UserError(why)

    def close(self) -> None:
        """Stops the heartbeat and frees the lock."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._claims is not None:
            self._claims.free(self._number)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _heartbeat(self, claims: LockFiles, interval_s: float, lost: Callable[[str], object]) -> None:
        while not self._closed.wait(interval_s):
            with contextlib.suppress(OSError):  # a disk that does not answer now may do so at the next beat
                claims.touch(self._number)
            if why := claims.lost(self._number):
                lost(why)
                return


def acquire_run_lock(root: Path, owner: LockOwner, rank: int) -> RunLock:
    """Collective over the job: acquires the lock on a run folder. Nothing else may be written into it before.

    Args:
        root: Run folder; it exists.
        owner: Owner record of rank 0.
        rank: Global rank of this process.

    Raises:
        UserError: The job that owns it still runs, or the folder cannot be written; raised on all ranks.
    """
    claims = LockFiles(root / "owner")
    last_dead, note = 0, ""
    while True:
        last, number = None, 0
        with raise_on_all_ranks():
            if rank == 0:
                last = claims.last()
                if last is None or last.is_free or last.number <= last_dead:
                    number = claims.acquire(last.number + 1 if last else 1, owner)
        last, number = broadcast_from_rank_0((last, number))
        if number:
            return RunLock(claims if rank == 0 else None, number, [note] if note else [])
        if last is None or last.is_free or last.number <= last_dead:
            continue  # another job was faster
        why = _takeover_reason(claims, last, owner, rank)
        if why:
            last_dead = last.number
            note = f"took the run folder over from {last.owner or 'an unreadable owner file'}, {why}"


def _takeover_reason(claims: LockFiles, last: LockFile, me: LockOwner, rank: int) -> str:
    """Collective over the job: returns why an owner counts as dead; "" if its file has changed since.

    Raises:
        UserError: The owner still runs.
    """
    seen: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, last.owner.is_alive() if last.owner else None)
    if False in seen:
        return "which has ended"
    why = ""
    with raise_on_all_ranks():
        if rank == 0:
            if last.owner is not None and last.owner.precedes(me) and True not in seen:
                why = "which was this job before it was queued again"
            elif True in seen or claims.has_changed(last):
                now = claims.last()
                if now == last:
                    raise UserError(_in_use_message(claims.folder.parent, last.owner))
            else:
                why = f"which gave no sign of life for {_allowed_silence_s(last.owner):.0f} s"
    return str(broadcast_from_rank_0(why))


class LockFiles:
    """Lock files in `owner/`, numbered by acquisition; only rank 0 uses them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def last(self) -> LockFile | None:
        """Returns the lock file with the highest number; None if there is none."""
        while found := self._numbers():
            number = max(found)
            if found[number] == "free":
                return LockFile(number, True, None)
            owner = _decode(self._path(number))
            if owner is not None or self._numbers() == found:  # otherwise a newer claim replaced it meanwhile
                return LockFile(number, False, owner)
        return None

    def acquire(self, number: int, owner: LockOwner) -> int:
        """Takes the lock by creating lock file `number`; returns the number, or 0 if another job was faster.

        On success removes the files with lower numbers. On failure removes its own.

        Args:
            number: Number of the new file, above all existing ones.
            owner: Identity of this job, the content of the file.

        Raises:
            UserError: The folder cannot be written.
        """
        path, content = self._path(number), json.dumps(asdict(owner), indent=1).encode()
        temporary = self.folder / f".{owner.token}"
        try:
            self.folder.mkdir(exist_ok=True)
            try:
                write_file(temporary, content)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)  # NFS may lose the reply: the content of the file decides, read below
            finally:
                temporary.unlink(missing_ok=True)
            is_ours = (current := _decode(path)) is not None and current.token == owner.token
        except OSError as error:
            raise UserError(
                f"run.output_dir '{self.folder.parent}' cannot be locked: {error}. Make it writable, free space, or "
                "choose another folder."
            ) from error
        found = self._numbers()
        if is_ours and max(found) > number:
            path.unlink(missing_ok=True)
        if not is_ours or max(found) > number:
            return 0
        for each in found:
            if each < number:
                for kind in ("json", "free"):
                    with contextlib.suppress(OSError):
                        self._path(each, kind).unlink(missing_ok=True)
        return number

    def has_changed(self, claim: LockFile) -> bool:
        """Watches a file for its owner's allowed silence; returns whether it was touched, renamed or superseded."""
        before, deadline = self._state_of(claim), time.monotonic() + _allowed_silence_s(claim.owner)
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if self._state_of(claim) != before:
                return True
        return False

    def touch(self, number: int) -> None:
        """Writes a heartbeat: updates the modification time of the lock file."""
        os.utime(self._path(number))

    def free(self, number: int) -> None:
        """Marks the folder as free; a rename needs no space on a full disk."""
        with contextlib.suppress(OSError):
            self._path(number).rename(self._path(number, "free"))

    def lost(self, number: int) -> str:
        """Returns which job has taken the folder since lock file `number`; "" if none, or if it cannot be read now."""
        try:
            found = self._numbers()
        except OSError:
            return ""
        if found and max(found) == number and found[number] == "json":
            return ""
        last = self.last() if found else None
        who = f"{last.owner} has taken it" if last and last.owner else "its file in owner/ is gone"
        return f"run.output_dir '{self.folder.parent}' no longer belongs to this job: {who}. This job ends."

    def _numbers(self) -> dict[int, str]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return {}
        found = [match.groups() for name in names if (match := _NAME.fullmatch(name))]
        return {int(number): kind for number, kind in sorted(found, key=lambda pair: pair[1], reverse=True)}

    def _path(self, number: int, kind: str = "json") -> Path:
        return self.folder / f"{number:08d}.{kind}"

    def _state_of(self, claim: LockFile) -> tuple[Any, ...]:
        """Returns highest number, mtime and content of a claim's file, bypassing NFS caches by opening it."""
        try:
            with self._path(claim.number).open("rb") as stream:
                return max(self._numbers()), os.fstat(stream.fileno()).st_mtime_ns, stream.read()
        except FileNotFoundError:
            return (None,)


def _in_use_message(root: Path, owner: LockOwner | None) -> str:
    who = str(owner) if owner else "a job with an unreadable owner file"
    stop = f", stop it ({owner.stop})" if owner else ""
    return (
        f"run.output_dir '{root}' is in use: {who} trains into it, and two jobs would overwrite each other's files. "
        f"Wait for it{stop}, or choose another run.output_dir. If this is a copy of another run folder, remove its "
        "'owner' folder first."
    )


def _allowed_silence_s(owner: LockOwner | None) -> float:
    return owner.silent_s if owner else 60.0


def _decode(path: Path) -> LockOwner | None:
    """Reads an owner file; None if it is missing or invalid."""
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    kinds = {"pid": (int,), "ranks": (int,), "life": (int,), "silent_s": (int, float)}
    if not isinstance(values, dict) or set(values) != {each.name for each in fields(LockOwner)}:
        return None
    if any(type(value) not in kinds.get(name, (str,)) for name, value in values.items()):
        return None
    return LockOwner(**values) if values["pid"] > 0 and 0 < values["silent_s"] <= MAX_SILENCE_S else None


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Returns the start time of a process; "" if it does not exist or is a zombie."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except PermissionError:
        pass  # another user's
    try:
        rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if rest[0] in "ZX" else rest[19]
    except FileNotFoundError:
        with contextlib.suppress(psutil.Error):
            return str(psutil.Process(pid).create_time())
        return ""
