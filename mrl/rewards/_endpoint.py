"""Client of an OpenAI-compatible chat endpoint, with retries and limits of time and size.

`judge.py` makes the prompts and parses the replies. Needs httpx (the extra `judge`). Imports no torch.
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
"""Size limit of a reply, bytes."""

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP statuses after which a request is retried; any other status except 200 is final."""

_RESERVED_FIELDS = ("model", "messages", "stream", "n")
_EXCERPT_CHARS = 200
_FIRST_PAUSE_S = 0.5  # doubled after every attempt
_LONGEST_PAUSE_S = 30.0


LIMITS = frozenset({"key_env", "concurrency", "timeout_s", "limit_s", "max_tries"})
"""Arguments that do not influence scores, such as timeouts."""


def scoring_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a score depends on, for the cache key."""
    return {name: value for name, value in kwargs.items() if name not in LIMITS}


class NoReplyError(Exception):
    """Failure to get a score from the endpoint after all attempts."""


class _RetryError(Exception):
    """Failed attempt that is worth a retry.

    Attributes:
        pause_s: Pause that the endpoint asks for (Retry-After), s; None for the default.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class JudgeEndpoint:
    """A chat endpoint; its arguments are `kwargs` of the config."""

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
        """Checks the arguments; does not connect yet.

        Args:
            url: Base URL without "/chat/completions", such as "http://127.0.0.1:8000/v1".
            model: Model name in requests.
            key_env: Environment variable with the API key; null to send none.
            request: Additional fields of requests, such as max_tokens; the default of temperature is 0.
            concurrency: Number of concurrent requests per replica.
            timeout_s: Time limit of one attempt, s.
            limit_s: Time limit of a sample with all attempts and pauses, s.
            max_tries: Number of attempts per sample.

        Raises:
            ValueError: An argument is out of range.
        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}, expected one that begins with http:// or https://")
        if not 1 <= concurrency <= 4096 or not 1 <= max_tries <= 1000:
            raise ValueError(f"concurrency={concurrency}, max_tries={max_tries}, expected [1, 4096] and [1, 1000]")
        if not (timeout_s > 0 and limit_s > 0 and math.isfinite(timeout_s + limit_s)):
            raise ValueError(f"timeout_s={timeout_s}, limit_s={limit_s}, expected seconds above 0")
        if taken := sorted(set(request or {}) & set(_RESERVED_FIELDS)):
            raise ValueError(f"request contains '{taken[0]}', which mrl sets itself. Remove it")
        self.url, self.model, self.key_env = f"{url.rstrip('/')}/chat/completions", model, key_env
        self.concurrency, self.limit_s = concurrency, limit_s
        self._timeout_s, self._max_tries = timeout_s, max_tries
        self._request = {"temperature": 0, **(request or {})}
        self._key = ""

    def prepare(self, variables: Callable[..., Mapping[str, str]]) -> None:
        """Reads the API key.

        Args:
            variables: Returns the environment variables among the given names that are set.

        Raises:
            UserError: The key is missing, or httpx is not installed.
        """
        if importlib.util.find_spec("httpx") is None:
            raise UserError(f"a judge needs httpx, which is not installed: {to_install('judge')}.")
        if self.key_env is not None:
            self._key = variables(self.key_env).get(self.key_env, "").strip()
            if not self._key:
                raise UserError(f"key_env={self.key_env}: this environment variable is not set, or empty.")

    def client(self) -> httpx.AsyncClient:
        """Returns a new connection pool, for use in one event loop."""
        import httpx

        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        return httpx.AsyncClient(timeout=None, limits=limits)  # `ask` enforces the time limits

    async def ask(self, client: httpx.AsyncClient, messages: Messages, read: Callable[[str], T]) -> T:
        """Sends messages and returns the parsed reply; retries failed attempts.

        Args:
            client: Connection pool of this event loop.
            messages: Chat messages of the request.
            read: Parses the reply's text; raises ValueError for a reply that is to be retried.

        Raises:
            NoReplyError: All attempts failed, or `limit_s` is over.
        """
        clock = asyncio.get_running_loop().time
        start, cause, tries = clock(), "", 0
        while tries < self._max_tries and (left := start + self.limit_s - clock()) > 0:
            tries += 1
            pause_s = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S)
            allowed_s = min(self._timeout_s, left)
            try:
                return read(_content(await asyncio.wait_for(self._request_once(client, messages), allowed_s)))
            except (asyncio.TimeoutError, TimeoutError):
                cause, pause_s = f"no answer within {allowed_s:.3g} s", 0.0
            except _RetryError as error:
                cause, pause_s = str(error), pause_s if error.pause_s is None else error.pause_s
            except ValueError as error:
                cause, pause_s = str(error), 0.0
            if tries < self._max_tries:
                await asyncio.sleep(min(pause_s, max(0.0, start + self.limit_s - clock())))
        raise NoReplyError(self._without_key(f"{cause} (tries: {tries}, {clock() - start:.3g} s, {self.url})"))

    async def _request_once(self, client: httpx.AsyncClient, messages: Messages) -> bytes:
        """Sends one request; returns the body of a reply with status 200."""
        import httpx

        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        request = {"model": self.model, "messages": messages, **self._request}
        body = bytearray()
        try:
            async with client.stream("POST", self.url, json=request, headers=headers) as response:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_REPLY_BYTES:
                        raise _RetryError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise _RetryError(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status in RETRIED_STATUSES:
            raise _RetryError(f"status {status}: {_excerpt(body)}", _seconds(response.headers.get("retry-after", "")))
        if status != 200:
            raise NoReplyError(self._without_key(f"status {status}: {_excerpt(body)} ({self.url})"))
        return bytes(body)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _content(body: bytes) -> str:
    """Returns the text of a chat completion; raises ValueError for any other body and for a truncated text."""
    try:
        choice = json.loads(body)["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the reply is not a chat completion: {_excerpt(body)}") from error
    if reason == "length":
        raise ValueError("the reply was truncated at its length limit: set a larger max_tokens in 'request'")
    match content:
        case str():
            return content
    raise ValueError(f"the reply is not a chat completion: {_excerpt(body)}")


def _seconds(text: str) -> float | None:
    """Parses a Retry-After header in seconds, capped at the longest pause; None for another format."""
    return min(float(text), _LONGEST_PAUSE_S) if text.strip().isdecimal() else None


def _excerpt(body: bytes | bytearray) -> str:
    return repr(bytes(body[: 4 * _EXCERPT_CHARS]).decode("utf-8", "replace")[:_EXCERPT_CHARS])
