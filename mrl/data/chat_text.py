"""The text of a rendered conversation, with the places where special tokens are only quoted.

A chat template writes a conversation as one text, in which a user who writes `<|im_end|>` would end the turn. Owns how
such quotes are found again after rendering: each is replaced by a number before it, and put back after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRUSTED_ROLES = frozenset({"assistant", "system", "developer"})
"""Roles whose messages may hold special tokens: those of the model and of the author of the run."""

_BITS = 20
_INDEX_DIGITS = 9


@dataclass(frozen=True)
class ChatText:
    """A text to encode.

    Attributes:
        text: The characters.
        quoted: Spans [first, end) of `text`, in order, in which special tokens are ordinary text.
    """

    text: str
    quoted: tuple[tuple[int, int], ...] = ()

    def after(self, start: int) -> ChatText:
        """Returns the text from index `start` on."""
        return ChatText(self.text[start:], tuple((a - start, b - start) for a, b in self.quoted if a >= start))

    def joined(self, other: ChatText) -> ChatText:
        """Returns this text with another one after it."""
        size = len(self.text)
        return ChatText(self.text + other.text, (*self.quoted, *((a + size, b + size) for a, b in other.quoted)))


class Quotes:
    """Special tokens that messages quote, while a template renders them.

    Attributes:
        messages: The messages, with a number in place of each quoted token where their role is not trusted.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: re.Pattern[str] | None,
        trusted: Collection[str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Finds the quoted tokens.

        Args:
            messages: A conversation.
            special: Matches special tokens; None: nothing is quoted.
            trusted: Roles whose messages may hold special tokens.
            tools: Schemas that are rendered with the messages.
        """
        self._special, self._mark = special, ""
        self._found: list[str] = []
        self.messages = [dict(message) for message in messages]
        untrusted = [message for message in self.messages if message.get("role") not in trusted]
        if special is None or special.search("\n".join(_texts(untrusted))) is None:
            return
        # Digits pass through a template's filters (upper, trim, tojson) unchanged. No end of "2" and zeros and ones is
        # its beginning, so that digits before a mark do not shift where it is found.
        number, texts = 0, "\n".join(_texts([*self.messages, *tools]))
        while (mark := f"2{number:0{_BITS}b}") in texts:
            number += 1
        self._mark = mark
        self.messages = [
            self._marked(message) if message.get("role") not in trusted else message for message in self.messages
        ]

    def restored(self, rendered: str) -> ChatText:
        """Returns a rendering of `messages` with the tokens in their places again."""
        if not self._found:
            return ChatText(rendered)
        parts: list[str] = []
        spans, size, done = [], 0, 0
        for match in re.finditer(rf"{self._mark}(\d{{{_INDEX_DIGITS}}})", rendered):
            before, token = rendered[done : match.start()], self._found[int(match[1])]
            parts += before, token
            spans.append((size + len(before), size + len(before) + len(token)))
            size, done = spans[-1][1], match.end()
        return ChatText("".join([*parts, rendered[done:]]), tuple(spans))

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str) and self._special is not None:
            return self._special.sub(self._number, value)
        if isinstance(value, Mapping):
            return {key: self._marked(inner) for key, inner in value.items()}
        return [self._marked(inner) for inner in value] if isinstance(value, list) else value

    def _number(self, match: re.Match[str]) -> str:
        self._found.append(match[0])
        return f"{self._mark}{len(self._found) - 1:0{_INDEX_DIGITS}}"


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts and numbers that a template may write of a value, as texts."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    else:
        yield str(value)
