"""Checks of the output folder: it is writable, has space, and is the same folder on all hosts.

All probe files are deleted. A folder that does not exist is not created; its nearest existing parent is checked.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from mrl.commands.doctor.finding import Finding, ok, problem, warning

GB = 1e9
PROBE = ".mrl-doctor-"
PROBE_BYTES = 1 << 20
MIN_FREE_BYTES = 10 * GB
"""Free space expected without a config: logs and checkpoints of a small model."""
SLOW_COMMIT_S = 2.0
"""A write, fsync and rename of 1 MiB takes milliseconds on a healthy disk or network file system."""
APPEAR_S = 5.0
"""Longest wait for another host's file, s; a network file system shows a new file immediately when opened by name."""
SLOW_APPEAR_S = 1.0
GONE_WITH_THE_HOST = ("tmpfs", "ramfs", "overlay", "aufs")


def nearest_existing(folder: Path) -> Path:
    """Returns the folder, or its nearest existing parent."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def filesystem_type(folder: Path, mounts: Mapping[str, str] | None = None) -> str:
    """Returns the type of the file system of a folder: ext4, nfs4, lustre, overlay ...

    Args:
        folder: Folder; it or a parent exists.
        mounts: Mount point -> type; None: those of this host.
    """
    if mounts is None:
        mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    path = nearest_existing(folder).resolve()
    for parent in (path, *path.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return "unknown"


def check_folder(folder: Path, needed_bytes: int | None) -> Iterator[Finding]:
    """Writes, syncs and renames a file of `PROBE_BYTES`, like a checkpoint, and checks the free space.

    Args:
        folder: Output folder of a run.
        needed_bytes: Size of the config's checkpoints; None: no config.
    """
    advice = "make it writable, free space, or choose another run.output_dir"
    try:
        there, kind = nearest_existing(folder), filesystem_type(folder)
    except OSError as error:
        yield problem("output folder", f"'{folder}': {error.strerror}", advice)
        return
    if not there.is_dir():
        yield problem("output folder", f"'{there}' is a file", "choose another run.output_dir")
        return
    probe = there / f"{PROBE}{os.getpid()}-{secrets.token_hex(4)}"
    start = time.monotonic()
    try:
        _commit(probe)
    except OSError as error:
        yield problem("output folder", f"'{there}': {error.strerror} ({kind})", advice)
        return
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    yield from check_commit(there, kind, time.monotonic() - start)
    yield from check_space(there, needed_bytes)


def check_commit(folder: Path, kind: str, seconds: float) -> Iterator[Finding]:
    """Checks the time of writing the probe, and that the file system outlives the host.

    Args:
        folder: Folder of the probe.
        kind: Type of its file system.
        seconds: Time of the write, s.
    """
    if seconds > SLOW_COMMIT_S:
        found = f"'{folder}' ({kind}) takes {seconds:.1f} s for a write, fsync and rename of 1 MiB"
        yield warning("output folder", found, "use a faster file system")
    elif kind in GONE_WITH_THE_HOST:
        found = f"'{folder}' is on {kind}: checkpoints are lost with the host or container"
        yield warning("output folder", found, "use a folder on a disk, or one that is mounted into the container")
    else:
        yield ok("output folder", f"'{folder}' ({kind}): write, fsync and rename take {1000 * seconds:.0f} ms")


def check_space(folder: Path, needed_bytes: int | None) -> Iterator[Finding]:
    """Checks the free space against the checkpoints of the config, or `MIN_FREE_BYTES`."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if needed_bytes is not None and free < needed_bytes:
        yield problem(
            "free space",
            f"{free / GB:.1f} GB in '{folder}'; checkpoints take {needed_bytes / GB:.1f} GB",
            "free space, keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_best), or choose another "
            "run.output_dir",
        )
    elif needed_bytes is None and free < MIN_FREE_BYTES:
        yield warning("free space", f"{free / GB:.1f} GB in '{folder}'", "give CONFIG to compare with its checkpoints")
    else:
        wanted = "" if needed_bytes is None else f"; checkpoints take {needed_bytes / GB:.2f} GB"
        yield ok("free space", f"{free / GB:.1f} GB{wanted}")
    if space.f_files and not space.f_favail:
        yield problem("free space", f"'{folder}' has no inode left", "delete files there")


def _commit(probe: Path) -> None:
    """Writes the probe as a checkpoint is written: to a temporary name, synced, renamed, the folder synced."""
    aside, final = probe / "aside", probe / "final"
    aside.mkdir(parents=True)
    content = os.urandom(PROBE_BYTES)
    with (aside / "file").open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    aside.rename(final)
    descriptor = os.open(probe, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if (final / "file").read_bytes() != content:
        raise OSError(0, "the content read back differs from what was written")


def write_probe(folder: Path, token: str, name: str) -> None:
    """Writes a probe file that another host looks for with `wait_for_probes`."""
    path = nearest_existing(folder) / f"{PROBE}{token}-{name}"
    with path.open("w") as stream:
        stream.write(token + name)
        stream.flush()
        os.fsync(stream.fileno())


def wait_for_probes(folder: Path, token: str, names: Sequence[str], patience_s: float = APPEAR_S) -> list[float | None]:
    """Returns, for each name, the time in s until the file of `write_probe` is visible here; None: it did not appear.

    Args:
        folder: Output folder of a run.
        token: Token of this diagnosis.
        names: Names that were passed to `write_probe`.
        patience_s: Longest wait for all files together, s.
    """
    start = time.monotonic()
    seen: dict[str, float] = {}
    while True:
        for name in names:
            if name not in seen and _read(nearest_existing(folder) / f"{PROBE}{token}-{name}") == token + name:
                seen[name] = time.monotonic() - start
        if len(seen) == len(names) or time.monotonic() - start > patience_s:
            return [seen.get(name) for name in names]
        time.sleep(0.1)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def delete_probes(folder: Path, token: str) -> None:
    """Deletes all probe files of `write_probe`."""
    for path in nearest_existing(folder).glob(f"{PROBE}{token}-*"):
        path.unlink(missing_ok=True)


def check_shared(folder: Path, seconds: Mapping[str, float | None]) -> Iterator[Finding]:
    """Checks that all hosts see the same folder.

    Args:
        folder: Output folder of a run.
        seconds: Host -> s until it and rank 0 saw each other's file; None: not seen.
    """
    apart = [host for host, waited in seconds.items() if waited is None]
    if apart:
        yield problem(
            "shared folder",
            f"'{nearest_existing(folder)}' of {', '.join(apart)} is not rank 0's: neither sees the other's files",
            "set run.output_dir to a folder that all hosts share (NFS, Lustre)",
        )
        return
    slowest = max(seconds, key=lambda host: seconds[host] or 0.0)
    waited = seconds[slowest] or 0.0
    if waited > SLOW_APPEAR_S:
        yield warning(
            "shared folder",
            f"a new file is visible on {slowest} after {waited:.1f} s",
            "mount with a shorter attribute cache",
        )
    else:
        yield ok("shared folder", f"'{nearest_existing(folder)}' is the same on {len(seconds) + 1} hosts")
