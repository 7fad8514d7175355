"""Who trains into a run folder: one job at a time, also where several hosts share the disk.

Owns the folder `owner/` in it. Each job that takes the run folder adds one file there with the next number, by a link,
which only one can make; the highest number is the owner. A file is renamed to `.free` when its job ends. So numbers
only grow, and of two jobs that find the same dead owner only one gets the next number.

    owner/00000003.json    host, process, since when, SLURM job; touched every few seconds while the job lives

Whether an owner lives is told exactly by any rank that can see its process: same kernel, same process ids, and the
start of the process, since ids are used again. A SLURM job that was queued again follows its own earlier life. Where
neither is so, the file is watched for as long as its owner may be silent: by this host's own clock, since clocks of
hosts differ, and by whether it changes at all.
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
from mrl.distributed.collectives import from_first_rank, together
from mrl.errors import UserError

BEATS = 8
"""Touches of the file within the time of silence that is allowed."""

LONGEST_SILENCE_S = 600.0
"""Signs of life come more often than this, whatever a file says."""

POLL_S = 0.25
"""Between two looks at a file that is watched."""

_NAME = re.compile(r"(\d{8})\.(json|free)")


@dataclass(frozen=True)
class Owner:
    """A job that trains into a folder, as its rank 0 tells of itself.

    Attributes:
        space: Of the process id: the boot of the kernel, and the namespace.
        born: When the process was started, as the kernel counts it.
        ranks: Of the job.
        since: Time of day, for people.
        silent_s: Without a touch for so long it is gone.
        job: SLURM's number of it; "" none.
        life: How often SLURM has queued it again.
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
        """How a person ends it."""
        return f"scancel {self.job}" if self.job else f"`kill {self.pid}` on {self.host}"

    def lives(self) -> bool | None:
        """Whether its process runs; None: that cannot be seen from here."""
        return None if self.space != _space() else _born(self.pid) == self.born

    def precedes(self, other: Owner) -> bool:
        """Whether it is an earlier life of the other one, which SLURM has ended."""
        return self.job != "" and self.job == other.job and self.life < other.life


def this_process(ranks: int, silent_s: float) -> Owner:
    """This process as an owner; arguments as of `Owner`."""
    slurm = launch.variables("SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    life = slurm.get("SLURM_RESTART_COUNT", "")
    return Owner(
        socket.gethostname(), os.getpid(), _space(), _born(os.getpid()), ranks, time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        silent_s, slurm.get("SLURM_JOB_ID", ""), int(life) if life.isdecimal() else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A file of `owner/`. `owner` is None where the file cannot be read as one."""

    number: int
    is_free: bool
    owner: Owner | None


class Ownership:
    """A run folder that is this job's, from `take` to `close`; does nothing on ranks but 0."""

    def __init__(self, claims: Claims | None, number: int, notes: list[str]) -> None:
        """From `take`; `notes` has a line where the folder was taken over from a job that did not end in order."""
        self.notes = notes
        self._claims, self._number = claims, number
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, silent_s: float, lost: Callable[[str], object]) -> None:
        """Begins to touch the file; `lost` hears, in a thread, that another job has taken the folder."""
        if self._claims is not None:
            args = (self._claims, silent_s / BEATS, lost)
            self._thread = threading.Thread(target=self._beat, args=args, name="owner", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Before what two jobs must not both do.

        Raises:
            UserError: Another job has taken the folder.
        """
        if self._claims is not None and (why := self._claims.lost(self._number)):
            raise UserError(why)

    def close(self) -> None:
        """The folder is free again."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._claims is not None:
            self._claims.free(self._number)

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _beat(self, claims: Claims, interval_s: float, lost: Callable[[str], object]) -> None:
        while not self._closed.wait(interval_s):
            with contextlib.suppress(OSError):  # a disk that does not answer now may do so at the next beat
                claims.touch(self._number)
            if why := claims.lost(self._number):
                lost(why)
                return


def take(root: Path, me: Owner, rank: int) -> Ownership:
    """Collective over the job: makes this job the owner of a run folder. Nothing else in it may be written before.

    Args:
        root: The run folder; it is there.
        me: Rank 0's.
        rank: Of the job.

    Raises:
        UserError: Another job lives that owns it, or the folder cannot be written; on all ranks.
    """
    claims = Claims(root / "owner")
    beaten, note = 0, ""
    while True:
        last, number = None, 0
        with together():
            if rank == 0:
                last = claims.last()
                if last is None or last.is_free or last.number <= beaten:
                    number = claims.add(last.number + 1 if last else 1, me)
        last, number = from_first_rank((last, number))
        if number:
            return Ownership(claims if rank == 0 else None, number, [note] if note else [])
        if last is None or last.is_free or last.number <= beaten:
            continue  # another job was faster
        why = _end_of(claims, last, me, rank)
        if why:
            beaten = last.number
            note = f"took the run folder over from {last.owner or 'an owner that cannot be read'}, {why}"


def _end_of(claims: Claims, last: Claim, me: Owner, rank: int) -> str:
    """Collective over the job: why an owner is none any more; "" it has changed since, look again.

    Raises:
        UserError: It lives.
    """
    seen: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, last.owner.lives() if last.owner else None)
    if False in seen:
        return "which has ended"
    why = ""
    with together():
        if rank == 0:
            if last.owner is not None and last.owner.precedes(me) and True not in seen:
                why = "which was this job before it was queued again"
            elif True in seen or claims.changes(last):
                now = claims.last()
                if now == last:
                    raise UserError(_held(claims.folder.parent, last.owner))
            else:
                why = f"which gave no sign of life for {_silence(last.owner):.0f} s"
    return str(from_first_rank(why))


class Claims:
    """The files of `owner/`; only rank 0 looks at them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def last(self) -> Claim | None:
        """The one with the highest number; None: there is none."""
        while found := self._numbers():
            number = max(found)
            if found[number] == "free":
                return Claim(number, True, None)
            owner = _decode(self._path(number))
            if owner is not None or self._numbers() == found:  # else it has been followed since it was listed
                return Claim(number, False, owner)
        return None

    def add(self, number: int, owner: Owner) -> int:
        """Adds the file of this number; 0: another job was faster.

        Raises:
            UserError: The folder cannot be written.
        """
        path, content = self._path(number), json.dumps(asdict(owner), indent=1).encode()
        fresh = self.folder / f".{owner.token}"
        try:
            self.folder.mkdir(exist_ok=True)
            try:
                write_file(fresh, content)
                with contextlib.suppress(FileExistsError):
                    os.link(fresh, path)  # over NFS an answer may be lost: what counts is whose file is there
            finally:
                fresh.unlink(missing_ok=True)
            is_mine = (mine := _decode(path)) is not None and mine.token == owner.token
        except OSError as error:
            raise UserError(
                f"run.output_dir '{self.folder.parent}' cannot be taken: {error}. Make it writable, free space, or "
                "choose another one."
            ) from error
        found = self._numbers()
        if is_mine and max(found) > number:
            path.unlink(missing_ok=True)
        if not is_mine or max(found) > number:
            return 0
        for each in found:
            if each < number:
                for kind in ("json", "free"):
                    with contextlib.suppress(OSError):
                        self._path(each, kind).unlink(missing_ok=True)
        return number

    def changes(self, claim: Claim) -> bool:
        """Whether a file is touched, renamed or followed while it is watched, as long as its owner may be silent."""
        before, deadline = self._look(claim), time.monotonic() + _silence(claim.owner)
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if self._look(claim) != before:
                return True
        return False

    def touch(self, number: int) -> None:
        """A sign of life."""
        os.utime(self._path(number))

    def free(self, number: int) -> None:
        """The folder is nobody's; it needs no room on a full disk."""
        with contextlib.suppress(OSError):
            self._path(number).rename(self._path(number, "free"))

    def lost(self, number: int) -> str:
        """Who has the folder instead of the owner of this number; "" nobody, or that cannot be seen now."""
        try:
            found = self._numbers()
        except OSError:
            return ""
        if found and max(found) == number and found[number] == "json":
            return ""
        last = self.last() if found else None
        who = f"{last.owner} has taken it" if last and last.owner else "its file in owner/ is gone"
        return f"run.output_dir '{self.folder.parent}' is not this job's any more: {who}. This job ends."

    def _numbers(self) -> dict[int, str]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return {}
        found = [match.groups() for name in names if (match := _NAME.fullmatch(name))]
        return {int(number): kind for number, kind in sorted(found, key=lambda pair: pair[1], reverse=True)}

    def _path(self, number: int, kind: str = "json") -> Path:
        return self.folder / f"{number:08d}.{kind}"

    def _look(self, claim: Claim) -> tuple[Any, ...]:
        """What the disk has now, not what this host remembers: over NFS a file that is opened is asked for."""
        try:
            with self._path(claim.number).open("rb") as stream:
                return max(self._numbers()), os.fstat(stream.fileno()).st_mtime_ns, stream.read()
        except FileNotFoundError:
            return (None,)


def _held(root: Path, owner: Owner | None) -> str:
    who = str(owner) if owner else "an owner that cannot be read"
    stop = f", stop it ({owner.stop})" if owner else ""
    return (
        f"run.output_dir '{root}' is in use: {who} trains into it, and two jobs would overwrite each other's files. "
        f"Wait for it{stop}, or choose another run.output_dir. In a copy of that folder remove 'owner' first."
    )


def _silence(owner: Owner | None) -> float:
    return owner.silent_s if owner else 60.0


def _decode(path: Path) -> Owner | None:
    """None: it is not there, or not what an owner writes."""
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    kinds = {"pid": (int,), "ranks": (int,), "life": (int,), "silent_s": (int, float)}
    if not isinstance(values, dict) or set(values) != {each.name for each in fields(Owner)}:
        return None
    if any(type(value) not in kinds.get(name, (str,)) for name, value in values.items()):
        return None
    return Owner(**values) if values["pid"] > 0 and 0 < values["silent_s"] <= LONGEST_SILENCE_S else None


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _born(pid: int) -> str:
    """When a process was started; "" there is none, or it has ended and waits to be asked."""
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
