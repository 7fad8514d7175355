"""What supervised steps imitate: the ids of a prompt, of the response to it, and which of these are trained.

Owns how a row's response, a text or messages, becomes tokens with a mask, and what happens where it is too long. Rows
are read by `prompts.py`; where the assistant speaks in a chat template's text is found by `assistant_mask.py`. Without
a template the contents of messages stand one after the other, as in an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.config.config import DataConfig, RolloutConfig
from mrl.data.assistant_mask import Conversation, rendered
from mrl.data.conversations import ASSISTANT, Messages, checked, described, last_answer, pair_start, whole
from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError
from mrl.types import Prompt


class Example(NamedTuple):
    """A sequence to imitate.

    Attributes:
        prompt_ids: All before the first token that is trained, at least one.
        response_ids: From that token to the last that is trained.
        trained: Which of these are trained.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    trained: list[bool]


class Encoder:
    """Makes examples of prompts, as the config says."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        data: DataConfig,
        rollout: RolloutConfig,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Makes the encoder.

        Args:
            tokenizer: Encodes the responses.
            data: Columns and turns.
            rollout: Lengths, and whether samples are episodes.
            tools: Schemas that the chat template offers, as in the prompts.
        """
        self._tokenizer, self._tools = tokenizer, tools
        self._data, self._has_episodes = data, rollout.multi_turn.enable
        self._prompt_length, self._response_length = rollout.prompt_length, rollout.response_length

    def supervised(self, prompt: Prompt) -> Example:
        """What a supervised step imitates: the whole conversation of the row, else the response to its prompt.

        Raises:
            UserError: The row has no such response, or one that cannot be used: it names the row.
        """
        conversation = whole(prompt.row, prompt.source, self._data)
        if conversation is not None:
            return self._of_turns(prompt, conversation[1], first=0)
        key = self._data.response_key
        value = prompt.answer if key is None else prompt.row.get(key)
        return self.answered(prompt, value, "data.answer_key" if key is None else f"data.response_key={key}")

    def pair(self, prompt: Prompt) -> tuple[Example, Example]:
        """The better and the worse response to a prompt.

        Raises:
            UserError: The row has no such responses, or two that cannot be used: it names the row.
        """
        data = self._data
        start = None if data.task is not None else pair_start(prompt.row, prompt.source, data)
        found = []
        for name in ("chosen", "rejected"):
            key: str = name if data.task is not None else getattr(data, f"{name}_key")
            if key not in prompt.row:
                raise UserError(
                    f"{prompt.source}: there is no column '{key}' (data.{name}_key), the "
                    f"{'better' if name == 'chosen' else 'worse'} of two responses. Columns: {', '.join(prompt.row)}."
                )
            value = prompt.row[key]
            found.append(
                self.answered(prompt, value if start is None else value[len(start) :], f"data.{name}_key={key}")
            )
        chosen, rejected = found
        if chosen == rejected:
            raise UserError(
                f"{prompt.source}: both responses are the same in tokens, so neither is preferred. Remove the row."
            )
        return chosen, rejected

    def answered(self, prompt: Prompt, value: Any, key: str) -> Example:
        """The prompt with a response to it.

        Args:
            prompt: Of the stream.
            value: The response, a text or chat messages.
            key: What names it in the config, for messages.

        Raises:
            UserError: It cannot be used: it names the row.
        """
        if isinstance(value, str):
            return self._of_contents(prompt, [{"role": ASSISTANT, "content": value}])
        if not isinstance(value, list):
            raise UserError(
                f"{prompt.source}: supervised steps need a response to imitate, but {key} gives {described(value)}; "
                "expected a string, or chat messages."
            )
        messages = checked(value, prompt.source, key)
        answer = messages[: last_answer(messages, prompt.source, key) + 1]
        if not isinstance(prompt.question, str):
            return self._of_turns(prompt, answer, first=len(prompt.question))
        if self._has_episodes:
            return self._of_contents(prompt, answer)
        raise UserError(
            f"{prompt.source}: {key} gives chat messages, but the prompt is a plain string. Make both of one kind, or "
            "set data.apply_chat_template=always. With rollout.multi_turn.enable they are the turns of an episode."
        )

    def _of_contents(self, prompt: Prompt, answer: Messages) -> Example:
        """Returns the prompt and messages after it, the assistant's with one end token each, the others masked."""
        ids: list[int] = []
        trained: list[bool] = []
        for index, message in enumerate(answer):
            text, imitated = message["content"], message["role"] == ASSISTANT
            try:
                said = self._tokenizer.encode(text)
            except UserError as error:
                raise UserError(f"{prompt.source}: response {text!r}: {error}") from error
            # A text that a chat template rendered may have the tokens that are added to a bare text.
            if index == 0 and [self._tokenizer.bos_id] == said[:1] == list(prompt.prompt_ids):
                said = said[1:]
            if imitated and (not said or said[-1] not in self._tokenizer.eos_ids):
                said.append(self._tokenizer.eos_ids[0])
            ids += said
            imitated &= self._data.train_on_turns == "all" or index == len(answer) - 1
            trained += [imitated] * len(said)
        limit = self._response_length
        if len(ids) > limit and self._data.overlong_responses == "error":
            raise UserError(
                f"{prompt.source}: the response to imitate has {len(ids)} tokens with its end token, more than "
                f"rollout.response_length={limit}. Raise it, shorten the response, or set "
                "data.overlong_responses=truncate_right."
            )
        observed = [False] * len(prompt.prompt_ids)
        return self._example(prompt, [*prompt.prompt_ids, *ids[:limit]], [*observed, *trained[:limit]])

    def _of_turns(self, prompt: Prompt, answer: Messages, *, first: int) -> Example:
        """The prompt's messages and those of an answer; the assistant's turns from message `first` on are trained."""
        messages = [*(prompt.question if isinstance(prompt.question, list) else []), *answer]
        first = len(messages) - 1 if self._data.train_on_turns == "last" else first
        try:
            found = rendered(messages, self._tokenizer, first=first, tools=self._tools)
        except UserError as error:
            raise UserError(f"{prompt.source}: {error}") from error
        return self._example(prompt, *self._within_limits(found, prompt.source))

    @staticmethod
    def _example(prompt: Prompt, ids: list[int], trained: list[bool]) -> Example:
        """From the first token that is trained to the last, and what comes before."""
        if True not in trained:
            raise UserError(
                f"{prompt.source}: nothing of what the assistant says is left to imitate in the {len(ids)} tokens that "
                "rollout.prompt_length and rollout.response_length allow. Raise them, or remove the row."
            )
        begin, end = trained.index(True), len(ids) - trained[::-1].index(True)
        return Example(ids[:begin], ids[begin:end], trained[begin:end])

    def _within_limits(self, found: Conversation, source: str) -> tuple[list[int], list[bool]]:
        """Ids and which are trained, no more than the config allows; not the first one, which nothing predicts."""
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
