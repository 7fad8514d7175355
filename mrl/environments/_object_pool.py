"""Environments of a class that a script passed as a Python object: they run in this process, without limits.

A class without a path cannot be imported by a worker process. `ObjectPool` has the methods of `EnvironmentPool` that
episodes use. Each command is executed at once, and its reply is returned by the next `poll`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from mrl.distributed.worker_processes import protocol
from mrl.environments._commands import answer
from mrl.environments._factory import find_environment
from mrl.environments._messages import decode
from mrl.environments._schemas import schema_of
from mrl.environments.base import Action, Environment, Schema
from mrl.environments.pool import Failure, Reply
from mrl.errors import UserError


class ObjectPool(AbstractContextManager["ObjectPool"]):
    """Environments of several episodes in this process.

    Attributes:
        tools: Schemas of the environment's tools, for the chat template.
    """

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Makes an environment and reads its tools.

        Args:
            name: Name of the class, from `user_code.object_name`.
            kwargs: Arguments of its constructor.

        Raises:
            UserError: The class is unknown here, or an environment cannot be constructed.
        """
        self._name = name
        self._make, _ = find_environment(name, kwargs)
        try:
            self.tools: list[Schema] = [schema_of(tool) for tool in self._make().tools]
        except UserError:
            raise
        except Exception as error:  # a user's class may raise anything
            raise UserError(f"environment '{name}' cannot be made: {protocol.raised(error)}.") from error
        self._environments: dict[int, Environment] = {}
        self._tickets: dict[str, int] = {}
        self._labels: dict[str, str] = {}
        self._turns: dict[str, int] = {}
        self._count = count()
        self._replies: list[Reply] = []

    def open(self, episode: str, seed: int, row: Mapping[str, Any], label: str = "") -> None:
        """Starts an episode; the arguments are those of `EnvironmentPool.open`."""
        if episode in self._tickets:
            raise ValueError(f"episode '{episode}' is open")
        self._tickets[episode], self._labels[episode] = next(self._count), label or f"episode {episode}"
        self._turns[episode] = 0
        self._execute("open", episode, seed, copy.deepcopy(dict(row)))

    def send(self, episode: str, action: Action) -> None:
        """Sends the next action to an episode that has replied."""
        self._turns[episode] += 1
        self._execute("step", episode, action)

    def close(self, episode: str) -> None:
        """Ends an episode and drops its outstanding reply; does nothing for a failed episode."""
        ticket = self._tickets.pop(episode, None)
        if ticket is not None:
            self._replies = [reply for reply in self._replies if reply.episode != episode]
            answer(self._environments, self._make, "close", ticket, raises=(KeyboardInterrupt,))

    def poll(self) -> list[Reply]:
        """Returns the replies to the commands since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def wait(self, seconds: float) -> list[Reply]:
        """Returns as `poll` does; there is nothing to wait for."""
        return self.poll()

    def shutdown(self) -> None:
        """Closes all environments."""
        for episode in list(self._tickets):
            self.close(episode)

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _execute(self, word: str, episode: str, *args: Any) -> None:
        ticket = self._tickets[episode]
        fields = answer(self._environments, self._make, word, ticket, *args, raises=(KeyboardInterrupt,))
        if "observation" in fields:
            self._replies.append(Reply(episode, decode(fields["observation"])))
            return
        del self._tickets[episode]
        where = f"environment '{self._name}' failed on {self._labels[episode]}, turn {self._turns[episode]}"
        self._replies.append(Reply(episode, failure=Failure(fields["failure"], f"{where}: {fields['message']}")))
