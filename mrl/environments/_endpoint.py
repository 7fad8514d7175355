"""HTTP endpoint for an agent program: OpenAI's chat completions on a local port, for one episode.

Each request waits in a thread until it is answered or its client disconnects. Sampling parameters are refused, unlike
in `mrl serve`, because the run's config sets them.

Source: OpenAI's API reference, "Chat".
"""

from __future__ import annotations

import json
import queue
import secrets
import select
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from mrl.environments.base import Message
from mrl.environments.openai_requests import RequestError, chat_messages, has_key, parse_json
from mrl.errors import shown

LARGEST_REQUEST = 1 << 24
"""Size limit of a request, bytes."""

POLL_S = 0.2
"""Interval between two checks whether a client has disconnected, s."""

IGNORED_FIELDS = {"model", "messages", "stream", "stream_options", "tools", "user", "metadata", "store"}
"""Fields that are allowed because they do not change sampling; `tools` are compared with the config's."""

NEUTRAL = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}
"""Fields that are allowed with this value only, the default."""


@dataclass
class EndpointRequest:
    """A pending chat request.

    Attributes:
        body: JSON body of the request.
        messages: Conversation, each content as one text.
        answer: Queue for the response: the assistant's message and its finish reason, or an error message.
        delivered: Queue for the result: True if the client was still connected when the response was sent.
    """

    body: dict[str, Any]
    messages: list[Message]
    answer: queue.SimpleQueue[tuple[Message, str] | str] = field(default_factory=queue.SimpleQueue)
    delivered: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)


class AgentEndpoint:
    """HTTP server of one episode.

    Attributes:
        url: Base URL for clients.
        key: API key for clients.
        requests: Queue of pending requests; None is put by the caller when the program has ended.
    """

    def __init__(self, ignored: frozenset[str]) -> None:
        """Starts listening on a free local port.

        Args:
            ignored: Fields of requests that are accepted and ignored.
        """
        self.key = secrets.token_hex(16)
        self.requests: queue.SimpleQueue[EndpointRequest | None] = queue.SimpleQueue()
        endpoint = self

        class Handler(_Handler):
            owner = endpoint
            allowed = IGNORED_FIELDS | ignored

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server; pending requests are dropped."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores every OSError, such as that of a closed connection; prints other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: AgentEndpoint
    allowed: set[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Lists the only model, "policy"."""
        if self._has_valid_key():
            self._send_json(200, {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "mrl"}]})

    def do_POST(self) -> None:
        """Answers a chat completion request."""
        if not self._has_valid_key():
            return
        try:
            body = self._body()
            if self.path.rstrip("/") != "/v1/chat/completions":
                raise RequestError(f"'{self.path}' is not served in a run, /v1/chat/completions is")
            checked = self._checked(parse_json(body))
            request = EndpointRequest(checked, chat_messages(checked.get("messages")))
        except RequestError as error:
            self._refuse(error.status, str(error))
            return
        self.owner.requests.put(request)
        is_delivered = False
        try:
            while (answer := self._answer(request)) is None:
                if self._is_disconnected():
                    self.close_connection = True
                    return
            left = self._is_disconnected()
            if isinstance(answer, str):
                self._refuse(400, answer)
            elif request.body.get("stream"):
                self._stream(*answer)
            else:
                choice = {"message": answer[0], "finish_reason": answer[1]}
                self._send_json(200, _chat_object("chat.completion", choice))
            is_delivered = not left
        finally:
            request.delivered.put(is_delivered)

    def _body(self) -> bytes:
        """Reads the body of the request.

        Raises:
            RequestError: The length is missing or too large, or the body is encoded; the connection is then closed.
        """
        length, encoding = self.headers.get("content-length"), self.headers.get("content-encoding", "identity")
        close, self.close_connection = self.close_connection, True
        if length is None or not (length.isascii() and length.isdigit()) or "transfer-encoding" in self.headers:
            raise RequestError(
                f"content-length is {shown(length)}; expected the bytes of the body, not sent in chunks", status=411
            )
        if encoding.lower() != "identity":
            raise RequestError(f"content-encoding is {shown(encoding)}; send the body as it is", status=415)
        size = int(length)
        if size > LARGEST_REQUEST:
            while size > 0 and (part := self.rfile.read(min(size, 1 << 20))):  # clients read only after sending all
                size -= len(part)
            raise RequestError(f"the request has more than {LARGEST_REQUEST} bytes", status=413)
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionResetError("the client disconnected before the end of its request")
        self.close_connection = close
        return body

    def _answer(self, request: EndpointRequest) -> tuple[Message, str] | str | None:
        """Waits briefly for the answer; returns None if there is none yet."""
        try:
            return request.answer.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _is_disconnected(self) -> bool:
        """Returns whether the client has closed the connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def log_message(self, *args: Any) -> None:
        """Logs nothing: standard error belongs to the worker."""

    def _checked(self, body: object) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise RequestError(f"the request is not a JSON object. Got {shown(body)}")
        for name, value in body.items():
            if name not in self.allowed and value is not None and NEUTRAL.get(name, ...) != value:
                raise RequestError(
                    f"'{name}' has no effect, because the run's config sets the sampling parameters. Remove it, or "
                    "list it in rollout.agent.environment_kwargs.ignore"
                )
        return body

    def _has_valid_key(self) -> bool:
        given = str(self.headers.get("authorization", "")).encode("latin-1", "replace")
        if has_key(given, self.owner.key):
            return True
        self.close_connection = True
        self._refuse(401, "wrong API key: use that of the environment variable OPENAI_API_KEY")
        return False

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._send_json(status, {"error": error})

    def _send_json(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _stream(self, message: Message, reason: str) -> None:
        """Sends server-sent events; the complete message is one event."""
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": reason}]
        events = [json.dumps(_chat_object("chat.completion.chunk", chunk)) for chunk in chunks]
        self._send(200, "text/event-stream", "".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _chat_object(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    choices = [{"index": 0, "logprobs": None, **choice}]
    named = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": named, "object": kind, "created": int(time.time()), "model": "policy", "choices": choices}
