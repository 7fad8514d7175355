"""Two hosts on one machine: network namespaces with a cable between them, each with a hostname that nobody resolves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

NET = "10.77.31"
COMMAND_TIMEOUT_S = 30
ALONE_S = 30
"""A host that waits so long for one that has failed waits in vain."""
STACKS_S = 0.5
"""Python prints the stacks of an aborted process in this time: those of two are not mixed."""
LAST_WORDS_S = 10
"""An aborted launcher ends in this time."""


class NoRightsError(RuntimeError):
    pass


class Hosts:
    """`names` are the hosts; `address(k)` is that of host k on its interface `cable`."""

    def __init__(self) -> None:
        self.names = [f"mrl{os.getpid()}a", f"mrl{os.getpid()}b"]
        self.folders = [Path("/etc/netns") / name for name in self.names]
        try:
            self._up()
        except (OSError, NoRightsError) as error:
            self.down()
            raise NoRightsError(str(error)) from error

    def _up(self) -> None:
        for name, folder in zip(self.names, self.folders, strict=True):
            _ip("netns", "add", name)
            folder.mkdir(parents=True)  # mounted over /etc there: a name server that is not reachable costs 10 s a call
            folder.joinpath("resolv.conf").write_text("options timeout:1 attempts:1\n")
            folder.joinpath("nsswitch.conf").write_text("hosts: files\n")
            folder.joinpath("hosts").write_text("127.0.0.1 localhost\n")
        first, second = self.names
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for number, name in enumerate(self.names):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")

    def address(self, number: int) -> str:
        return f"{NET}.{number + 1}"

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
    ) -> tuple[list[int | None], str]:
        """Runs `words` on both hosts at once, NODE_RANK is the host's number; their statuses, and what they said.

        A host that has not ended in time, or soon after the other one failed, has no status: its processes were
        aborted, and their stacks are in what it said.
        """
        files = [folder / f"{name}.txt" for name in self.names]
        processes = [
            self.start(number, words, {**environment, "NODE_RANK": str(number), "PYTHONFAULTHANDLER": "1"}, file)
            for number, file in enumerate(files)
        ]
        deadline = time.monotonic() + timeout_s
        while None in (statuses := [process.poll() for process in processes]) and time.monotonic() < deadline:
            if any(statuses):
                deadline = min(deadline, time.monotonic() + ALONE_S)
            time.sleep(0.1)
        self._end(signal.SIGABRT)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_S)
        self._end(signal.SIGKILL)
        told = (f"host {number}, status {statuses[number]}:\n{file.read_text()}" for number, file in enumerate(files))
        return statuses, "\n".join(told)

    def start(
        self, number: int, words: Sequence[str], environment: Mapping[str, str], file: Path
    ) -> subprocess.Popen[bytes]:
        """Runs `words` on a host, in the folder of `file`, where its output goes."""
        name = self.names[number]
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        with file.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, *rename, *words],
                cwd=file.parent, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _end(self, number: signal.Signals) -> None:
        """Sends a signal to all that runs on the hosts: ranks, also without a launcher, before launchers."""
        for name in self.names:
            for process in sorted(map(int, _ip("netns", "pids", name).split()), reverse=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
                    time.sleep(STACKS_S if number == signal.SIGABRT else 0.0)

    def down(self) -> None:
        for name, folder in zip(self.names, self.folders, strict=True):
            if name in _ip("netns", "list").split():
                _ip("netns", "delete", name)
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NoRightsError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
