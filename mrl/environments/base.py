"""The interface of an environment: what an episode talks with.

An environment is a class with Gymnasium's and OpenEnv's words, `reset` and `step`, over text: an action is the
assistant's message, an observation is the chat messages that follow it. It is a file in this folder that defines
`ENVIRONMENT`, or a class of a user's own, `path/to/file.py:Name`; objects of other libraries fit too (`_adapters.py`).
One object lives for one episode, in a worker process under limits of time and memory (`pool.py`). A whole one:

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

**An episode is a function of its seed, its row and its actions.** Random numbers come from the seed, never from the
clock: a worker that dies takes its other episodes with it, and they are replayed from their actions. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""A chat message: "role" ("user", "tool" or "system") and "content"; a tool's has its "name" too."""

Tool = Callable[..., Any]
"""A function with type hints and a Google docstring, which the model may call."""

Schema = dict[str, Any]
"""What chat templates are given of a tool: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True)
class ToolCall:
    """A tool that the assistant calls.

    Attributes:
        name: Of the tool.
        arguments: By name, JSON values.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Action:
    """The assistant's message of one turn.

    Attributes:
        text: As it was sampled, without the end token.
        content: The text without what belongs to tool calls; the text itself where no tool format is used.
        tool_calls: What it calls, in order.
        errors: What looked like a call and is none, one sentence each.
    """

    text: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What follows a `reset` or an action.

    Attributes:
        messages: Follow the row's prompt (of a reset; often none), or the assistant's message.
        reward: Of this turn, finite; None where the turn has none.
        terminated: The task is over.
        truncated: The environment's own limit is reached.
        info: Texts and finite numbers to record with the turn.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, float | str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """The episode ends here: OpenEnv's word for either of Gymnasium's two."""
        return self.terminated or self.truncated

    @staticmethod
    def user(text: str, reward: float | None = None, info: Mapping[str, float | str] | None = None) -> Observation:
        """One user message, and the episode goes on."""
        return Observation(({"role": "user", "content": text},), reward, info=dict(info or {}))


class Environment(ABC):
    """One episode's counterpart; keyword arguments of its constructor come from the config.

    Attributes:
        network: It may make sockets; of the class, and a foreign class may have it too.
    """

    network: bool = False

    @property
    def tools(self) -> Sequence[Tool | Schema]:
        """Tools that the prompt offers to the model, the same for every row; none unless overridden."""
        return ()

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Begins the episode.

        Args:
            seed: For all that is random; the samples of one prompt have the same seed.
            row: The columns of the data row.

        Returns:
            What follows the row's prompt: no messages where the prompt says all.
        """

    @abstractmethod
    def step(self, action: Action) -> Observation:
        """Answers the assistant; what it raises ends the episode as failed."""

    def close(self) -> None:
        """The episode, which has begun, is over or given up; what it holds is let go."""
        return
