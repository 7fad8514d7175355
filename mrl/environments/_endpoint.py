"""The endpoint that an agent program talks to: OpenAI's chat completions on a port of this machine, for one episode.

Owns the HTTP side, in threads: a request waits until it is answered. What may be asked is less than of `mrl serve`,
since how the policy samples is the run's.

Source: OpenAI's API reference, "Chat".
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from mrl.environments.base import Message

LARGEST_REQUEST = 1 << 24
"""Bytes of a request."""

WITHOUT_EFFECT = {"model", "messages", "stream", "stream_options", "tools", "user", "metadata", "store"}
"""Fields that change no token that is sampled: how the answer is told, and the tools, which are compared."""

NEUTRAL = {"n": 1, "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}
"""Fields that may stand there with this value."""


@dataclass
class Asked:
    """A request that waits.

    Attributes:
        body: Its JSON.
        answer: Takes the assistant's message and why it ended, or a refusal in words.
    """

    body: dict[str, Any]
    answer: queue.SimpleQueue[tuple[Message, str] | str] = field(default_factory=queue.SimpleQueue)

    @property
    def messages(self) -> list[Message]:
        """The conversation, each content as one text.

        Raises:
            ValueError: They are none.
        """
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ValueError("'messages' is no list of objects")
        return [{**one, "content": _text(one.get("content"))} for one in messages]


class Endpoint:
    """Listens as long as it lives.

    Attributes:
        url: What clients call `base_url`.
        key: What they call `api_key`.
        asked: Requests as they come.
    """

    def __init__(self, ignored: frozenset[str]) -> None:
        """Starts to listen.

        Args:
            ignored: Fields of a request that may say something else than the run does.
        """
        self.key = secrets.token_hex(16)
        self.asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        endpoint = self

        class Handler(_Handler):
            owner = endpoint
            may_say = WITHOUT_EFFECT | ignored

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more; requests that wait are let go."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: Endpoint
    may_say: set[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The models: one."""
        if self._is_let_in():
            self._tell(200, {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "mrl"}]})

    def do_POST(self) -> None:
        """A chat completion."""
        if not self._is_let_in():
            return
        try:
            size = int(self.headers.get("content-length", "0"))
            body = json.loads(self.rfile.read(size)) if size <= LARGEST_REQUEST else None
            if self.path.rstrip("/") != "/v1/chat/completions":
                raise ValueError(f"'{self.path}' is not served in a run, /v1/chat/completions is")
            asked = Asked(self._checked(body))
        except (ValueError, TypeError, RecursionError) as error:
            self._refuse(400, str(error))
            return
        self.owner.asked.put(asked)
        answer = asked.answer.get()
        if isinstance(answer, str):
            self._refuse(400, answer)
        elif asked.body.get("stream"):
            self._stream(*answer)
        else:
            self._tell(200, _chat_object("chat.completion", {"message": answer[0], "finish_reason": answer[1]}))

    def log_message(self, *args: Any) -> None:
        """Nothing: the worker's output is not this one's."""

    def _checked(self, body: object) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise TypeError(f"the request is no JSON object of at most {LARGEST_REQUEST} bytes")
        for name, value in body.items():
            if name not in self.may_say and value is not None and NEUTRAL.get(name, ...) != value:
                raise ValueError(
                    f"'{name}' has no effect in a run, whose config says how the policy samples. Leave it out, or "
                    "list it in rollout.agent.environment_kwargs.ignore"
                )
        return body

    def _is_let_in(self) -> bool:
        given = self.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self.owner.key.encode()):
            return True
        self.close_connection = True
        self._refuse(401, "the key is none of this episode's: use the environment variable OPENAI_API_KEY")
        return False

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._tell(status, {"error": error})

    def _tell(self, status: int, value: Mapping[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _stream(self, message: Message, reason: str) -> None:
        """Server-sent events; the message is whole, and comes as one."""
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


def _text(content: object) -> str:
    """A message's content as one text: parts that are texts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    if len(found) < len(texts):
        raise ValueError(f"a message's content is neither a text nor parts of texts: {str(content)[:100]}")
    return "".join(found)
