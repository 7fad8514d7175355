"""Conversations in the columns of a row: chat messages, and whole conversations, which have their prompt inside.

Owns what they look like, and where the prompt of a whole one ends. It knows no token.
"""

from __future__ import annotations

from typing import Any

from mrl.config.config import DataConfig
from mrl.data.row_sources import Row
from mrl.errors import UserError

Messages = list[dict[str, Any]]

ASSISTANT = "assistant"
"""Role of what the model says."""


def checked(value: Any, source: str, what: str) -> Messages:
    """Chat messages, without the keys that they leave empty, as rows of parquet do.

    Args:
        value: Of a column.
        source: Where the row comes from, for messages.
        what: What holds it, for messages: "column 'prompt'".

    Raises:
        UserError: It is no list of messages.
    """
    wrong = f"{source}: {what} holds {described(value)}, expected a string or a list of chat messages"
    if not isinstance(value, list) or not value:
        raise UserError(f"{wrong}, such as [{{'role': 'user', 'content': '...'}}].")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UserError(f"{wrong}; the message {described(message)} lacks a 'role' or 'content' that is a string.")
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def last_answer(messages: Messages, source: str, what: str) -> int:
    """Index of the assistant's last message.

    Raises:
        UserError: It says nothing.
    """
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == ASSISTANT:
            return index
    roles = ", ".join(message["role"] for message in messages)
    raise UserError(f"{source}: {what} has no message of the role '{ASSISTANT}' to imitate; it has {roles}.")


def whole(row: Row, source: str, data: DataConfig) -> tuple[Messages, Messages] | None:
    """The conversation of a row that has no prompt of its own, cut before the assistant's last message.

    Returns:
        The messages before it, at least one, and that message; None: the row holds no conversation.

    Raises:
        UserError: The conversation cannot be used: it names the row.
    """
    key = data.messages_key
    if key not in row or (data.prompt_key if data.task is None else "prompt") in row:
        return None
    what = f"column '{key}'"
    messages = checked(row[key], source, what)
    last = last_answer(messages, source, what)
    if messages[0]["role"] == ASSISTANT:
        raise UserError(f"{source}: {what} begins with the assistant, whom nothing asked. Put a message before that.")
    return messages[:last], [messages[last]]


def pair_start(row: Row, source: str, data: DataConfig) -> Messages | None:
    """What both conversations of a pair begin with alike, in a row that has no prompt of its own.

    Returns:
        These messages, at least one; None: the row holds no pair, or its prompt in a column.

    Raises:
        UserError: The pair cannot be used: it names the row.
    """
    keys = data.chosen_key, data.rejected_key
    if not all(key in row for key in keys) or data.prompt_key in row or data.messages_key in row:
        return None
    if not all(isinstance(row[key], list) for key in keys):
        raise UserError(
            f"{source}: there is no column '{data.prompt_key}' (data.prompt_key), and without a prompt the columns "
            f"'{keys[0]}' and '{keys[1]}' must hold whole conversations, lists of chat messages. Columns: "
            f"{', '.join(row)}."
        )
    chosen, rejected = (checked(row[key], source, f"column '{key}'") for key in keys)
    count = next((i for i, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1]), None)
    what = f"{source}: columns '{keys[0]}' and '{keys[1]}'"
    if count is None:
        raise UserError(f"{what}: one conversation is the beginning of the other, so neither is preferred.")
    if count == 0 or any(messages[count]["role"] != ASSISTANT for messages in (chosen, rejected)):
        raise UserError(
            f"{what} differ first in message {count}, which must be one of the role '{ASSISTANT}' after at least one "
            "other: what comes before it is the prompt of both."
        )
    return chosen[:count]


def described(value: Any) -> str:
    """A value of a row for a message: its type, and what it is, cut where it is long."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
