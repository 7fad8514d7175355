"""The HTTP side: requests in, answers out, whole or as server-sent events.

Owns routes, keys and errors in OpenAI's form. It runs in a thread of rank 0 and touches no tensor: answers are left at
the `Desk` and come back piece by piece.

Source: OpenAI's API reference; `token_ids` and `prompt_token_ids` are vLLM's.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from mrl.data.tokenizer import Tokenizer
from mrl.environments.formats import base as formats
from mrl.environments.formats.base import Format
from mrl.errors import UserError
from mrl.serve import told
from mrl.serve.answer import Answer, Delta
from mrl.serve.requests import ChatRequest, CompletionRequest
from mrl.serve.requests import Request as Asked
from mrl.serve.rounds import BusyError, Desk

LOCAL_HOSTS = ["127.0.0.1", "localhost", "[::1]"]


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
        """The text of tokens, without the special ones."""
        special = self.tokenizer.special_ids
        return self.tokenizer.decode([index for index in ids if index not in special])


@dataclass(frozen=True)
class Opened:
    """A request whose answers are on their way.

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


def make_app(served: Served, desk: Desk, key: str, *, local: bool) -> FastAPI:
    """The application.

    Args:
        served: The model.
        desk: Where answers are left.
        key: What clients must send as a bearer token; "": nothing.
        local: Only this machine asks: a page in a browser here that gave itself another name is turned away.
    """
    app = FastAPI(title="mrl serve", docs_url=None, redoc_url=None, openapi_url=None)
    if local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_HOSTS)

    _add_refusals(app, key)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {
            "id": served.name, "object": "model", "created": served.began, "owned_by": "mrl",
            "max_model_len": served.longest,
        }  # fmt: skip
        return {"object": "list", "data": [card]}

    @app.post("/v1/completions")
    async def complete(asked: CompletionRequest, request: Request) -> Response:
        encode = served.tokenizer.encode
        prompts = [encode(one, prompt=True) if isinstance(one, str) else one for one in asked.prompts]
        telling = told.Completion(_identity("cmpl", served), wants_logprobs=asked.logprobs is not None, asked=asked)
        return await _respond(_open(served, desk, asked, prompts, asked.max_tokens, telling), request)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        tools = asked.schemas
        prompts = [served.tokenizer.apply_chat_template(asked.templated, tools)]
        identity = _identity("chatcmpl", served)
        telling: told.Told = told.Chat(identity, wants_logprobs=asked.logprobs, asked=asked)
        if tools:
            thinks = formats.opens_thought(served.tokenizer.decode(prompts[0][-formats.TAIL_TOKENS :]))
            form = partial(served.form, tools=tools, in_thought=thinks)
            telling = told.ToolChat(identity, asked.logprobs, asked, form)
        return await _respond(_open(served, desk, asked, prompts, asked.most_tokens, telling), request)

    return app


def _add_refusals(app: FastAPI, key: str) -> None:
    """What the application answers where it does not answer, in OpenAI's form."""

    @app.middleware("http")
    async def check_key(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if key and request.url.path != "/health" and not hmac.compare_digest(given, key.encode()):
            return _error(401, "this server wants its key as a bearer token (the client's api_key).")
        return await go_on(request)

    @app.exception_handler(RequestValidationError)
    async def refuse(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(400, f"{where}: {first['msg']}. Got {str(first.get('input'))[:100]}", param=where)

    @app.exception_handler(UserError)
    async def not_possible(_: Request, error: UserError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> Response:
        return _error(503, str(error), kind="server_error")

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))


def _identity(kind: str, served: Served) -> told.Identity:
    return told.Identity(f"{kind}-{uuid.uuid4().hex}", int(time.time()), served.name, served.tokenizer.decode)


def _open(
    served: Served, desk: Desk, asked: Asked, prompts: list[list[int]], max_tokens: int | None, telling: told.Told
) -> Opened:
    """Leaves a request's answers at the desk.

    Raises:
        UserError: It asks for another model, or for more than there is room for.
        BusyError: Too many wait.
    """
    if asked.model != served.name:
        raise UserError(f"model '{asked.model}' is not served here; '{served.name}' is.")
    if asked.stream_options is not None and not asked.stream:
        raise UserError("stream_options has no effect without stream=true. Remove it, or stream.")
    sizes = [_most_tokens(served, ids, max_tokens, asked.usual_tokens) for ids in prompts]
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Delta]]()

    def answer(place: int, ids: list[int], size: int) -> Answer:
        def tell(piece: Delta) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (place, piece))

        return Answer(ids, asked.sampling(size), place % asked.n, served.decode, tell)

    answers = [
        answer(number * asked.n + index, ids, size)
        for number, (ids, size) in enumerate(zip(prompts, sizes, strict=True))
        for index in range(asked.n)
    ]
    desk.leave(answers)
    return Opened(telling, prompts, answers, pieces)


def _most_tokens(served: Served, ids: Sequence[int], max_tokens: int | None, usual: int | None) -> int:
    """How long an answer to this prompt may become."""
    size = served.tokenizer.vocab_size
    if not ids:
        raise UserError("the prompt has no tokens.")
    if max(ids) >= size:
        raise UserError(f"the prompt has token {max(ids)}; the tokenizer's ids end at {size - 1}.")
    room = served.longest - len(ids)
    if room < (max_tokens or 1):
        raise UserError(
            f"the prompt has {len(ids)} tokens and asks for {max_tokens or 1} more, together above the "
            f"{served.longest} of this server. Shorten the prompt, ask for fewer (max_tokens), or serve with a longer "
            "rollout.prompt_length."
        )
    return max_tokens or min(room, usual or room)


async def _respond(opened: Opened, request: Request) -> Response:
    """The whole answer, or a stream; answers that nobody waits for any more are given up."""
    if opened.told.asked.stream:
        return StreamingResponse(_events(opened), media_type="text/event-stream")
    found: list[list[Delta]] = [[] for _ in opened.answers]
    reader = asyncio.ensure_future(_read_all(opened, found))
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({reader, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            return Response(status_code=499)
        error = reader.result()
    finally:
        _give_up(opened)
        for task in (reader, gone):
            task.cancel()
    if error is not None:
        return _error(503, error, kind="server_error")
    return JSONResponse(opened.told.whole(opened.prompts, found))


async def _read_all(opened: Opened, found: list[list[Delta]]) -> str | None:
    """Takes all pieces of all answers; an error ends it."""
    left = len(found)
    while left:
        place, piece = await opened.pieces.get()
        if piece.error is not None:
            return piece.error
        found[place].append(piece)
        left -= piece.finish_reason is not None
    return None


async def _until_gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.5)


async def _events(opened: Opened) -> AsyncIterator[str]:
    """Server-sent events, as the pieces come."""
    try:
        for chunk in opened.told.beginning(opened.prompts, len(opened.answers)):
            yield _event(chunk)
        left, tokens = len(opened.answers), 0
        while left:
            place, piece = await opened.pieces.get()
            if piece.error is not None:
                yield _event(_error_body(piece.error, kind="server_error"))
                return
            yield _event(opened.told.chunk(place, piece))
            tokens += len(piece.ids)
            left -= piece.finish_reason is not None
        options = opened.told.asked.stream_options
        if options is not None and options.include_usage:
            yield _event(opened.told.usage_chunk(opened.prompts, tokens))
        yield "data: [DONE]\n\n"
    finally:
        _give_up(opened)  # also where the client went away


def _give_up(opened: Opened) -> None:
    for answer in opened.answers:
        answer.cancelled = True


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error_body(message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _error(status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> Response:
    return JSONResponse(_error_body(message, kind=kind, param=param), status_code=status)
