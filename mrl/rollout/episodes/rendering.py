"""Tokens of a conversation by construction: what is appended after a turn of the policy.

Owns the text between two turns: the end of the one, the messages that were observed, the beginning of the next. It is
the difference of the chat template's rendering after an assistant's turn that stands for any, and is encoded once; what
was sampled is never rendered. A tokenizer without a chat template has the contents alone (`Plain`).

Such tokens are those of the rendered conversation only if a template appends: what it made of a conversation must not
change when the conversation goes on. `check` finds out at the start, with verl's three modes of strictness.
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
"""Before an answer: templates of models that think leave it out of turns that lie back, Qwen3's of those before a
user's message; others have it as it is."""


class Rendering(ABC):
    """Token ids of what the policy sees.

    Args:
        tokenizer: Encodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_ids)

    @abstractmethod
    def opening(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """The prompt, with messages that the environment adds to it at the beginning.

        Raises:
            UserError: The tokenizer or the chat template refuses them.
        """

    @abstractmethod
    def text_after(self, observed: Sequence[Message]) -> ChatText:
        """Returns what follows a turn's content: its end, the messages, the beginning of the next turn.

        Raises:
            UserError: The chat template refuses the messages, or loses the assistant's content.
        """

    def after(self, turn: Sequence[int], observed: Sequence[Message]) -> list[int]:
        """Ids to append after a turn.

        Args:
            turn: Sampled ids; an end token that was sampled stands for the one that the template writes.
            observed: Messages that answer it.

        Raises:
            UserError: As `text_after`, or the tokenizer refuses the text.
        """
        ids = self._tokenizer.encode(self.text_after(observed))
        if turn and turn[-1] in self._ends and ids and ids[0] in self._ends:
            return ids[1:]
        return ids

    def text_of(self, turn: Sequence[int]) -> str:
        """A turn's text without its end token."""
        return self._tokenizer.decode(turn[:-1] if turn and turn[-1] in self._ends else turn)


class Plain(Rendering):
    """Without a chat template: contents one after the other, nothing between them."""

    def opening(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """See `Rendering.opening`; the question is a text."""
        if not isinstance(question, str):
            return self._tokenizer.apply_chat_template(question)  # refuses
        return self._tokenizer.encode(ChatText(question).joined(self.text_after(observed)), prompt=True)

    def text_after(self, observed: Sequence[Message]) -> ChatText:
        """See `Rendering.text_after`."""
        return self._tokenizer.quoted("".join(str(message["content"]) for message in observed))


class Chat(Rendering):
    """With a chat template.

    Args:
        tokenizer: Has one.
        tools: Schemas that prompts offer.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tokenizer)
        self._tools = tools

    def opening(self, question: str | Sequence[Message], observed: Sequence[Message]) -> list[int]:
        """See `Rendering.opening`; a text is a user's message."""
        asked = [{"role": "user", "content": question}] if isinstance(question, str) else question
        return self._tokenizer.apply_chat_template([*asked, *observed], self._tools)

    def text_after(self, observed: Sequence[Message]) -> ChatText:
        """See `Rendering.text_after`."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANY_TURN}]
        text = self._tokenizer.render_chat([*turn, *observed], begins_answer=True, tools=self._tools)
        place = text.text.find(ANY_TURN)  # what is observed may hold it too
        if place < 0:
            raise UserError(
                f"the chat template of '{self._tokenizer.name}' does not write an assistant's content as it is, so "
                "that nothing can be appended to it. Give another with data.chat_template=FILE."
            )
        return text.after(place + len(ANY_TURN))

    def check(self, mode: CheckMode, observed: Sequence[Message], *, thinks: bool = True) -> None:
        """Looks whether the template appends, in a conversation of three turns.

        Args:
            mode: strict: the texts are equal; ignore_strippable: but for white space; disable: nothing is looked at.
            observed: Messages such as the environment's that answer the first turns.
            thinks: Also where each turn begins with a thought.

        Raises:
            UserError: It does not.
        """
        if mode == "disable":
            return
        for before in ("", THOUGHT) if thinks else ("",):
            self._check(mode, observed, before)

    def _check(self, mode: CheckMode, observed: Sequence[Message], before: str) -> None:
        """See `check`; each turn begins with `before`."""
        messages: list[Message] = [{"role": "user", "content": "What is asked?"}]
        built = self._rendered(messages)
        for number in range(1, 3):
            turn = {"role": "assistant", "content": f"{before}Turn {number} of the assistant."}
            built += turn["content"] + self.text_after(observed).text
            messages += [turn, *observed]
            whole = self._rendered(messages)
            if not _same(whole, built, mode):
                place = next((i for i, (a, b) in enumerate(zip(whole, built, strict=False)) if a != b), len(built))
                raise UserError(
                    f"the chat template of '{self._tokenizer.name}' does not append: after turn {number} it renders "
                    f"{whole[max(0, place - 20) : place + 40]!r} where the conversation so far goes on as "
                    f"{built[max(0, place - 20) : place + 40]!r}. Training on what it renders would not be training on "
                    "what was sampled. Give a template that keeps earlier turns as they are (data.chat_template=FILE), "
                    "or set rollout.multi_turn.tokenization_sanity_check_mode: ignore_strippable where only white "
                    "space differs; disable to go on with what was sampled, where a new rendering would change it."
                )

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._tokenizer.render_chat(messages, begins_answer=True, tools=self._tools).text


def rendering(tokenizer: Tokenizer, *, chat: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Rendering:
    """How conversations become tokens.

    Args:
        tokenizer: Of the run.
        chat: Whether prompts go through the chat template.
        tools: Schemas that prompts offer.
    """
    return Chat(tokenizer, tools) if chat else Plain(tokenizer)


def _same(whole: str, built: str, mode: CheckMode) -> bool:
    if mode == "ignore_strippable":
        return "".join(whole.split()) == "".join(built.split())
    return whole == built
