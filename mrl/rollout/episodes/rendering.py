"""Encoding of observations: the tokens between two turns of the policy.

The text between two turns is the end of the first, the observed messages and the start of the next. It is rendered by
the chat template after a placeholder turn and encoded; sampled tokens are never rendered again. A tokenizer without a
chat template gets the message contents only (`PlainRendering`).

The result equals a rendering of the full conversation only if the template is append-only: the rendering of a
conversation must not change when messages follow. `ChatRendering.check_append_only` tests this at the start of a run,
with verl's three modes of strictness.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.data.assistant_mask import ANY_TURN
from mrl.data.chat_text import ChatText
from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError

Message = Mapping[str, Any]
CheckMode = Literal["strict", "ignore_strippable", "disable"]

THOUGHT = "<think>\nA thought.\n</think>\n\n"
"""Reasoning before an answer. Templates of reasoning models remove it from earlier turns (Qwen3's: from turns before a
user message); other templates keep it."""


class Rendering(ABC):
    """Encoder of prompts and observations into token ids.

    Args:
        tokenizer: Tokenizer of the actor.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_ids)

    @abstractmethod
    def initial_ids(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """Returns the ids of the prompt followed by the environment's first messages.

        Raises:
            UserError: The tokenizer or the chat template rejects them.
        """

    @abstractmethod
    def observation_text(self, observed: Sequence[Message]) -> ChatText:
        """Returns the text after a turn's content: its end, the messages, the start of the next turn.

        Raises:
            UserError: The chat template rejects the messages, or changes the assistant's content.
        """

    def observation_ids(self, turn: Sequence[int], observed: Sequence[Message]) -> list[int]:
        """Returns the ids to append after a turn.

        Args:
            turn: Sampled ids. A sampled end token replaces the one that the template writes.
            observed: Messages of the environment.

        Raises:
            UserError: As in `observation_text`, or the tokenizer rejects the text.
        """
        ids = self._tokenizer.encode(self.observation_text(observed))
        if turn and turn[-1] in self._ends and ids and ids[0] in self._ends:
            return ids[1:]
        return ids

    def decode_turn(self, turn: Sequence[int]) -> str:
        """Decodes a turn without its end token."""
        return self._tokenizer.decode(turn[:-1] if turn and turn[-1] in self._ends else turn)


class PlainRendering(Rendering):
    """Encoding without a chat template: message contents are concatenated."""

    def initial_ids(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """Implements `Rendering.initial_ids` for a question that is text."""
        if not isinstance(question, str):
            return self._tokenizer.apply_chat_template(question)  # raises the UserError about the missing template
        return self._tokenizer.encode(ChatText(question).joined(self.observation_text(observed)), prompt=True)

    def observation_text(self, observed: Sequence[Message]) -> ChatText:
        """Implements `Rendering.observation_text`: the concatenated contents."""
        return self._tokenizer.escape_special_tokens("".join(str(message["content"]) for message in observed))


class ChatRendering(Rendering):
    """Encoding with the tokenizer's chat template.

    Args:
        tokenizer: Tokenizer with a chat template.
        tools: Tool schemas that prompts offer.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tokenizer)
        self._tools = tools

    def initial_ids(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """Implements `Rendering.initial_ids`; a text question becomes a user message."""
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        return self._tokenizer.apply_chat_template([*asked, *observed], self._tools)

    def observation_text(self, observed: Sequence[Message]) -> ChatText:
        """Implements `Rendering.observation_text` with the chat template."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANY_TURN}]
        text = self._tokenizer.render_chat([*turn, *observed], add_generation_prompt=True, tools=self._tools)
        place = text.text.find(ANY_TURN)  # the first match; observed messages may contain the placeholder too
        if place < 0:
            raise UserError(
                f"The chat template of '{self._tokenizer.name}' does not write an assistant's content unchanged, so "
                "observations cannot be appended to sampled turns. Set another template with data.chat_template=FILE."
            )
        return text.after(place + len(ANY_TURN))

    def check_append_only(self, mode: CheckMode, observed: Sequence[Message], *, with_reasoning: bool = True) -> None:
        """Checks in a conversation of two turns that the template is append-only.

        Args:
            mode: "strict": texts must be equal; "ignore_strippable": equal except for white space; "disable": no check.
            observed: Typical messages of the environment.
            with_reasoning: True to check also turns that start with reasoning.

        Raises:
            UserError: The template is not append-only.
        """
        if mode == "disable":
            return
        for before in ("", THOUGHT) if with_reasoning else ("",):
            self._check(mode, observed, before)

    def _check(self, mode: CheckMode, observed: Sequence[Message], before: str) -> None:
        """Runs `check_append_only` with turns that start with the text `before`."""
        messages: list[Message] = [{"role": "user", "content": "What is asked?"}]
        built = self._rendered(messages)
        for number in range(1, 3):
            turn = {"role": "assistant", "content": f"{before}Turn {number} of the assistant."}
            built += turn["content"] + self.observation_text(observed).text
            messages += [turn, *observed]
            rendered = self._rendered(messages)
            if not _same(rendered, built, mode):
                place = next((i for i, (a, b) in enumerate(zip(rendered, built, strict=False)) if a != b), len(built))
                raise UserError(
                    f"The chat template of '{self._tokenizer.name}' is not append-only: after turn {number} it renders "
                    f"{rendered[max(0, place - 20) : place + 40]!r}, but the tokens so far read "
                    f"{built[max(0, place - 20) : place + 40]!r}. Set a template that keeps earlier turns unchanged "
                    "(data.chat_template=FILE), or relax rollout.multi_turn.tokenization_sanity_check_mode: "
                    "ignore_strippable if only white space differs, disable to train on the sampled tokens although "
                    "the template would render them differently."
                )

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt=True, tools=self._tools).text


def _same(rendered: str, built: str, mode: CheckMode) -> bool:
    if mode == "ignore_strippable":
        return "".join(rendered.split()) == "".join(built.split())
    return rendered == built
