"""What a client may ask for, in OpenAI's words.

Owns the fields of a request and the values of each. A field that would have no effect is refused, as is one that mrl
does not know: a client that asks for `logit_bias` must not get an answer without it. Fields that change no token
(`user`, `metadata`, `store`) are accepted, and so is null for a field that has a default. How an answer is sampled has
the ranges of a config's `rollout.val_kwargs`.

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

LARGEST_SEED = 2**63 - 1

MOST_STOPS, STOP_CHARS = 64, 4096
"""Most stop strings of a request, and their characters together: every round looks for each of them."""

PROMPT_FORMS = "expected a text, a list of texts, a list of token ids, or a list of such lists"


def _whole_number(value: object) -> object:
    """Returns 2.0 as 2: JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_config(key: str) -> AfterValidator:
    """Returns the check of a number against the range of a key of the config."""

    def check(value: float) -> float:
        if not in_range(value, RANGES[key]):
            raise ValueError(f"expected {RANGES[key]}")
        return value

    return AfterValidator(check)


def _all_tokens(value: object) -> object:
    """Returns top_k=0 as -1: both keep all tokens, as in vLLM."""
    return -1 if value == 0 and not isinstance(value, bool) else value


def _prompts(value: object) -> list[str | list[int]]:
    """Returns the prompts of a completion, each a text or token ids."""
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
    raise ValueError(PROMPT_FORMS)


def _token_ids(value: list[object]) -> list[int]:
    """Returns token ids; whether the model has them is not known here."""
    ids = [one for one in value if type(one) is int and one >= 0]
    if len(ids) < len(value):
        raise ValueError(f"{PROMPT_FORMS}; a token id is an integer from 0")
    return ids


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few_characters(value: list[str]) -> list[str]:
    if sum(map(len, value)) > STOP_CHARS:
        raise ValueError(f"the stop strings have more than {STOP_CHARS} characters together")
    return value


Integer = Annotated[int, BeforeValidator(_whole_number)]
Zero = Annotated[float, Field(ge=0, le=0)]


ADVICE: dict[str, str] = {
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty"),
        "mrl samples without penalties, so the only value is 0. Leave the field out",
    ),
    "logit_bias": "mrl does not change the logits of single tokens, so the only value is {}. Leave the field out",
    "response_format": "mrl does not force an answer into a format, so the only value is {'type': 'text'}. Leave the "
    "field out and describe the format in the messages",
    "top_logprobs": "mrl returns the log-probability of the sampled tokens and of no others, so the only value is 0. "
    "Leave the field out",
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
"""Field of which mrl takes one value only -> why, and what a client can do."""


class StreamOptions(BaseModel):
    """Options of a stream."""

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
    seed: Optional[Integer] = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    stop: Annotated[
        list[str], FailFast(), Field(max_length=MOST_STOPS), BeforeValidator(_stops), AfterValidator(_few_characters)
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

    usual_tokens: ClassVar[Optional[int]] = None
    """Length of an answer where the request gives none and there is room for it; None: as much as there is room for."""

    def sampling(self, max_tokens: int) -> Sampling:
        """Returns how the engine samples; a request without a seed gets a random one.

        Args:
            max_tokens: The request's, or what there is room for.
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
    """POST /v1/completions."""

    usual_tokens = 16

    prompt: Annotated[list[Union[str, list[int]]], PlainValidator(_prompts)]
    max_tokens: Optional[Integer] = Field(None, ge=1)
    logprobs: Optional[Integer] = Field(None, ge=0, le=0)
    echo: Literal[False] = False
    suffix: Optional[Literal[""]] = None
    best_of: Optional[Integer] = Field(None, ge=1, le=1)


class Function(BaseModel):
    """The function of a tool."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[Literal[False]] = None


class Tool(BaseModel):
    """A tool that the assistant may call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: Function


class ChatRequest(Request):
    """POST /v1/chat/completions."""

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
    def most_tokens(self) -> int | None:
        """The request's limit of the answer's length, tokens; None: as much as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them; none where `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def templated(self) -> list[Message]:
        """The messages as chat templates take them: developers as system, arguments of calls as objects."""
        return [_templated(message, f"messages.{place}") for place, message in enumerate(self.messages)]


Kind = TypeVar("Kind", bound=Request)


def read_request(kind: type[Kind], body: bytes) -> Kind:
    """Returns the request that a body holds.

    Raises:
        RequestError: It is not JSON, or a field has a value that it cannot have.
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
            "mrl returns the log-probability of the sampled tokens and of no others: send 0 for these, or leave the "
            f"field out for none. Got {shown(error['input'])}",
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
