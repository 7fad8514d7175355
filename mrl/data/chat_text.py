"""Rendered conversations in which special tokens written by users are encoded as ordinary characters.

A chat template writes a conversation as one text, in which a user who writes `<|im_end|>` would end the turn.
`SpecialTokenEscaper` replaces each such token by a number before rendering, and restores it afterwards together with
its position.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRUSTED_ROLES = frozenset({"assistant", "system", "developer"})
"""Roles whose messages may contain special tokens: those of the model and of the author of the run."""

_BITS = 20
_INDEX_DIGITS = 9


@dataclass(frozen=True)
class ChatText:
    """Text to encode, with the spans in which special tokens are ordinary characters.

    Attributes:
        text: The characters.
        quoted: Spans [first, end) of `text`, ascending, in which special tokens are ordinary characters.
    """

    text: str
    quoted: tuple[tuple[int, int], ...] = ()

    def after(self, start: int) -> ChatText:
        """Returns the text from character `start` on."""
        return ChatText(self.text[start:], tuple((a - start, b - start) for a, b in self.quoted if a >= start))

    def joined(self, other: ChatText) -> ChatText:
        """Returns the concatenation of this text and another."""
        size = len(self.text)
        return ChatText(self.text + other.text, (*self.quoted, *((a + size, b + size) for a, b in other.quoted)))


class SpecialTokenEscaper:
    """Escapes the special tokens of untrusted messages while a chat template renders them.

    Attributes:
        messages: The messages to render, with a number in place of each special token of an untrusted message.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special: re.Pattern[str] | None,
        trusted: Collection[str],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Replaces the special tokens of untrusted messages by numbers.

        Args:
            messages: Chat messages of a conversation.
            special: Pattern of special tokens; None: nothing is replaced.
            trusted: Roles whose messages may contain special tokens.
            tools: Function schemas that are rendered with the messages.
        """
        self._special, self._mark = special, ""
        self._found: list[str] = []
        self.messages = [dict(message) for message in messages]
        untrusted = [message for message in self.messages if message.get("role") not in trusted]
        if special is None or special.search("\n".join(_texts(untrusted))) is None:
            return
        # Digits pass through a template's filters (upper, trim, tojson) unchanged. No suffix of "2" followed by zeros
        # and ones is also its prefix, so digits before a mark cannot shift the match.
        number, texts = 0, "\n".join(_texts([*self.messages, *tools]))
        while (mark := f"2{number:0{_BITS}b}") in texts:
            number += 1
        self._mark = mark
        self.messages = [
            self._marked(message) if message.get("role") not in trusted else message for message in self.messages
        ]

    def restore(self, rendered: str) -> ChatText:
        """Returns a rendering of `messages` with the special tokens restored and marked as ordinary characters."""
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
    """Yields every string and number that a template may render from a value, as text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    else:
        yield str(value)
