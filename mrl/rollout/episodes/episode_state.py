"""State of one conversation with an environment: turns, rewards, limits of `rollout.multi_turn`, reason for the end.

It does no communication; `episodes.py` connects it with the engine and the environment's worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.config import MultiTurnConfig
from mrl.environments.base import Action, Observation
from mrl.errors import UserError
from mrl.rollout.episodes.rendering import Rendering
from mrl.rollout.episodes.token_record import Ledger
from mrl.types import Episode, FinishReason

Read = Callable[[str, str], Action]
"""Parses the text of a turn into an action; the second argument is the end of the text before the turn."""

CUT_MARK = "...(truncated)..."


@dataclass
class EpisodeState:
    """A running episode.

    Attributes:
        rendering: Encoder of observations into tokens.
        parse_turn: Parser of the policy's turns.
        limits: Config section `rollout.multi_turn`.
        ledger: Record of the response tokens so far.
        end: One of `EPISODE_ENDS`; None while the episode is running.
        prompt_tail: End of the text before the next turn; a chat template may have opened a reasoning block there.
    """

    rendering: Rendering
    parse_turn: Read
    limits: MultiTurnConfig
    ledger: Ledger
    end: str | None = None
    prompt_tail: str = ""

    def __post_init__(self) -> None:
        """Starts with zero turns."""
        self._turn: tuple[int, ...] = ()
        self._num_turns = self._num_answers = self._num_calls = self._num_unread = 0
        self._rewards: list[float] = []
        self._facts: dict[str, float | str] = {}
        self._error: str | None = None
        self._final_text = ""
        self._turns: list[tuple[str, str]] = []

    def add_turn(self, ids: Sequence[int], reason: FinishReason) -> Action | None:
        """Adds a turn of the policy and parses it.

        Args:
            ids: Sampled tokens of the turn.
            reason: Finish reason of the turn; "length" ends the episode.

        Returns:
            Action for the environment, or None if the episode is over.
        """
        self.ledger.append_sampled(ids)
        self._turn = tuple(ids)
        self._num_turns += 1
        self._rewards.append(0.0)
        self._final_text = self.rendering.decode_turn(ids)
        self._turns.append(("policy", self._final_text))
        if self.end is None and reason == "length":
            self.end = "response_length"
        if self.end is not None:
            return None
        action = self.parse_turn(self._final_text, self.prompt_tail)
        self._num_calls += len(action.tool_calls)
        self._num_unread += len(action.errors)
        return action

    def add_observation(self, observation: Observation) -> list[int] | None:
        """Adds the environment's answer to the last turn, and its reward.

        Returns:
            Token ids to append before the next turn, or None if the episode is over.
        """
        self._rewards[-1] = observation.reward or 0.0
        self._facts |= observation.info
        max_turns, max_answers = self.limits.max_assistant_turns, self.limits.max_user_turns
        if observation.done:
            self.end = "finished"
        elif max_turns is not None and self._num_turns >= max_turns:
            self.end = "max_assistant_turns"
        elif max_answers is not None and self._num_answers >= max_answers:
            self.end = "max_user_turns"
        if self.end is not None:
            return None
        self._num_answers += 1
        return self._append([self._cut(message) for message in observation.messages])

    def fail(self, *, timed_out: bool, message: str) -> None:
        """Ends the episode because of a failure of the environment.

        Args:
            timed_out: True for a timeout.
            message: Description of the failure that names the sample.
        """
        self.end = "environment_timeout" if timed_out else "environment_failed"
        self._error = message

    def to_episode(self) -> Episode:
        """Returns the record of the finished episode."""
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
            self.fail(timed_out=False, message="the environment returned no message and did not end the episode")
            return None
        try:
            ids = self.rendering.observation_ids(self._turn, messages)
        except UserError as error:  # a bad message fails this sample, not the run
            self.fail(timed_out=False, message=f"the environment's message cannot be appended: {error}")
            return None
        if not ids:
            self.fail(timed_out=False, message="the environment's message has no tokens")
            return None
        if not self.ledger.has_room(len(ids)):
            self.end = "response_length"
            return None
        self.ledger.append_observed(ids)
        text = self.rendering.observation_text(messages).text
        self._turns.append(("environment", text))
        self.prompt_tail = text
        return ids

    def _cut(self, message: dict[str, Any]) -> dict[str, Any]:
        """Shortens a tool message to `max_tool_response_length` characters."""
        if message["role"] != "tool":
            return message
        limits = self.limits
        return {**message, "content": cut(message["content"], limits.max_tool_response_length, limits)}


def cut(text: str, most: int, limits: MultiTurnConfig) -> str:
    """Shortens a text to `most` characters plus a mark, on the side that `tool_response_truncate_side` names.

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
