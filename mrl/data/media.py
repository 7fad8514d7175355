"""Refusals of images, videos and audio in a row: mrl trains language models on text.

A placeholder such as `<image>` stands for a medium only in a row that has one, so a text with it in another row is
ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown

COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of verl, TRL and the hub's data sets that hold media."""
_PLURAL = ("images", "videos", "audios")
_FIELDS = frozenset(("bytes", "path", "url", "array", "image", "video", "audio", "image_url", "video_url"))
"""Fields of a medium in a row: of the hub's data sets, of verl, and of OpenAI's parts."""
_SUFFIXES = "png|jpe?g|webp|gif|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg"
_FILE = re.compile(rf"(?i)data:(?:image|video|audio)/|.+\.(?:{_SUFFIXES})$")
_REMEDY = "mrl trains language models on text. Use rows without media"


def refuse_media(row: Mapping[str, Any], source: str) -> None:
    """Raises UserError where a row or a message has images, videos or audio in one of COLUMNS.

    An empty column is accepted, and so is a text that names no file of media, such as a container image.

    Args:
        row: Values by name.
        source: File and line of the row, for error messages.
    """
    for name in COLUMNS:
        value = row.get(name)
        if value and (name in _PLURAL or _is_medium(value)):
            raise UserError(f"{source}: '{name}' holds {_brief(value)}. {_REMEDY}, or remove '{name}' from them.")


def with_text_content(message: Any, where: str) -> Any:
    """Returns a chat message whose content is one text, with text parts joined; other values are returned unchanged.

    Args:
        message: Message of a row; its content may be a list of OpenAI's parts, {"type": "text", "text": "..."}.
        where: File and line of the row, and the column, for error messages.

    Raises:
        UserError: A part is of another type than text.
    """
    if not isinstance(message, Mapping):
        return message
    refuse_media(message, f"{where}: a message")
    content = message.get("content")
    if not isinstance(content, list) or not content or not all(isinstance(part, Mapping) for part in content):
        return message
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                f"{where}: a message has a content part of type {shown(part.get('type'))}, expected "
                f"{{'type': 'text', 'text': '...'}}. {_REMEDY}."
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_medium(value: Any) -> bool:
    """Returns whether a value is a medium or a list with one: bytes, a mapping with its data, or a file's name."""
    if isinstance(value, list):
        return any(map(_is_medium, value))
    if isinstance(value, Mapping):
        return any(value.get(name) for name in _FIELDS)
    return isinstance(value, bytes) or (isinstance(value, str) and _FILE.match(value) is not None)


def _brief(value: Any) -> str:
    """Returns the type of a value, and its length if it is a list, for an error message; media may be large."""
    if isinstance(value, list):
        return f"a list of {len(value)}, the first a {type(value[0]).__name__}"
    return f"a {type(value).__name__}"
