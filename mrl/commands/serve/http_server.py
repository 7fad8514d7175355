"""uvicorn server with limits on time, size and number of connections and requests.

uvicorn itself waits without limit for the rest of a request, and for a client that does not read.
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

MAX_CONNECTIONS = 4096
"""Limit of open connections; further ones get status 503."""

REQUEST_S = 60.0
"""Longest time from the first byte of a request (or the connection) to its last, s."""

STALL_S = 60.0
"""Longest time in which a client reads nothing of a pending response, s."""

BASE_BYTES, BYTES_PER_TOKEN = 1 << 20, 64
"""Size limit of a body: BASE_BYTES + BYTES_PER_TOKEN * tokens of the longest sequence."""

MAX_BODIES = 32
"""Total size limit of the bodies in memory, as a multiple of the limit of one."""


class Connection(H11Protocol):
    """HTTP connection that is closed if its client stalls."""

    _timers: dict[str, asyncio.TimerHandle]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timeout of the first request."""
        self._timers = {}
        super().connection_made(transport)
        self._start("request", REQUEST_S)

    def data_received(self, data: bytes) -> None:
        """Handles a part of a request; restarts or stops the timeout of the request."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._start("request", REQUEST_S)
        else:
            self._stop("request")

    def pause_writing(self) -> None:
        """Starts the timeout of a client that does not read."""
        super().pause_writing()
        self._start("answer", STALL_S)

    def resume_writing(self) -> None:
        """Stops the timeout of a client that reads again."""
        super().resume_writing()
        self._stop("answer")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timeouts."""
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Rejects malformed HTTP.

        uvicorn's version raises if a response has started, and accepts another request after it.
        """
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


class BodyReader:
    """Reader of request bodies with limits of each body's size and of their total."""

    def __init__(self, longest: int) -> None:
        """Sets the size limits for a model whose longest sequence has `longest` tokens."""
        self._max_bytes = BASE_BYTES + BYTES_PER_TOKEN * longest
        self._buffered = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncIterator[bytes | None]:
        """Yields the body of a request; None if the client disconnected before its end.

        Raises:
            RequestError: The body is too large, encoded, or not declared as JSON.
            BusyError: Too many large bodies are in memory.
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
                self._buffered += len(part)
                if len(body) > self._max_bytes:
                    raise self._too_large()
                if self._buffered > MAX_BODIES * self._max_bytes:
                    raise BusyError("too many large requests at a time; try again later.")
            yield bytes(body)
        finally:
            self._buffered -= len(body)

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
                f"the request has content-encoding '{encoding[:100]}', expected none. Send the body uncompressed.",
                status=415,
            )
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body of the request has more than {self._max_bytes} bytes. Shorten the prompts, or send them in "
            "several requests.",
            status=413,
        )


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Returns a server that is not started yet; its connections are limited to half of the file descriptors."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)
    settings: dict[str, Any] = {"http": Connection, "ws": "none", "lifespan": "off", "log_level": "warning"}
    return uvicorn.Server(uvicorn.Config(app, limit_concurrency=limit, timeout_graceful_shutdown=2, **settings))
