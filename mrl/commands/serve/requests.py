"""Fields of OpenAI's completion and chat requests and the values that mrl supports.

A field that mrl does not know, or a value that would have no effect, is rejected: a client that sends `logit_bias` must
not get a response without it. Fields that change no token (`user`, `metadata`, `store`) are accepted, and so is null
for a field with a default. Sampling parameters have the ranges of the config's `rollout.val_kwargs`.

Source: OpenAI's API reference, "Completions" and "Chat"; `top_k`, `min_p`, `ignore_eos` and `return_token_ids` are
vLLM's.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
)

from mrl.commands.serve.stream_state import Sampling
from mrl.environments.base import Message
from mrl.environments.openai_requests import RequestError, call_arguments, chat_messages, parse_json
from mrl.errors import shown
from mrl.trainer.validation.ranges import RANGES, in_range

MAX_SEED = 2**63 - 1

MAX_STOPS, MAX_STOP_CHARS = 64, 4096
"""Limits of the number of stop strings and of their total length; each round searches for all of them."""

PROMPT_FORMATS = "expected a text, a list of texts, a list of token ids, or a list of such lists"


def _as_integer(value: object) -> object:
    """Returns 2.0 as 2: JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_config(key: str) -> AfterValidator:
    """Returns a validator for the range of a config key."""

    def check(value: float) -> float:
        if not in_range(value, RANGES[key]):
            raise ValueError(f"expected {RANGES[key]}")
        return value

    return AfterValidator(check)


def _all_tokens(value: object) -> object:
    """Returns -1 for 0 (as `top_k`): both keep all tokens, as in vLLM."""
    return -1 if value == 0 and not isinstance(value, bool) else value


def _prompts(value: object) -> list[str | list[int]]:
    """Returns the prompts of a completion, each as text or token ids."""
    match value:
        case str():
            return [value]
        case []:
            raise ValueError("the list is empty: give at least one prompt")
        case list() if all(type(one) is int for one in value):
            return [_token_ids(value)]
        case list() if all(isinstance(one, str) for one in value):
            return value
        case list() if all(isinstance(one, list) for one in value):
            return [_token_ids(one) for one in value]
    raise ValueError(PROMPT_FORMATS)


def _token_ids(value: list[object]) -> list[int]:
    """Checks token ids; the upper limit depends on the model and is checked later."""
    ids = [one for one in value if type(one) is int and one >= 0]
    if len(ids) < len(value):
        raise ValueError(f"{PROMPT_FORMATS}; a token id is an integer from 0")
    return ids


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _limit_characters(value: list[str]) -> list[str]:
    if sum(map(len, value)) > MAX_STOP_CHARS:
        raise ValueError(f"the stop strings have more than {MAX_STOP_CHARS} characters in total")
    return value


Integer = Annotated[int, BeforeValidator(_as_integer)]
Zero = Annotated[float, Field(ge=0, le=0)]


ADVICE: dict[str, str] = {
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty"),
        "mrl samples without penalties, so the only value is 0. Leave the field out",
    ),
    "logit_bias": "mrl does not change the logits of single tokens, so the only value is {}. Leave the field out",
    "response_format": "mrl does not force an answer into a format, so the only value is {'type': 'text'}. Leave the "
    "field out and describe the format in the messages",
    "top_logprobs": "mrl returns log-probabilities of the sampled tokens only, so the only value is 0. Leave the field "
    "out",
    "echo": "mrl does not repeat the prompt in the answer, so the only value is false. Leave the field out",
    "suffix": "mrl does not fill in text before a suffix, so the only value is ''. Leave the field out",
    "best_of": "mrl returns every answer that it samples, so the only value is 1. Ask for several answers with n",
    "tool_choice": "mrl cannot force the model to call a tool, so the values are 'auto' and 'none'. Ask for the call "
    "in the messages",
    "parallel_tool_calls": "mrl does not limit the number of tool calls, so the only value is true. Leave the field "
    "out",
    "strict": "mrl does not force arguments into a schema, so the only value is false. Leave the field out",
    "include_obfuscation": "mrl does not pad the chunks of a stream, so the only value is false. Leave the field out",
}
"""Field with a single supported value -> reason and advice for the client."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(BaseModel):
    """Fields that completions and chats share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: Integer = Field(1, ge=1, le=256)
    temperature: Annotated[float, _as_config("rollout.val_kwargs.temperature")] = 1.0
    top_p: Annotated[float, _as_config("rollout.val_kwargs.top_p")] = 1.0
    top_k: Annotated[Integer, BeforeValidator(_all_tokens), _as_config("rollout.val_kwargs.top_k")] = -1
    min_p: Annotated[float, _as_config("rollout.val_kwargs.min_p")] = 0.0
    seed: Optional[Integer] = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Annotated[
        list[str], FailFast(), Field(max_length=MAX_STOPS), BeforeValidator(_stops), AfterValidator(_limit_characters)
    ] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    return_token_ids: bool = False

    frequency_penalty: Zero = 0
    presence_penalty: Zero = 0
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] = {}

    user: Optional[str] = None
    metadata: Optional[dict[str, Any]] = None
    store: Optional[bool] = None

    default_max_tokens: ClassVar[Optional[int]] = None
    """Default of `max_tokens`, capped by the room left; None: all the room left."""

    def sampling(self, max_tokens: int) -> Sampling:
        """Returns the sampling parameters; a request without a seed gets a random one.

        Args:
            max_tokens: Longest answer, tokens.
        """
        return Sampling(
            max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            stop=tuple(dict.fromkeys(filter(None, self.stop))),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Request):
    """Body of POST /v1/completions."""

    default_max_tokens = 16

    prompt: Annotated[list[Union[str, list[int]]], PlainValidator(_prompts)]
    max_tokens: Optional[Integer] = Field(None, ge=1)
    logprobs: Optional[Integer] = Field(None, ge=0, le=0)
    echo: Literal[False] = False
    suffix: Optional[Literal[""]] = None
    best_of: Optional[Integer] = Field(None, ge=1, le=1)


class Function(BaseModel):
    """Function of a tool."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[Literal[False]] = None


class Tool(BaseModel):
    """Tool that the assistant may call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class ChatRequest(Request):
    """Body of POST /v1/chat/completions."""

    messages: list[Message]
    tools: Annotated[list[Tool], FailFast()] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    max_tokens: Optional[Integer] = Field(None, ge=1)
    max_completion_tokens: Optional[Integer] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Optional[Integer] = Field(None, ge=0, le=0)
    response_format: Optional[dict[Literal["type"], Literal["text"]]] = None

    @property
    def max_answer_tokens(self) -> int | None:
        """Longest answer that the request allows, tokens; None: all the room left."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Tools in the form of chat templates; empty if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def templated(self) -> list[Message]:
        """Messages in the form of chat templates: role developer as system, arguments of calls as objects."""
        return [_templated(message, f"messages.{place}") for place, message in enumerate(self.messages)]


Kind = TypeVar("Kind", bound=Request)


def read_request(kind: type[Kind], body: bytes) -> Kind:
    """Parses and validates a request.

    Raises:
        RequestError: The body is not JSON, or a field has an unsupported value.
    """
    fields = parse_json(body)
    if not isinstance(fields, dict):
        raise RequestError(f"the body of the request is not a JSON object. Got {shown(fields)}")
    if unknown := [name for name in fields if name not in kind.model_fields]:
        raise RequestError("mrl does not have this field. Leave it out.", unknown[0])
    given = {name: value for name, value in fields.items() if value is not None}
    if "messages" in given:
        given["messages"] = chat_messages(given["messages"])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], kind) from None


def _refusal(error: Mapping[str, Any], kind: type[Request]) -> RequestError:
    param = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return RequestError("the request needs this field, and it is missing.", param)
        case "extra_forbidden":
            return RequestError("mrl does not have this field. Leave it out.", param)
    names = [part for part in error["loc"] if isinstance(part, str)]
    if name := next((part for part in names if part in ADVICE), ""):
        return RequestError(f"{ADVICE[name]}. Got {shown(error['input'])}", param)
    if kind is CompletionRequest and names == ["logprobs"]:
        return RequestError(
            "mrl returns log-probabilities of the sampled tokens only: send 0 for these, or leave the field out for "
            f"none. Got {shown(error['input'])}",
            param,
        )
    return RequestError(f"{error['msg'].removeprefix('Value error, ')}. Got {shown(error['input'])}", param)


def _templated(message: Message, param: str) -> Message:
    role = "system" if message["role"] == "developer" else message["role"]
    if "tool_calls" not in message:
        return {**message, "role": role}
    calls = [
        {**call, "function": {**call["function"], "arguments": call_arguments(call, f"{param}.tool_calls.{place}")}}
        for place, call in enumerate(message["tool_calls"])
    ]
    return {**message, "role": role, "tool_calls": calls}
