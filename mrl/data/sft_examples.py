"""Supervised examples: the token ids of a prompt and its response, with a mask of the trained tokens.

Converts the response of a row (text or messages) to tokens and handles responses that are too long. `assistant_mask.py`
finds the assistant's turns in the text of a chat template. Without a template the contents of messages are
concatenated, as in an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.config.config import DataConfig, RolloutConfig
from mrl.data.assistant_mask import RenderedConversation, render_with_turns
from mrl.data.conversations import (
    ASSISTANT,
    Messages,
    describe_value,
    last_answer,
    pair_prompt,
    parse_messages,
    split_conversation,
)
from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError
from mrl.types import Prompt


class SftExample(NamedTuple):
    """Token sequence of a supervised step.

    Attributes:
        prompt_ids: Tokens before the first trained token, at least one.
        response_ids: Tokens from the first to the last trained one.
        response_mask: True where a token of `response_ids` is trained.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[bool]


class SftEncoder:
    """Converter from prompts and their rows to supervised examples."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        data: DataConfig,
        rollout: RolloutConfig,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Creates the converter.

        Args:
            tokenizer: Encodes the responses.
            data: Column names, and which turns are trained.
            rollout: Length limits, and whether samples are episodes (`multi_turn.enable`).
            tools: Function schemas that the chat template includes, same as for the prompts.
        """
        self._tokenizer, self._tools = tokenizer, tools
        self._data, self._has_episodes = data, rollout.multi_turn.enable
        self._prompt_length, self._response_length = rollout.prompt_length, rollout.response_length

    def supervised(self, prompt: Prompt) -> SftExample:
        """Returns the example of a row: its complete conversation, or else the response to its prompt.

        Raises:
            UserError: The row has no response, or an unusable one; the message names the row.
        """
        conversation = split_conversation(prompt.row, prompt.source, self._data)
        if conversation is not None:
            return self._from_turns(prompt, conversation[1], first=0)
        key = self._data.response_key
        value = prompt.answer if key is None else prompt.row.get(key)
        return self.answered(prompt, value, "data.answer_key" if key is None else f"data.response_key={key}")

    def pair(self, prompt: Prompt) -> tuple[SftExample, SftExample]:
        """Returns the (chosen, rejected) examples of a preference pair.

        Raises:
            UserError: The row has no pair, or an unusable one; the message names the row.
        """
        data = self._data
        start = None if data.task is not None else pair_prompt(prompt.row, prompt.source, data)
        found = []
        for name in ("chosen", "rejected"):
            key: str = name if data.task is not None else getattr(data, f"{name}_key")
            if key not in prompt.row:
                raise UserError(
                    f"{prompt.source}: no column '{key}' (data.{name}_key) with the "
                    f"{'better' if name == 'chosen' else 'worse'} of two responses. Columns: {', '.join(prompt.row)}."
                )
            value = prompt.row[key]
            found.append(
                self.answered(prompt, value if start is None else value[len(start) :], f"data.{name}_key={key}")
            )
        chosen, rejected = found
        if chosen == rejected:
            raise UserError(
                f"{prompt.source}: both responses have the same tokens, so neither is preferred. Remove the row."
            )
        return chosen, rejected

    def answered(self, prompt: Prompt, value: Any, key: str) -> SftExample:
        """Returns the example of a prompt and a given response.

        Args:
            prompt: Prompt from the stream.
            value: Response, a string or chat messages.
            key: Config key of the response, for error messages.

        Raises:
            UserError: The response cannot be used; the message names the row.
        """
        if isinstance(value, str):
            return self._from_contents(prompt, [{"role": ASSISTANT, "content": value}])
        if not isinstance(value, list):
            raise UserError(
                f"{prompt.source}: supervised steps need a response to imitate, but {key} gives "
                f"{describe_value(value)}; expected a string, or chat messages."
            )
        messages = parse_messages(value, prompt.source, key)
        answer = messages[: last_answer(messages, prompt.source, key) + 1]
        if not isinstance(prompt.question, str):
            return self._from_turns(prompt, answer, first=len(prompt.question))
        if self._has_episodes:
            return self._from_contents(prompt, answer)
        raise UserError(
            f"{prompt.source}: {key} gives chat messages, but the prompt is a plain string. Use the same kind for "
            "both, or set data.apply_chat_template=always; with rollout.multi_turn.enable the messages are the turns "
            "of an episode."
        )

    def _from_contents(self, prompt: Prompt, answer: Messages) -> SftExample:
        """Concatenates the prompt and message contents; adds end tokens to the assistant's and masks the others."""
        ids: list[int] = []
        trained: list[bool] = []
        for index, message in enumerate(answer):
            text, is_trained = message["content"], message["role"] == ASSISTANT
            try:
                said = self._tokenizer.encode(text)
            except UserError as error:
                raise UserError(f"{prompt.source}: response {text!r}: {error}") from error
            # A text rendered by a chat template may start with the bos token; drop it if the prompt is just that token.
            if index == 0 and [self._tokenizer.bos_id] == said[:1] == list(prompt.prompt_ids):
                said = said[1:]
            if is_trained and (not said or said[-1] not in self._tokenizer.eos_ids):
                said.append(self._tokenizer.eos_ids[0])
            ids += said
            is_trained &= self._data.train_on_turns == "all" or index == len(answer) - 1
            trained += [is_trained] * len(said)
        limit = self._response_length
        if len(ids) > limit and self._data.overlong_responses == "error":
            raise UserError(
                f"{prompt.source}: the response to imitate has {len(ids)} tokens with its end token, more than "
                f"rollout.response_length={limit}. Raise it, shorten the response, or set "
                "data.overlong_responses=truncate_right."
            )
        masked = [False] * len(prompt.prompt_ids)
        return self._example(prompt, [*prompt.prompt_ids, *ids[:limit]], [*masked, *trained[:limit]])

    def _from_turns(self, prompt: Prompt, answer: Messages, *, first: int) -> SftExample:
        """Renders the prompt's messages and an answer; the assistant's turns from message `first` on are trained."""
        messages = [*(prompt.question if isinstance(prompt.question, list) else []), *answer]
        first = len(messages) - 1 if self._data.train_on_turns == "last" else first
        try:
            found = render_with_turns(messages, self._tokenizer, first=first, tools=self._tools)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error
        return self._example(prompt, *self._within_limits(found, prompt.source))

    @staticmethod
    def _example(prompt: Prompt, ids: list[int], trained: list[bool]) -> SftExample:
        """Returns the example whose response spans the first to the last trained token."""
        if True not in trained:
            raise UserError(
                f"{prompt.source}: no assistant token is left to train on within the {len(ids)} tokens that "
                "rollout.prompt_length and rollout.response_length allow. Raise them, or remove the row."
            )
        begin, end = trained.index(True), len(ids) - trained[::-1].index(True)
        return SftExample(ids[:begin], ids[begin:end], trained[begin:end])

    def _within_limits(self, found: RenderedConversation, source: str) -> tuple[list[int], list[bool]]:
        """Returns ids and loss mask cut to the configured lengths; the first token is never trained."""
        ids, data, limit = found.ids[: found.turns[-1][1]], self._data, self._prompt_length + self._response_length
        trained = [False] * len(ids)
        for begin, end in found.turns:
            trained[begin:end] = [True] * (end - begin)
        if data.overlong_prompts == "truncate_left":
            cut = max(0, found.turns[-1][0] - self._prompt_length)
            ids, trained = ids[cut:], trained[cut:]
        if len(ids) > limit and data.overlong_responses == "error":
            raise UserError(
                f"{source}: the conversation has {len(ids)} tokens, more than rollout.prompt_length="
                f"{self._prompt_length} + rollout.response_length={self._response_length}. Raise them, shorten it, or "
                "set data.overlong_responses=truncate_right."
            )
        return ids[:limit], [False, *trained[1:limit]]
