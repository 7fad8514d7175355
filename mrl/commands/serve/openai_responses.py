"""JSON objects of completion and chat responses, complete and in chunks, in OpenAI's format.

Log-probabilities are those of the distribution that was sampled from, after temperature and truncation.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from mrl.commands.serve.requests import Request
from mrl.commands.serve.stream_state import Delta
from mrl.environments.base import ToolCall
from mrl.environments.formats.base import Parsed

Json = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """Fields that every object of one response repeats, and the tokenizer's functions.

    Attributes:
        id: Id of the response.
        created: Time of the request, s since 1970.
        model: Model name of the request.
        decode: Returns the text of token ids, with special tokens.
        token_bytes: Returns the bytes of a token's text.
    """

    id: str
    created: int
    model: str
    decode: Callable[[Sequence[int]], str]
    token_bytes: Callable[[int], bytes]


class ResponseWriter(ABC):
    """Base class of the builders of one response's JSON objects."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, identity: Identity, *, wants_logprobs: bool, request: Request) -> None:
        """Creates a writer for a response that has not started."""
        self.request = request
        self._identity, self._wants_logprobs = identity, wants_logprobs
        self._offsets: dict[int, int] = {}

    @abstractmethod
    def content(self, text: str) -> Json:
        """Returns the text field of a complete choice."""

    @abstractmethod
    def delta(self, text: str) -> Json:
        """Returns the text field of a chunk."""

    @abstractmethod
    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """Returns the log-probability field of the next tokens of choice `index`."""

    def response(self, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[Delta]]) -> Json:
        """Returns the complete response; `found` has the pieces of each choice."""
        choices = []
        for index, pieces in enumerate(found):
            joined = Delta(
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.ids),
                tuple(value for piece in pieces for value in piece.logprobs),
                pieces[-1].finish_reason,
            )
            choice = self._choice(index, self.content(joined.text), joined)
            if self.request.return_token_ids:
                choice["prompt_token_ids"] = list(prompts[index // self.request.n])
            choices.append(choice)
        tokens = sum(len(piece.ids) for pieces in found for piece in pieces)
        return self._object(self.kind, choices) | {"usage": self._usage(prompts, tokens)}

    def first_chunks(self, prompts: Sequence[Sequence[int]], num_answers: int) -> list[Json]:
        """Returns the chunks that precede any text."""
        return []

    def chunk(self, index: int, piece: Delta) -> Json:
        """Returns the chunk for a piece of choice `index`."""
        return self._object(self.chunk_kind, [self._choice(index, self.delta(piece.text), piece)])

    def usage_chunk(self, prompts: Sequence[Sequence[int]], tokens: int) -> Json:
        """Returns the last chunk, requested by `stream_options.include_usage`."""
        return self._object(self.chunk_kind, []) | {"usage": self._usage(prompts, tokens)}

    def _choice(self, index: int, content: Json, piece: Delta) -> Json:
        choice = {"index": index, **content, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._wants_logprobs:
            choice["logprobs"] = self.logprobs(index, piece.ids, piece.logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        return choice

    def _object(self, kind: str, choices: list[Json]) -> Json:
        identity = self._identity
        return {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": identity.model,
            "choices": choices,
        }

    def _usage(self, prompts: Sequence[Sequence[int]], tokens: int) -> Json:
        prompt_tokens = sum(map(len, prompts))
        return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self._identity.decode([token]) for token in ids]


class CompletionWriter(ResponseWriter):
    """Builder of responses to POST /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def content(self, text: str) -> Json:
        """Returns the text field of a complete choice."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """Returns the text field of a chunk."""
        return {"text": text}

    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """Returns the log-probability field of a completion, with the offset of each token in the text."""
        texts, at = self._texts(ids), self._offsets.get(index, 0)
        offsets = list(accumulate(map(len, texts), initial=at))
        self._offsets[index] = offsets.pop()
        return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": offsets}


class ChatWriter(ResponseWriter):
    """Builder of responses to POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def content(self, text: str) -> Json:
        """Returns the message of a complete choice."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        """Returns the message part of a chunk."""
        return {"delta": {"content": text}}

    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """Returns the log-probability field of a chat, with the bytes of each token."""
        entries = [
            {"token": text, "bytes": list(self._identity.token_bytes(token)), "logprob": value, "top_logprobs": []}
            for token, text, value in zip(ids, self._texts(ids), values, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def first_chunks(self, prompts: Sequence[Sequence[int]], num_answers: int) -> list[Json]:
        """Returns one chunk per choice with its role."""
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        return [self._object(self.chunk_kind, [{"index": index, **role}]) for index in range(num_answers)]


class ToolChatWriter(ChatWriter):
    """Builder of responses to a chat with tools; a message is sent once it is complete, when its calls are known."""

    def __init__(
        self, identity: Identity, wants_logprobs: bool, request: Request, tool_format: Callable[[str], Parsed]
    ) -> None:
        """Creates a writer for a response that has not started; `tool_format` parses the calls of a message."""
        super().__init__(identity, wants_logprobs=wants_logprobs, request=request)
        self._tool_format = tool_format
        self._texts_so_far: dict[int, str] = {}

    def content(self, text: str) -> Json:
        """Returns the message of a complete choice, with its calls."""
        content, calls = self._read(text)
        message = {"role": "assistant", "content": content, "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def chunk(self, index: int, piece: Delta) -> Json:
        """Returns a chunk, which is empty until the message of choice `index` is complete."""
        text = self._texts_so_far[index] = self._texts_so_far.get(index, "") + piece.text
        delta: Json = {}
        if piece.finish_reason is not None:
            content, calls = self._read(text)
            delta = {"content": content} if content else {}
            if calls:
                delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        return self._object(self.chunk_kind, [self._choice(index, {"delta": delta}, piece)])

    def _choice(self, index: int, content: Json, piece: Delta) -> Json:
        choice = super()._choice(index, content, piece)
        if (content.get("message") or content["delta"]).get("tool_calls") and piece.finish_reason == "stop":
            choice["finish_reason"] = "tool_calls"
        return choice

    def _read(self, text: str) -> tuple[str | None, list[Json]]:
        """Returns text and calls of a message; if a call cannot be parsed, all of it is text."""
        parsed = self._tool_format(text)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(parsed.calls):
            return text, []
        try:
            entries = [{"name": call.name, "arguments": json.dumps(call.arguments, allow_nan=False)} for call in calls]
        except (ValueError, RecursionError):
            return text, []  # not representable in JSON: NaN, infinity, or too deeply nested
        named = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": one} for one in entries]
        return parsed.content or None, named
