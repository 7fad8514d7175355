"""Main function of worker processes: answers the parent's messages until the parent closes the pipe.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.distributed.worker_processes.supervisor import SupervisorArgs, supervise
from mrl.errors import UserError


class ParentPipe:
    """The worker's ends of the pipes from and to its parent.

    Attributes:
        memory_limit_mb: Memory limit of the worker and its descendants together, MiB; 0: unlimited.
    """

    def __init__(self, args: SupervisorArgs) -> None:
        self.memory_limit_mb = args.memory_limit_mb
        self._owner = os.getpid()
        self._key, self._answers = args.key, args.answers
        self._commands = open(args.commands, "rb", closefd=False)  # noqa: SIM115 -- open until the process ends

    def receive(self) -> Any:
        """Waits for the next message; raises EOFError when the parent has closed the pipe."""
        return protocol.read_command(self._commands)

    def send(self, **fields: Any) -> None:
        """Sends a message; raises EOFError in a child process that foreign code forked and returned from."""
        if os.getpid() != self._owner:
            raise EOFError
        line = memoryview(protocol.line(self._key, fields))
        while line:
            line = line[os.write(self._answers, line) :]


def run_worker(work: Callable[[ParentPipe], None]) -> None:
    """Runs `work` in a supervised worker process, with the supervisor's arguments from the command line.

    `work` receives the setup message, sends the ready message {"refusal": "", ...}, and then answers messages. A
    UserError that it raises is sent to the parent as the reason why the worker cannot start.
    """
    supervise(SupervisorArgs.read(sys.argv[1:]), partial(_serve, work))


def _serve(work: Callable[[ParentPipe], None], args: SupervisorArgs) -> None:
    pipe = ParentPipe(args)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            work(pipe)
        except UserError as error:
            pipe.send(refusal=str(error))
