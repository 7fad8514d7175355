"""Chat messages in the columns of a row, and conversations and preference pairs from which the prompt is derived."""

from __future__ import annotations

from typing import Any

from mrl.config.config import DataConfig
from mrl.data.media import with_text_content
from mrl.data.public_sets.base import Row
from mrl.errors import UserError

Messages = list[dict[str, Any]]

ASSISTANT = "assistant"
"""Role of the model's messages."""


def parse_messages(value: Any, source: str, what: str) -> Messages:
    """Returns a list of chat messages without null keys, which parquet rows have, and with each content as one text.

    Args:
        value: Value of a column.
        source: File and line of the row, for error messages.
        what: Name of the value in error messages, such as "column 'prompt'".

    Raises:
        UserError: The value is not a list of messages, or a message has other parts than text.
    """
    wrong = f"{source}: {what} holds {describe_value(value)}, expected a string or a list of chat messages"
    if not isinstance(value, list) or not value:
        raise UserError(f"{wrong}, such as [{{'role': 'user', 'content': '...'}}].")
    value = [with_text_content(message, f"{source}: {what}") for message in value]
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise UserError(
                f"{wrong}; the message {describe_value(message)} lacks a 'role' or 'content' that is a string."
            )
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def last_answer(messages: Messages, source: str, what: str) -> int:
    """Returns the index of the assistant's last message.

    Raises:
        UserError: There is no assistant message.
    """
    for index in reversed(range(len(messages))):
        if messages[index]["role"] == ASSISTANT:
            return index
    roles = ", ".join(message["role"] for message in messages)
    raise UserError(f"{source}: {what} has no message of the role '{ASSISTANT}' to imitate; it has {roles}.")


def split_conversation(row: Row, source: str, data: DataConfig) -> tuple[Messages, Messages] | None:
    """Splits the conversation of a row without a prompt column before the assistant's last message.

    Returns:
        The messages before it, at least one, and that message in a list; None where the row has no conversation.

    Raises:
        UserError: The conversation cannot be used; the message names the row.
    """
    key = data.messages_key
    if key not in row or (data.prompt_key if data.task is None else "prompt") in row:
        return None
    what = f"column '{key}'"
    messages = parse_messages(row[key], source, what)
    last = last_answer(messages, source, what)
    if messages[0]["role"] == ASSISTANT:
        raise UserError(f"{source}: {what} begins with an assistant message. Put a user message before it.")
    return messages[:last], [messages[last]]


def pair_prompt(row: Row, source: str, data: DataConfig) -> Messages | None:
    """Returns the messages that both conversations of a preference pair start with, for a row without a prompt column.

    Returns:
        At least one message; None where the row has no pair, or has a prompt column.

    Raises:
        UserError: The pair cannot be used; the message names the row.
    """
    keys = data.chosen_key, data.rejected_key
    if not all(key in row for key in keys) or data.prompt_key in row or data.messages_key in row:
        return None
    if not all(isinstance(row[key], list) for key in keys):
        raise UserError(
            f"{source}: no column '{data.prompt_key}' (data.prompt_key), and without a prompt the columns "
            f"'{keys[0]}' and '{keys[1]}' must be complete conversations (lists of chat messages). Columns: "
            f"{', '.join(row)}."
        )
    chosen, rejected = (parse_messages(row[key], source, f"column '{key}'") for key in keys)
    count = next((i for i, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1]), None)
    what = f"{source}: columns '{keys[0]}' and '{keys[1]}'"
    if count is None:
        raise UserError(f"{what}: one conversation is the beginning of the other, so neither is preferred.")
    if count == 0 or any(messages[count]["role"] != ASSISTANT for messages in (chosen, rejected)):
        raise UserError(
            f"{what} first differ in message {count}. The messages before it are the common prompt: there must be at "
            f"least one, and the message itself must have the role '{ASSISTANT}'."
        )
    return chosen[:count]


def describe_value(value: Any) -> str:
    """Returns the type and the value as text for error messages, cut to 60 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
