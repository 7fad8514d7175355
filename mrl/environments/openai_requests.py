"""Validation of requests of OpenAI's clients: JSON body, chat messages, API key.

Shared by `mrl serve` and the endpoint for agent programs (`_endpoint.py`). Errors give the field, the received value
and what was expected.

Source: OpenAI's API reference, "Chat"; RFC 8259 for JSON; RFC 6750 and section 11 of RFC 9110 for the key.
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from mrl.environments.base import Message
from mrl.errors import UserError, shown

MAX_DEPTH = 64
"""Allowed levels of nesting in a request, because parsers, templates and encoders are recursive."""

ROLES = ("system", "developer", "user", "assistant", "tool")

MEDIA = ("audio", "function_call", "image", "images", "video", "videos")
"""Fields of a message that would change the prompt but that chat templates of text models do not support."""


class RequestError(UserError):
    """Error of an invalid or unsupported request.

    Attributes:
        param: Invalid field ("messages.0.role"); None if no single field is at fault.
        status: HTTP status of the response.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message if param is None else f"{param}: {message}")
        self.param, self.status = param, status


def has_key(authorization: bytes, key: str) -> bool:
    """Returns whether an Authorization header contains the key as a bearer token; the scheme is case-insensitive."""
    scheme, _, token = authorization.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(b" "), key.encode())


def parse_json(text: bytes | str, param: str | None = None) -> Any:
    """Parses a JSON text.

    Args:
        text: Text, or its UTF-8 bytes.
        param: Field with this text, for messages; None for the body of the request.

    Raises:
        RequestError: The text is not JSON, or contains a number beyond a float's range, half of a surrogate pair, or
            more than MAX_DEPTH levels of nesting.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, parse_constant=_refuse_constant, parse_float=_finite)
        _check_nesting(value)
    except RecursionError:
        raise RequestError(f"the JSON is nested more than {MAX_DEPTH} levels deep.", param) from None
    except ValueError as error:
        begins = text[:200] if isinstance(text, str) else text[:200].decode("utf-8", "replace")
        got = shown(begins) if begins else "nothing"
        where = "the body of the request is " if param is None else ""
        raise RequestError(f"{where}not valid JSON ({error}). Got {got}", param) from None
    return value


def chat_messages(value: object) -> list[Message]:
    """Validates chat messages; returns them with every content as one text, and without null fields.

    Args:
        value: Field `messages` of a request.

    Raises:
        RequestError: A message violates OpenAI's format, or contains other media than text.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"expected a list of at least one message. Got {shown(value)}", "messages")
    return [_message(one, f"messages.{place}") for place, one in enumerate(value)]


def call_arguments(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Returns the arguments of a tool call in a message.

    Args:
        call: Tool call; its `function.arguments` is an object or the JSON of one.
        param: Field of the call, for messages.

    Raises:
        RequestError: The arguments are not an object.
    """
    given = call["function"]["arguments"]
    param = f"{param}.function.arguments"
    found = parse_json(given, param) if isinstance(given, str) else given
    if not isinstance(found, dict):
        raise RequestError(f"expected the JSON of an object. Got {shown(given)}", param)
    return found


def _message(value: object, param: str) -> Message:
    if not isinstance(value, dict):
        raise RequestError(f"expected an object with role and content. Got {shown(value)}", param)
    message = {name: field for name, field in value.items() if field is not None}
    role = message.get("role")
    if role not in ROLES:
        got = shown(role) if "role" in message else "a message without a role"
        raise RequestError(f"expected {', '.join(ROLES[:-1])} or {ROLES[-1]}. Got {got}", f"{param}.role")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise RequestError(f"expected a text. Got {shown(message[name])}", f"{param}.{name}")
    if found := [name for name in MEDIA if name in message]:
        raise RequestError("only content and tool_calls are read. Remove this field.", f"{param}.{found[0]}")
    if not message.get("tool_calls", True):
        del message["tool_calls"]
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], role, f"{param}.tool_calls")
    if "content" not in message and "tool_calls" not in message:
        raise RequestError("the message has no content. Give it a text.", f"{param}.content")
    return {**message, "content": _text(message.get("content", ""), f"{param}.content")}


def _check_calls(calls: object, role: str, param: str) -> None:
    if role != "assistant":
        raise RequestError(f"only an assistant's message calls tools, and this one is of role {role}.", param)
    if not isinstance(calls, list):
        raise RequestError(f"expected a list of tool calls. Got {shown(calls)}", param)
    for place, call in enumerate(calls):
        where = f"{param}.{place}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            raise RequestError(
                f"expected an object with function.name and function.arguments. Got {shown(call)}", where
            )
        if call.get("type", "function") != "function":
            raise RequestError(f"expected 'function'. Got {shown(call['type'])}", f"{where}.type")
        call_arguments(call, where)


def _text(content: object, param: str) -> str:
    """Returns a message's content as one text; joins text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RequestError(f"expected a text, or a list of text parts. Got {shown(content)}", param)
    return "".join(_part(part, f"{param}.{place}") for place, part in enumerate(content))


def _part(part: object, param: str) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise RequestError(f"expected a part such as {{'type': 'text', 'text': '...'}}. Got {shown(part)}", param)
    if part["type"] != "text":
        raise RequestError(f"only text parts are read. Got {shown(part['type'])}", f"{param}.type")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"expected a text. Got {shown(part.get('text'))}", f"{param}.text")
    if unknown := sorted(set(part) - {"type", "text"}):
        raise RequestError("a text part has only type and text. Remove this field.", f"{param}.{unknown[0]}")
    return str(part["text"])


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of a 64-bit float")
    return value


def _check_nesting(value: object) -> None:
    """Raises RecursionError for more than MAX_DEPTH levels, and ValueError for a text that UTF-8 cannot encode."""
    level, depth = [value], 0
    while level:
        depth += 1
        below: list[object] = []
        for one in level:
            if isinstance(one, str):
                if not one.isascii():
                    _check_text(one)
            elif isinstance(one, dict):
                below.extend(one)
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
        if below and depth > MAX_DEPTH:
            raise RecursionError
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode("ascii")
        raise ValueError(f"a text contains {half}, half of a surrogate pair, which is not a character") from None
