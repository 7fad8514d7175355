"""The HTTP side: requests in, answers out, complete or as server-sent events.

Owns routes, keys and errors in OpenAI's form. It runs in a thread of rank 0 and touches no tensor: answers are left at
the `Desk` and come back in pieces. Requests are parsed and tokenized in worker threads, so that a long one delays no
other. An answer whose client leaves is withdrawn.

Source: OpenAI's API reference; `token_ids` and `prompt_token_ids` are vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mrl.commands.serve import openai_responses as told
from mrl.commands.serve.batching import MOST_WAITING, BusyError, Desk
from mrl.commands.serve.http_server import BYTES_PER_TOKEN, Bodies
from mrl.commands.serve.requests import ChatRequest, CompletionRequest, read_request
from mrl.commands.serve.stream_state import Answer, Delta
from mrl.config.reasoning import is_tag_token
from mrl.data.tokenizer import Tokenizer
from mrl.environments.formats import base as formats
from mrl.environments.formats.base import Format
from mrl.environments.openai_requests import RequestError, has_key
from mrl.errors import UserError, printable, shown

PARSERS = 2
"""Requests that are parsed and tokenized at a time."""

LOCAL_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

T = TypeVar("T")


@dataclass(frozen=True)
class Served:
    """What is served.

    Attributes:
        name: Of the model, as requests say it.
        longest: Tokens of prompt and answer together.
        tokenizer: The model's.
        began: When, seconds since 1970.
        form: How the model writes that it calls a tool.
    """

    name: str
    longest: int
    tokenizer: Tokenizer
    began: int
    form: Format

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones other than reasoning tags."""
        return self.tokenizer.decode([index for index in ids if index not in self._hidden_ids])

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Special tokens that no text shows. Reasoning tags are shown: without them reasoning reads as an answer."""
        decode, ends = self.tokenizer.decode, self.tokenizer.eos_ids
        special = self.tokenizer.special_ids
        return frozenset(index for index in special if index in ends or not is_tag_token(decode([index]).strip()))

    @cached_property
    def most_chars(self) -> int:
        """Characters of the longest text that is tokenized; a longer one cannot fit, whatever its tokens are."""
        return self.longest * max(BYTES_PER_TOKEN, *map(len, self.tokenizer.vocabulary))


@dataclass(frozen=True)
class Asked:
    """A request that was read.

    Attributes:
        told: Writes what is sent.
        prompts: Token ids of each prompt.
        sizes: Longest answer to each prompt, tokens.
    """

    told: told.Told
    prompts: list[list[int]]
    sizes: list[int]


@dataclass(frozen=True)
class Opened:
    """A request whose answers are being generated.

    Attributes:
        told: Writes what is sent.
        prompts: Token ids of each prompt.
        answers: `n` for each prompt.
        pieces: (answer, piece), as they come.
    """

    told: told.Told
    prompts: list[list[int]]
    answers: list[Answer]
    pieces: asyncio.Queue[tuple[int, Delta]]


def make_app(served: Served, desk: Desk, key: str, *, local: bool) -> Starlette:
    """Returns the application.

    Args:
        served: The model.
        desk: Where answers are left.
        key: What clients must send as a bearer token; "": nothing.
        local: Whether only this machine asks: a page in a browser here that gave itself another name is turned away.
    """

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def models(_: Request) -> Response:
        card = {
            "id": served.name, "object": "model", "created": served.began, "owned_by": "mrl",
            "max_model_len": served.longest,
        }  # fmt: skip
        return _json({"object": "list", "data": [card]})

    bodies, parsers = Bodies(served.longest), ThreadPoolExecutor(PARSERS, "requests")
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", _Answering(served, desk, _read_completion, bodies, parsers), methods=["POST"]),
        Route("/v1/chat/completions", _Answering(served, desk, _read_chat, bodies, parsers), methods=["POST"]),
    ]
    middleware = [Middleware(_KeyCheck, key)] if key else []
    if local:
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS))
    handlers: dict[Any, Any] = {
        UserError: _refuse, BusyError: _busy, MemoryError: _busy, HTTPException: _not_found,
    }  # fmt: skip
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class _KeyCheck:
    """Answers 401 to requests without the key, except for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["path"] == "/health" or has_key(given, self._key):
            await self._app(scope, receive, send)
            return
        refusal = _error(401, "this server wants its key as a bearer token (the client's api_key).")
        refusal.headers["www-authenticate"] = "Bearer"
        await refusal(scope, receive, send)


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _error(error.status, str(error), param=error.param)
    return _error(400, str(error))


async def _busy(_: Request, error: Exception) -> Response:
    return _error(503, str(error) or "the server is out of memory; ask again later.")


async def _not_found(_: Request, error: Any) -> Response:
    response = _error(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


class _Answering:
    """The route of one kind of request."""

    def __init__(
        self,
        served: Served,
        desk: Desk,
        read: Callable[[Served, bytes], Asked],
        bodies: Bodies,
        parsers: ThreadPoolExecutor,
    ) -> None:
        self._served, self._desk, self._read, self._bodies, self._parsers = served, desk, read, bodies, parsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = await self._asked(scope, receive)
        if asked is None:
            return
        opened = _open(asked, self._served, self._desk)
        try:
            await _unless_gone(receive, _send_answers(opened, scope, receive, send))
        finally:
            self._desk.withdraw(opened.answers)

    async def _asked(self, scope: Scope, receive: Receive) -> Asked | None:
        """Returns the request; None where the client left before it was read."""
        async with self._bodies.read(scope, receive) as body:
            if body is None:
                return None
            parsing = asyncio.get_running_loop().run_in_executor(self._parsers, self._read, self._served, body)
            return await _unless_gone(receive, parsing)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """Returns the result of `work`; None where the client left first, which cancels it."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has left; all of its request must have been received."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _read_completion(served: Served, body: bytes) -> Asked:
    asked = read_request(CompletionRequest, body)
    _check_fields(served, asked)
    encode = served.tokenizer.encode
    _check_characters(served, max((len(one) for one in asked.prompt if isinstance(one, str)), default=0), "prompt")
    prompts = [encode(one, prompt=True) if isinstance(one, str) else one for one in asked.prompt]
    telling = told.Completion(_identity("cmpl", served), wants_logprobs=asked.logprobs is not None, asked=asked)
    return _fitting(served, telling, prompts, asked.max_tokens)


def _read_chat(served: Served, body: bytes) -> Asked:
    asked = read_request(ChatRequest, body)
    _check_fields(served, asked)
    tools = asked.schemas
    _check_characters(served, sum(len(message["content"]) for message in asked.messages), "messages")
    prompts = [served.tokenizer.apply_chat_template(asked.templated, tools)]
    identity = _identity("chatcmpl", served)
    telling: told.Told = told.Chat(identity, wants_logprobs=asked.logprobs, asked=asked)
    if tools:
        form = partial(served.form, tools=tools, prompt=formats.prompt_tail(prompts[0], served.tokenizer.decode))
        telling = told.ToolChat(identity, asked.logprobs, asked, form)
    return _fitting(served, telling, prompts, asked.most_tokens)


def _check_fields(served: Served, asked: CompletionRequest | ChatRequest) -> None:
    """Refuses fields that can be refused before anything is tokenized."""
    if asked.model != served.name:
        raise RequestError(f"the model {shown(asked.model)} is not served here; '{served.name}' is.", "model")
    if asked.stream_options is not None and not asked.stream:
        raise RequestError(
            "this field has no effect without stream=true. Leave it out, or set stream=true.", "stream_options"
        )
    num_prompts = len(asked.prompt) if isinstance(asked, CompletionRequest) else 1
    if num_prompts * asked.n > MOST_WAITING:
        raise RequestError(
            f"{num_prompts} prompts with {asked.n} answers each are more than the {MOST_WAITING} answers that this "
            "server takes at a time. Send them in several requests.",
            "n",
        )


def _check_characters(served: Served, num_chars: int, param: str) -> None:
    """Refuses a text that is too long for any tokens, since to tokenize it takes time and memory."""
    if num_chars > served.most_chars:
        raise RequestError(
            f"the prompt has {num_chars} characters, more than the {served.longest} tokens of this server hold. "
            "Shorten it.",
            param,
        )


def _identity(kind: str, served: Served) -> told.Identity:
    reads = served.tokenizer.decode, served.tokenizer.token_bytes
    return told.Identity(f"{kind}-{uuid.uuid4().hex}", int(time.time()), served.name, *reads)


def _fitting(served: Served, telling: told.Told, prompts: list[list[int]], max_tokens: int | None) -> Asked:
    """Returns a request whose prompts and answers fit the server.

    Raises:
        RequestError: One does not, or has a token that the model does not know.
    """
    usual = telling.asked.usual_tokens
    field = "prompt" if isinstance(telling.asked, CompletionRequest) else "messages"
    several = len(prompts) > 1
    sizes = [
        _most_tokens(served, ids, max_tokens, usual, f"{field}.{place}" if several else field)
        for place, ids in enumerate(prompts)
    ]
    return Asked(telling, prompts, sizes)


def _most_tokens(served: Served, ids: Sequence[int], max_tokens: int | None, usual: int | None, param: str) -> int:
    """Returns the longest answer to a prompt, tokens."""
    size = served.tokenizer.vocab_size
    if not ids:
        raise RequestError("the prompt has no tokens.", param)
    if max(ids) >= size:
        raise RequestError(f"the prompt has token {shown(max(ids))}; the tokenizer's ids end at {size - 1}.", param)
    room = served.longest - len(ids)
    if room < (max_tokens or 1):
        raise RequestError(
            f"the prompt has {len(ids)} tokens and asks for {shown(max_tokens or 1)} more, together above the "
            f"{served.longest} of this server. Shorten the prompt, ask for fewer (max_tokens), or serve with a longer "
            "rollout.prompt_length.",
            param,
        )
    return max_tokens or min(room, usual or room)


def _open(asked: Asked, served: Served, desk: Desk) -> Opened:
    """Leaves a request's answers at the desk.

    Raises:
        BusyError: Too many wait.
    """
    loop, pieces, fields = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Delta]](), asked.told.asked

    def answer(place: int, ids: list[int], size: int) -> Answer:
        def tell(piece: Delta) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (place, piece))

        return Answer(ids, fields.sampling(size), place % fields.n, served.decode, tell)

    answers = [
        answer(number * fields.n + index, ids, size)
        for number, (ids, size) in enumerate(zip(asked.prompts, asked.sizes, strict=True))
        for index in range(fields.n)
    ]
    desk.leave(answers)
    return Opened(asked.told, asked.prompts, answers, pieces)


async def _send_answers(opened: Opened, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends all answers when they are complete, or a stream of them."""
    if not opened.told.asked.stream:
        await (await _complete(opened))(scope, receive, send)
        return
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in _events(opened):
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _complete(opened: Opened) -> Response:
    """Returns the response with all answers, or the error of one."""
    found: list[list[Delta]] = [[] for _ in opened.answers]
    left = len(found)
    while left:
        place, piece = await opened.pieces.get()
        if piece.error is not None:
            return _error(piece.status, piece.error)
        found[place].append(piece)
        left -= piece.finish_reason is not None
    return await asyncio.to_thread(lambda: _json(opened.told.whole(opened.prompts, found)))


async def _events(opened: Opened) -> AsyncIterator[str]:
    """Yields server-sent events as the pieces come."""
    for chunk in opened.told.beginning(opened.prompts, len(opened.answers)):
        yield _event(chunk)
    left, tokens = len(opened.answers), 0
    while left:
        place, piece = await opened.pieces.get()
        if piece.error is not None:
            yield _event(_error_body(piece.status, piece.error))
            return
        yield _event(opened.told.chunk(place, piece))
        tokens += len(piece.ids)
        left -= piece.finish_reason is not None
    options = opened.told.asked.stream_options
    if options is not None and options.include_usage:
        yield _event(opened.told.usage_chunk(opened.prompts, tokens))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {_dump(value)}\n\n"


def _dump(value: dict[str, Any]) -> str:
    """Returns JSON in ASCII: a model may write half of a surrogate pair as an escape, which UTF-8 cannot encode."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(_dump(value), status, media_type="application/json")


def _error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": printable(message), "type": kind, "param": param, "code": None}}


def _error(status: int, message: str, *, param: str | None = None) -> Response:
    return _json(_error_body(status, message, param), status)
