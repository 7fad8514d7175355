"""The HTTP server: uvicorn with limits of time, size and number for what clients do to their connections.

Owns those limits. uvicorn itself waits for ever for the rest of a request and for a client that reads nothing.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from mrl.commands.serve.batching import BusyError
from mrl.environments.openai_requests import RequestError

MOST_CONNECTIONS = 4096
"""Open connections; requests of further ones get status 503."""

REQUEST_S = 60.0
"""Longest time from the first byte of a request (or the connection) to its last."""

STALL_S = 60.0
"""Longest time in which a client takes in nothing of an answer that is ready."""

BASE_BYTES, BYTES_PER_TOKEN = 1 << 20, 64
"""A body may have so many bytes, and so many more for each token of the longest sequence."""

MOST_BODIES = 32
"""Bodies of that size that are held at a time."""


class Connection(H11Protocol):
    """A connection that is closed where its client stalls."""

    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request."""
        self._timers = {}
        super().connection_made(transport)
        self._start("request", REQUEST_S)

    def data_received(self, data: bytes) -> None:
        """Takes a part of a request, and waits for the rest where there is more to come."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._start("request", REQUEST_S)
        else:
            self._stop("request")

    def pause_writing(self) -> None:
        """Waits for the client to read."""
        super().pause_writing()
        self._start("answer", STALL_S)

    def resume_writing(self) -> None:
        """Goes on writing."""
        super().resume_writing()
        self._stop("answer")

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP. uvicorn's own raises where an answer has begun, and lets another one follow."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _start(self, name: str, seconds: float) -> None:
        if name not in self._timers and not self.transport.is_closing():
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


class Bodies:
    """Reads the bodies of requests, each of bounded size and all together too."""

    def __init__(self, longest: int) -> None:
        """Args: longest: Tokens of the longest sequence."""
        self._most = BASE_BYTES + BYTES_PER_TOKEN * longest
        self._held = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes | None]:
        """Yields the body of a request; None where the client left before its end.

        Raises:
            RequestError: It is too large, encoded, or not declared as JSON.
            BusyError: Too many large bodies are held.
        """
        headers = dict(scope["headers"])
        self._check(headers)
        body, more = bytearray(), True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    yield None
                    return
                part, more = message.get("body", b""), message.get("more_body", False)
                body += part
                self._held += len(part)
                if len(body) > self._most:
                    raise self._too_large()
                if self._held > MOST_BODIES * self._most:
                    raise BusyError("too many large requests at a time; ask again later.")
            yield bytes(body)
        finally:
            self._held -= len(body)

    def _check(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").decode("latin-1")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise RequestError(
                f"the request has content-type '{kind[:100]}', expected application/json "
                "(curl: -H 'content-type: application/json').",
                status=415,
            )
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() != "identity":
            raise RequestError(
                f"the request has content-encoding '{encoding[:100]}', expected none. Send the body as it is.",
                status=415,
            )
        if int(headers.get(b"content-length", b"0")) > self._most:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body of the request has more than {self._most} bytes. Shorten the prompts, or send them in several "
            "requests.",
            status=413,
        )


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Returns a server that is not started yet; it takes no more connections than there are file descriptors for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, files // 2)
    settings: dict[str, Any] = {"http": Connection, "ws": "none", "lifespan": "off", "log_level": "warning"}
    return uvicorn.Server(uvicorn.Config(app, limit_concurrency=most, timeout_graceful_shutdown=2, **settings))
