"""An OpenAI-compatible chat endpoint that is asked for scores: one question, one answer, or why there is none.

Owns the connection: which failures are tried again, and every limit of time and size. What is asked and how a reply is
read is `judge.py`'s. Needs httpx (the extra `judge`). Imports no torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mrl.errors import UserError, to_install

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Messages = list[dict[str, str]]

MAX_REPLY_BYTES = 1 << 20
"""A longer reply is none."""

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses of HTTP after which the question is asked again; any other but 200 will not change."""

_OURS = ("model", "messages", "stream", "n")
_EXCERPT_CHARS = 200
_FIRST_PAUSE_S = 0.5  # doubled with every try
_LONGEST_PAUSE_S = 30.0


LIMITS = frozenset({"key_env", "concurrency", "timeout_s", "limit_s", "max_tries"})
"""Arguments that say how an endpoint is asked, and not for what."""


def asked_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a score depends on."""
    return {name: value for name, value in kwargs.items() if name not in LIMITS}


class NoAnswerError(Exception):
    """The endpoint gave no score; the message says why."""


class _AgainError(Exception):
    """Worth another try, after `pause_s` where the endpoint says so."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Endpoint:
    """Where the questions go; the keyword arguments are the config's."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        key_env: str | None = None,
        request: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        timeout_s: float = 60.0,
        limit_s: float = 300.0,
        max_tries: int = 5,
    ) -> None:
        """Checks the arguments; connects to nothing.

        Args:
            url: Up to and without "/chat/completions" ("http://127.0.0.1:8000/v1").
            model: Name that the endpoint knows.
            key_env: Environment variable that holds the key; null: none is sent.
            request: Further fields of a request, such as max_tokens; temperature is 0 unless given here.
            concurrency: Questions at a time, of each replica.
            timeout_s: Of one try, s.
            limit_s: Of one sample with all tries and pauses, s.
            max_tries: Of one sample.

        Raises:
            ValueError: An argument is out of range.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}, expected one that begins with http:// or https://")
        if not 1 <= concurrency <= 4096 or not 1 <= max_tries <= 1000:
            raise ValueError(f"concurrency={concurrency}, max_tries={max_tries}, expected [1, 4096] and [1, 1000]")
        if not (timeout_s > 0 and limit_s > 0 and math.isfinite(timeout_s + limit_s)):
            raise ValueError(f"timeout_s={timeout_s}, limit_s={limit_s}, expected seconds above 0")
        if taken := sorted(set(request or {}) & set(_OURS)):
            raise ValueError(f"request holds '{taken[0]}', which is not for it to say")
        self.url, self.model, self.key_env = f"{url.rstrip('/')}/chat/completions", model, key_env
        self.concurrency, self.limit_s = concurrency, limit_s
        self._timeout_s, self._max_tries = timeout_s, max_tries
        self._request = {"temperature": 0, **(request or {})}
        self._key = ""

    def prepare(self, variables: Callable[..., Mapping[str, str]]) -> None:
        """Takes the key.

        Args:
            variables: Gives those of the named environment variables that are set.

        Raises:
            UserError: There is no key, or httpx is not installed.
        """
        if importlib.util.find_spec("httpx") is None:
            raise UserError(f"a judge needs httpx, which is not installed: {to_install('judge')}.")
        if self.key_env is not None:
            self._key = variables(self.key_env).get(self.key_env, "").strip()
            if not self._key:
                raise UserError(f"key_env={self.key_env}: no such environment variable is set, or it is empty.")

    def client(self) -> httpx.AsyncClient:
        """A new connection pool, to be used in one event loop."""
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        return httpx.AsyncClient(timeout=None, limits=limits)  # `ask` keeps the time

    async def ask(self, client: httpx.AsyncClient, messages: Messages, read: Callable[[str], T]) -> T:
        """What `read` makes of the reply; it raises ValueError where that is no answer.

        Raises:
            NoAnswerError: After the last try, or at `limit_s`.
        """
        clock = asyncio.get_running_loop().time
        start, cause, tries = clock(), "", 0
        while tries < self._max_tries and (left := start + self.limit_s - clock()) > 0:
            tries += 1
            pause_s = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S)
            allowed_s = min(self._timeout_s, left)
            try:
                return read(_content(await asyncio.wait_for(self._once(client, messages), allowed_s)))
            except (asyncio.TimeoutError, TimeoutError):
                cause, pause_s = f"no answer within {allowed_s:.3g} s", 0.0
            except _AgainError as error:
                cause, pause_s = str(error), pause_s if error.pause_s is None else error.pause_s
            except ValueError as error:
                cause, pause_s = str(error), 0.0
            if tries < self._max_tries:
                await asyncio.sleep(min(pause_s, max(0.0, start + self.limit_s - clock())))
        raise NoAnswerError(self._without_key(f"{cause} (tries: {tries}, {clock() - start:.3g} s, {self.url})"))

    async def _once(self, client: httpx.AsyncClient, messages: Messages) -> bytes:
        """The body of a reply with status 200."""
        import httpx

        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        asked = {"model": self.model, "messages": messages, **self._request}
        body = bytearray()
        try:
            async with client.stream("POST", self.url, json=asked, headers=headers) as response:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_REPLY_BYTES:
                        raise _AgainError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise _AgainError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status in AGAIN:
            raise _AgainError(f"status {status}: {_excerpt(body)}", _seconds(response.headers.get("retry-after", "")))
        if status != 200:
            raise NoAnswerError(self._without_key(f"status {status}: {_excerpt(body)} ({self.url})"))
        return bytes(body)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _content(body: bytes) -> str:
    """The text of a chat completion; ValueError says what came instead."""
    try:
        choice = json.loads(body)["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the reply is no chat completion: {_excerpt(body)}") from error
    if reason == "length":
        raise ValueError("the reply was cut at its length limit: give 'request' a larger max_tokens")
    match content:
        case str():
            return content
    raise ValueError(f"the reply is no chat completion: {_excerpt(body)}")


def _seconds(text: str) -> float | None:
    """Of a Retry-After in seconds, up to the longest pause."""
    return min(float(text), _LONGEST_PAUSE_S) if text.strip().isdecimal() else None


def _excerpt(body: bytes | bytearray) -> str:
    return repr(bytes(body[: 4 * _EXCERPT_CHARS]).decode("utf-8", "replace")[:_EXCERPT_CHARS])
