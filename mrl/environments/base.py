"""Interface of an environment for multi-turn episodes.

An environment is a class with `reset` and `step`, as in Gymnasium and OpenEnv, over text: an action is the assistant's
message, an observation is the chat messages that follow it. It is a file in this folder that defines `ENVIRONMENT`, or
a user's class, `path/to/file.py:Name`; objects of other libraries are adapted (`_adapters.py`). Each episode has its
own object, in a worker process under limits of time and memory (`pool.py`). A complete example:

    class Guess(Environment):
        def reset(self, seed, row):
            self.number = random.Random(seed).randint(1, 100)
            return Observation.user("I think of a number from 1 to 100. Which is it?")

        def step(self, action):
            if not action.text.strip().isdigit():
                return Observation.user("Write a number.")
            if int(action.text) == self.number:
                return Observation(reward=1.0, terminated=True)
            return Observation.user("higher" if int(action.text) < self.number else "lower")

**Environments must be deterministic in the seed, the row and the actions.** If a worker dies, its other episodes are
replayed on a new worker from their recorded actions, and the replayed observations must be equal. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: "role" ("user", "tool" or "system") and "content"; a tool's message also has a "name"."""

Tool = Callable[..., Any]
"""A function that the model may call, with type hints and a Google-style docstring."""

Schema = dict[str, Any]
"""JSON schema of a tool for chat templates: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the assistant.

    Attributes:
        name: Name of the tool, which may be unknown.
        arguments: JSON values by parameter name.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """The assistant's message of one turn.

    Attributes:
        text: Sampled text, without the end token.
        content: Text before the first tool call; equal to `text` if no tool format is configured.
        tool_calls: Parsed calls, in order.
        errors: Parse errors of malformed calls, one sentence each.
    """

    text: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """Result of `reset` or `step`.

    Attributes:
        messages: Messages to append to the prompt (`reset`; often none) or to the assistant's message (`step`).
        reward: Reward of this turn, finite; None for no reward.
        terminated: True if the task is finished.
        truncated: True if a limit of the environment ended the episode.
        info: Texts and finite numbers that are recorded with the turn.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, float | str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """True if the episode is over: `terminated` or `truncated` (OpenEnv's `done`)."""
        return self.terminated or self.truncated

    @staticmethod
    def user(text: str, reward: float | None = None, info: Mapping[str, float | str] | None = None) -> Observation:
        """Returns an observation with one user message; the episode continues."""
        return Observation(({"role": "user", "content": text},), reward, info=dict(info or {}))


class Environment(ABC):
    """Environment of one episode; the config's kwargs are passed to the constructor.

    Attributes:
        network: Class attribute, True to allow sockets; also read from classes of other libraries.
    """

    network: bool = False

    @property
    def tools(self) -> Sequence[Tool | Schema]:
        """Tools that the prompt offers to the model, the same for every row; default: none."""
        return ()

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Starts the episode.

        Args:
            seed: Seed of all random numbers; equal for the samples of one prompt.
            row: Columns of the data row.

        Returns:
            Observation whose messages, if any, follow the row's prompt.
        """

    @abstractmethod
    def step(self, action: Action) -> Observation:
        """Responds to the assistant's message; an exception ends the episode as failed."""

    def close(self) -> None:
        """Releases resources after the episode has ended or was aborted."""
        return
