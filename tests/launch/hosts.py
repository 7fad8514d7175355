"""Two hosts on one machine: network namespaces with a cable between them, each with a hostname that nobody resolves."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NET = "10.77.31"
COMMAND_TIMEOUT_S = 10


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

    def command(self, number: int, *words: str) -> list[str]:
        """The command that runs `words` on a host."""
        name = self.names[number]
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
        return ["ip", "netns", "exec", name, *rename, *words]

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
