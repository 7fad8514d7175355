"""HTTP application: routes, API key, errors in OpenAI's format, and responses, complete or as server-sent events.

It runs in a thread of rank 0 and uses no tensor: requests go to the `RequestQueue`, and the answers come back in
pieces. Worker threads parse and tokenize requests, so that a long one does not delay others. If a client disconnects,
its answers are cancelled.

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

from mrl.commands.serve.batching import MAX_WAITING, BusyError, RequestQueue
from mrl.commands.serve.http_server import BYTES_PER_TOKEN, BodyReader
from mrl.commands.serve.openai_responses import (
    ChatWriter,
    CompletionWriter,
    Identity,
    ResponseWriter,
    ToolChatWriter,
)
from mrl.commands.serve.requests import ChatRequest, CompletionRequest, read_request
from mrl.commands.serve.stream_state import Delta, StreamedAnswer
from mrl.config.reasoning import is_tag_token
from mrl.data.tokenizer import Tokenizer
from mrl.environments.formats import base as formats
from mrl.environments.formats.base import Format
from mrl.environments.openai_requests import RequestError, has_key
from mrl.errors import UserError, printable, shown

PARSERS = 2
"""Number of threads that parse and tokenize requests."""

LOCAL_HOSTS = ["127.0.0.1", "localhost", "[::1]"]

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """Model that the server offers.

    Attributes:
        name: Model name in requests.
        longest: Longest sequence, prompt and answer together, tokens.
        tokenizer: Tokenizer of the model.
        created: Start of the server, s since 1970.
        tool_format: Parser of the model's tool calls.
    """

    name: str
    longest: int
    tokenizer: Tokenizer
    created: int
    tool_format: Format

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens without special tokens, except for reasoning tags."""
        return self.tokenizer.decode([index for index in ids if index not in self._hidden_ids])

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """Special tokens to omit from texts. Reasoning tags are kept: without them reasoning reads as an answer."""
        decode, ends = self.tokenizer.decode, self.tokenizer.eos_ids
        special = self.tokenizer.special_ids
        return frozenset(index for index in special if index in ends or not is_tag_token(decode([index]).strip()))

    @cached_property
    def max_chars(self) -> int:
        """Length limit of a text to tokenize, characters; a longer one cannot fit, whatever its tokens are."""
        return self.longest * max(BYTES_PER_TOKEN, *map(len, self.tokenizer.vocabulary))


@dataclass(frozen=True)
class ParsedRequest:
    """Parsed and tokenized request.

    Attributes:
        writer: Builds the JSON objects of the response.
        prompts: Token ids of each prompt.
        sizes: Longest answer to each prompt, tokens.
    """

    writer: ResponseWriter
    prompts: list[list[int]]
    sizes: list[int]


@dataclass(frozen=True)
class ActiveRequest:
    """Request whose answers are being generated.

    Attributes:
        writer: Builds the JSON objects of the response.
        prompts: Token ids of each prompt.
        answers: `n` answers for each prompt.
        pieces: (index of the answer, piece), in order of arrival.
    """

    writer: ResponseWriter
    prompts: list[list[int]]
    answers: list[StreamedAnswer]
    pieces: asyncio.Queue[tuple[int, Delta]]


def make_app(served: ServedModel, request_queue: RequestQueue, key: str, *, local: bool) -> Starlette:
    """Returns the ASGI application of an OpenAI-compatible server.

    Args:
        served: Model to offer.
        request_queue: Queue of the answers to generate.
        key: Bearer token that clients must send; "": none.
        local: Only accept requests for a local hostname, against DNS rebinding from a browser on this machine.
    """

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def models(_: Request) -> Response:
        card = {
            "id": served.name, "object": "model", "created": served.created, "owned_by": "mrl",
            "max_model_len": served.longest,
        }  # fmt: skip
        return _json({"object": "list", "data": [card]})

    bodies, parsers = BodyReader(served.longest), ThreadPoolExecutor(PARSERS, "requests")
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", _Endpoint(served, request_queue, _read_completion, bodies, parsers), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(served, request_queue, _read_chat, bodies, parsers), methods=["POST"]),
    ]
    middleware = [Middleware(_KeyCheck, key)] if key else []
    if local:
        middleware.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS))
    handlers: dict[Any, Any] = {
        UserError: _refuse, BusyError: _busy, MemoryError: _busy, HTTPException: _not_found,
    }  # fmt: skip
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class _KeyCheck:
    """Middleware that answers 401 to requests without the key, except for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["path"] == "/health" or has_key(given, self._key):
            await self._app(scope, receive, send)
            return
        refusal = _error(
            401, "missing or wrong API key. Send this server's key as a bearer token (the client's api_key)."
        )
        refusal.headers["www-authenticate"] = "Bearer"
        await refusal(scope, receive, send)


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _error(error.status, str(error), param=error.param)
    return _error(400, str(error))


async def _busy(_: Request, error: Exception) -> Response:
    return _error(503, str(error) or "the server is out of memory; try again later.")


async def _not_found(_: Request, error: Any) -> Response:
    response = _error(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


class _Endpoint:
    """ASGI endpoint for one kind of request."""

    def __init__(
        self,
        served: ServedModel,
        request_queue: RequestQueue,
        read: Callable[[ServedModel, bytes], ParsedRequest],
        bodies: BodyReader,
        parsers: ThreadPoolExecutor,
    ) -> None:
        self._served, self._request_queue, self._read, self._bodies, self._parsers = (
            served,
            request_queue,
            read,
            bodies,
            parsers,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._parse(scope, receive)
        if request is None:
            return
        active = _submit(request, self._served, self._request_queue)
        try:
            await _unless_disconnected(receive, _send_answers(active, scope, receive, send))
        finally:
            self._request_queue.cancel(active.answers)

    async def _parse(self, scope: Scope, receive: Receive) -> ParsedRequest | None:
        """Returns the parsed request; None if the client disconnected first."""
        async with self._bodies.read(scope, receive) as body:
            if body is None:
                return None
            parsing = asyncio.get_running_loop().run_in_executor(self._parsers, self._read, self._served, body)
            return await _unless_disconnected(receive, parsing)


async def _unless_disconnected(receive: Receive, awaitable: Awaitable[T]) -> T | None:
    """Returns the awaited result; cancels it and returns None if the client disconnects first."""
    working, disconnected = asyncio.ensure_future(awaitable), asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected; call it after the entire request was received."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _read_completion(served: ServedModel, body: bytes) -> ParsedRequest:
    request = read_request(CompletionRequest, body)
    _check_fields(served, request)
    encode = served.tokenizer.encode
    _check_characters(served, max((len(one) for one in request.prompt if isinstance(one, str)), default=0), "prompt")
    prompts = [encode(one, prompt=True) if isinstance(one, str) else one for one in request.prompt]
    writer = CompletionWriter(_identity("cmpl", served), wants_logprobs=request.logprobs is not None, request=request)
    return _checked_sizes(served, writer, prompts, request.max_tokens)


def _read_chat(served: ServedModel, body: bytes) -> ParsedRequest:
    request = read_request(ChatRequest, body)
    _check_fields(served, request)
    tools = request.schemas
    _check_characters(served, sum(len(message["content"]) for message in request.messages), "messages")
    prompts = [served.tokenizer.apply_chat_template(request.templated, tools)]
    identity = _identity("chatcmpl", served)
    writer: ResponseWriter = ChatWriter(identity, wants_logprobs=request.logprobs, request=request)
    if tools:
        tool_format = partial(
            served.tool_format, tools=tools, prompt=formats.prompt_tail(prompts[0], served.tokenizer.decode)
        )
        writer = ToolChatWriter(identity, request.logprobs, request, tool_format)
    return _checked_sizes(served, writer, prompts, request.max_answer_tokens)


def _check_fields(served: ServedModel, request: CompletionRequest | ChatRequest) -> None:
    """Rejects fields that can be checked before tokenization."""
    if request.model != served.name:
        raise RequestError(f"the model {shown(request.model)} is not served here; '{served.name}' is.", "model")
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "this field has no effect without stream=true. Leave the field out, or set stream=true.", "stream_options"
        )
    num_prompts = len(request.prompt) if isinstance(request, CompletionRequest) else 1
    if num_prompts * request.n > MAX_WAITING:
        raise RequestError(
            f"{num_prompts} prompts with {request.n} answers each are more than the {MAX_WAITING} answers that this "
            "server takes at a time. Send them in several requests.",
            "n",
        )


def _check_characters(served: ServedModel, num_chars: int, param: str) -> None:
    """Rejects a text that cannot fit whatever its tokens are, since tokenizing it takes time and memory."""
    if num_chars > served.max_chars:
        raise RequestError(
            f"the prompt has {num_chars} characters, more than fit into this server's {served.longest} tokens. "
            "Shorten it.",
            param,
        )


def _identity(kind: str, served: ServedModel) -> Identity:
    reads = served.tokenizer.decode, served.tokenizer.token_bytes
    return Identity(f"{kind}-{uuid.uuid4().hex}", int(time.time()), served.name, *reads)


def _checked_sizes(
    served: ServedModel, writer: ResponseWriter, prompts: list[list[int]], max_tokens: int | None
) -> ParsedRequest:
    """Checks prompts and answers against the server's limits and the vocabulary, and returns the request."""
    default = writer.request.default_max_tokens
    field = "prompt" if isinstance(writer.request, CompletionRequest) else "messages"
    several = len(prompts) > 1
    sizes = [
        _max_answer_tokens(served, ids, max_tokens, default, f"{field}.{index}" if several else field)
        for index, ids in enumerate(prompts)
    ]
    return ParsedRequest(writer, prompts, sizes)


def _max_answer_tokens(
    served: ServedModel, ids: Sequence[int], max_tokens: int | None, default: int | None, param: str
) -> int:
    size = served.tokenizer.vocab_size
    if not ids:
        raise RequestError("the prompt has no tokens.", param)
    if max(ids) >= size:
        raise RequestError(f"the prompt has token {shown(max(ids))}; the tokenizer's ids end at {size - 1}.", param)
    room = served.longest - len(ids)
    if room < (max_tokens or 1):
        raise RequestError(
            f"the prompt has {len(ids)} tokens and {shown(max_tokens or 1)} more are requested, together above the "
            f"{served.longest} of this server. Shorten the prompt, lower max_tokens, or serve with a longer "
            "rollout.prompt_length.",
            param,
        )
    return max_tokens or min(room, default or room)


def _submit(request: ParsedRequest, served: ServedModel, request_queue: RequestQueue) -> ActiveRequest:
    loop, pieces, fields = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Delta]](), request.writer.request

    def answer(index: int, ids: list[int], size: int) -> StreamedAnswer:
        def emit(piece: Delta) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

        return StreamedAnswer(ids, fields.sampling(size), index % fields.n, served.decode, emit)

    answers = [
        answer(number * fields.n + index, ids, size)
        for number, (ids, size) in enumerate(zip(request.prompts, request.sizes, strict=True))
        for index in range(fields.n)
    ]
    request_queue.submit(answers)
    return ActiveRequest(request.writer, request.prompts, answers, pieces)


async def _send_answers(active: ActiveRequest, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends all answers once they are complete, or streams them."""
    if not active.writer.request.stream:
        await (await _complete(active))(scope, receive, send)
        return
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in _events(active):
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _complete(active: ActiveRequest) -> Response:
    found: list[list[Delta]] = [[] for _ in active.answers]
    left = len(found)
    while left:
        index, piece = await active.pieces.get()
        if piece.error is not None:
            return _error(piece.status, piece.error)
        found[index].append(piece)
        left -= piece.finish_reason is not None
    return await asyncio.to_thread(lambda: _json(active.writer.response(active.prompts, found)))


async def _events(active: ActiveRequest) -> AsyncIterator[str]:
    for chunk in active.writer.first_chunks(active.prompts, len(active.answers)):
        yield _event(chunk)
    left, tokens = len(active.answers), 0
    while left:
        index, piece = await active.pieces.get()
        if piece.error is not None:
            yield _event(_error_body(piece.status, piece.error))
            return
        yield _event(active.writer.chunk(index, piece))
        tokens += len(piece.ids)
        left -= piece.finish_reason is not None
    options = active.writer.request.stream_options
    if options is not None and options.include_usage:
        yield _event(active.writer.usage_chunk(active.prompts, tokens))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {_dump(value)}\n\n"


def _dump(value: dict[str, Any]) -> str:
    """Returns ASCII JSON, since a model may write an unpaired surrogate, which UTF-8 cannot encode."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(_dump(value), status, media_type="application/json")


def _error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": printable(message), "type": kind, "param": param, "code": None}}


def _error(status: int, message: str, *, param: str | None = None) -> Response:
    return _json(_error_body(status, message, param), status)
