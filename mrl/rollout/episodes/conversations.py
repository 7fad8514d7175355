"""One conversation: whose turn it is, what it may still take, and why it ends.

Owns the limits of `rollout.multi_turn` and what an episode's numbers count. It knows no process: `episodes.py` brings
turns in and observations out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.config import MultiTurnConfig
from mrl.environments.base import Action, Observation
from mrl.errors import UserError
from mrl.rollout.episodes.ledger import Ledger
from mrl.rollout.episodes.rendering import Rendering
from mrl.types import Episode, FinishReason

Read = Callable[[str, str], Action]
"""Reads a turn's text as an action, given the end of the text before it."""

CUT_MARK = "...(truncated)..."


@dataclass
class Conversation:
    """An episode under way.

    Attributes:
        rendering: Makes the tokens of what is observed.
        read: Understands the policy's turns.
        limits: `rollout.multi_turn`.
        ledger: The tokens so far.
        end: Why it is over; None: it goes on.
        before: End of the text before the next turn, in which a chat template may open reasoning.
    """

    rendering: Rendering
    read: Read
    limits: MultiTurnConfig
    ledger: Ledger
    end: str | None = None
    before: str = ""

    def __post_init__(self) -> None:
        """Nothing was said yet."""
        self._turn: tuple[int, ...] = ()
        self._num_turns = self._num_answers = self._num_calls = self._num_unread = 0
        self._rewards: list[float] = []
        self._facts: dict[str, float | str] = {}
        self._error: str | None = None
        self._final_text = ""
        self._turns: list[tuple[str, str]] = []

    def took(self, ids: Sequence[int], reason: FinishReason) -> Action | None:
        """A turn of the policy: what the environment is to do; None: nothing, the conversation is over.

        Args:
            ids: Sampled.
            reason: Of their end; a turn that was cut is no action.
        """
        self.ledger.sampled(ids)
        self._turn = tuple(ids)
        self._num_turns += 1
        self._rewards.append(0.0)
        self._final_text = self.rendering.text_of(ids)
        self._turns.append(("policy", self._final_text))
        if self.end is None and reason == "length":
            self.end = "response_length"
        if self.end is not None:
            return None
        action = self.read(self._final_text, self.before)
        self._num_calls += len(action.tool_calls)
        self._num_unread += len(action.errors)
        return action

    def heard(self, observation: Observation) -> list[int] | None:
        """What the environment says to it: ids to go on after; None: the conversation is over.

        The last turn's observation counts for its reward too.
        """
        self._rewards[-1] = observation.reward or 0.0
        self._facts |= observation.info
        most, answers = self.limits.max_assistant_turns, self.limits.max_user_turns
        if observation.done:
            self.end = "finished"
        elif most is not None and self._num_turns >= most:
            self.end = "max_assistant_turns"
        elif answers is not None and self._num_answers >= answers:
            self.end = "max_user_turns"
        if self.end is not None:
            return None
        self._num_answers += 1
        return self._append([self._cut(message) for message in observation.messages])

    def failed(self, *, late: bool, message: str) -> None:
        """The environment gave no answer, and will give none.

        Args:
            late: It ran out of time.
            message: What happened, with the sample.
        """
        self.end = "environment_timeout" if late else "environment_failed"
        self._error = message

    def episode(self) -> Episode:
        """How it went, once it is over."""
        return Episode(
            end=self.end or "environment_failed",
            num_turns=self._num_turns,
            num_tool_calls=self._num_calls,
            num_failed_calls=self._num_unread,
            turn_rewards=tuple(self._rewards),
            final_text=self._final_text,
            error=self._error,
            facts=self._facts,
            turns=tuple(self._turns),
        )

    def _append(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        if not messages:
            self.failed(late=False, message="the environment neither ended the episode nor said anything")
            return None
        try:
            ids = self.rendering.after(self._turn, messages)
        except UserError as error:  # what an environment says may be anything
            self.failed(late=False, message=f"what the environment said cannot be appended: {error}")
            return None
        if not ids:
            self.failed(late=False, message="what the environment said has no tokens")
            return None
        if not self.ledger.has_room(len(ids)):
            self.end = "response_length"
            return None
        self.ledger.observed(ids)
        text = self.rendering.text_after(messages).text
        self._turns.append(("environment", text))
        self.before = text
        return ids

    def _cut(self, message: dict[str, Any]) -> dict[str, Any]:
        """A tool's message within `max_tool_response_length`."""
        if message["role"] != "tool":
            return message
        limits = self.limits
        return {**message, "content": cut(message["content"], limits.max_tool_response_length, limits)}


def cut(text: str, most: int, limits: MultiTurnConfig) -> str:
    """At most so many characters of a text and a mark where others were; sides and marks are verl's.

    Source: `ToolAgentLoop` of verl 0.9.1.
    """
    if len(text) <= most:
        return text
    if limits.tool_response_truncate_side == "left":
        return text[:most] + CUT_MARK[: -len("...")]
    if limits.tool_response_truncate_side == "right":
        return CUT_MARK[len("...") :] + text[len(text) - most :]
    half = most // 2
    return text[:half] + CUT_MARK + text[len(text) - half :]
