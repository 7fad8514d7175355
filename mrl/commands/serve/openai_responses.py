"""What is sent back: JSON objects of completions and chats, whole and in chunks, in OpenAI's form.

Owns their fields. Log-probabilities are those of the distribution that was drawn from: temperature and truncation
applied.
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
    """What every object of one response repeats.

    Attributes:
        id: Of the response.
        created: Seconds since 1970.
        model: As the request says it.
        decode: Token ids -> text, special tokens written out, for the tokens of log-probabilities.
        token_bytes: Token id -> the bytes of its text, for the same.
    """

    id: str
    created: int
    model: str
    decode: Callable[[Sequence[int]], str]
    token_bytes: Callable[[int], bytes]


class Told(ABC):
    """The objects of one response."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, identity: Identity, *, wants_logprobs: bool, asked: Request) -> None:
        """Nothing was told yet."""
        self.asked = asked
        self._identity, self._wants_logprobs = identity, wants_logprobs
        self._offsets: dict[int, int] = {}

    @abstractmethod
    def content(self, text: str) -> Json:
        """The text of a whole choice."""

    @abstractmethod
    def delta(self, text: str) -> Json:
        """The text that a chunk adds."""

    @abstractmethod
    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """Of further tokens of an answer."""

    def whole(self, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[Delta]]) -> Json:
        """The response with all its choices.

        Args:
            prompts: Token ids of each.
            found: The pieces of each answer.
        """
        choices = []
        for index, pieces in enumerate(found):
            joined = Delta(
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.ids),
                tuple(value for piece in pieces for value in piece.logprobs),
                pieces[-1].finish_reason,
            )
            choice = self._choice(index, self.content(joined.text), joined)
            if self.asked.return_token_ids:
                choice["prompt_token_ids"] = list(prompts[index // self.asked.n])
            choices.append(choice)
        tokens = sum(len(piece.ids) for pieces in found for piece in pieces)
        return self._object(self.kind, choices) | {"usage": self._usage(prompts, tokens)}

    def beginning(self, prompts: Sequence[Sequence[int]], num_answers: int) -> list[Json]:
        """The chunks that come before any text."""
        return []

    def chunk(self, index: int, piece: Delta) -> Json:
        """The chunk of one piece of one answer."""
        return self._object(self.chunk_kind, [self._choice(index, self.delta(piece.text), piece)])

    def usage_chunk(self, prompts: Sequence[Sequence[int]], tokens: int) -> Json:
        """The last chunk, of `stream_options.include_usage`."""
        return self._object(self.chunk_kind, []) | {"usage": self._usage(prompts, tokens)}

    def _choice(self, index: int, content: Json, piece: Delta) -> Json:
        choice = {"index": index, **content, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._wants_logprobs:
            choice["logprobs"] = self.logprobs(index, piece.ids, piece.logprobs)
        if self.asked.return_token_ids:
            choice["token_ids"] = list(piece.ids)
        return choice

    def _object(self, kind: str, choices: list[Json]) -> Json:
        same = self._identity
        return {"id": same.id, "object": kind, "created": same.created, "model": same.model, "choices": choices}

    def _usage(self, prompts: Sequence[Sequence[int]], tokens: int) -> Json:
        asked = sum(map(len, prompts))
        return {"prompt_tokens": asked, "completion_tokens": tokens, "total_tokens": asked + tokens}

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [self._identity.decode([token]) for token in ids]


class Completion(Told):
    """Of POST /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def content(self, text: str) -> Json:
        """See `Told.content`."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """See `Told.delta`."""
        return {"text": text}

    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """See `Told.logprobs`."""
        texts, at = self._texts(ids), self._offsets.get(index, 0)
        offsets = list(accumulate(map(len, texts), initial=at))
        self._offsets[index] = offsets.pop()
        return {"tokens": texts, "token_logprobs": list(values), "top_logprobs": None, "text_offset": offsets}


class Chat(Told):
    """Of POST /v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def content(self, text: str) -> Json:
        """See `Told.content`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        """See `Told.delta`."""
        return {"delta": {"content": text}}

    def logprobs(self, index: int, ids: Sequence[int], values: Sequence[float]) -> Json:
        """See `Told.logprobs`."""
        told = [
            {"token": text, "bytes": list(self._identity.token_bytes(token)), "logprob": value, "top_logprobs": []}
            for token, text, value in zip(ids, self._texts(ids), values, strict=True)
        ]
        return {"content": told, "refusal": None}

    def beginning(self, prompts: Sequence[Sequence[int]], num_answers: int) -> list[Json]:
        """The role of each choice."""
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
        return [self._object(self.chunk_kind, [{"index": index, **role}]) for index in range(num_answers)]


class ToolChat(Chat):
    """Of a chat that offers tools: a message is told when it is whole, since only then it is known what it calls."""

    def __init__(self, identity: Identity, wants_logprobs: bool, asked: Request, form: Callable[[str], Parsed]) -> None:
        """Args: identity, wants_logprobs, asked: As `Told`. form: Reads the calls of a message."""
        super().__init__(identity, wants_logprobs=wants_logprobs, asked=asked)
        self._form = form
        self._heard: dict[int, str] = {}

    def content(self, text: str) -> Json:
        """See `Told.content`."""
        content, calls = self._read(text)
        message = {"role": "assistant", "content": content, "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def chunk(self, index: int, piece: Delta) -> Json:
        """See `Told.chunk`."""
        text = self._heard[index] = self._heard.get(index, "") + piece.text
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
        """What a message says and what it calls; one with a call that cannot be read is text."""
        parsed = self._form(text)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(parsed.calls):
            return text, []
        try:
            told = [{"name": call.name, "arguments": json.dumps(call.arguments, allow_nan=False)} for call in calls]
        except (ValueError, RecursionError):
            return text, []  # a number beyond JSON's, or nested too deeply for it
        named = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": one} for one in told]
        return parsed.content or None, named
