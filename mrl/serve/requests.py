"""What a client may ask for, in OpenAI's words.

Owns the fields of a request and what each may be. A field that would have no effect is refused, as is one that mrl does
not know: a client that asks for `logit_bias` must not get an answer without it. Fields that change no token (`user`,
`metadata`, `store`) may stand there.

Source: OpenAI's API reference, "Completions" and "Chat"; `top_k`, `min_p`, `ignore_eos` and `return_token_ids` are
vLLM's.
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field

from mrl.errors import UserError
from mrl.serve.answer import Sampling

LARGEST_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    """How a stream is told."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(1, ge=1, le=256)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, lt=1)
    seed: Optional[int] = Field(None, ge=0, le=LARGEST_SEED)
    stop: Union[str, list[str], None] = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: Optional[StreamOptions] = None
    return_token_ids: bool = False

    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    logit_bias: Optional[Annotated[dict[str, float], Field(max_length=0)]] = None

    user: Optional[str] = None
    metadata: Optional[dict[str, Any]] = None
    store: Optional[bool] = None

    usual_tokens: ClassVar[Optional[int]] = None
    """Length of an answer where the request says none and there is room for it; None: as much as there is room for."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings that are not empty."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(dict.fromkeys(stop for stop in given if stop))

    def sampling(self, max_tokens: int) -> Sampling:
        """As the engine is asked; a request without a seed gets one by chance.

        Args:
            max_tokens: What the request says of it, or what there is room for.
        """
        return Sampling(
            max_tokens,
            temperature=self.temperature,
            top_k=self.top_k or -1,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            stop=self.stops,
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Request):
    """POST /v1/completions."""

    usual_tokens = 16

    prompt: Union[str, list[str], list[TokenId], list[list[TokenId]]]
    max_tokens: Optional[int] = Field(None, ge=1)
    logprobs: Optional[Literal[0]] = None
    echo: Literal[False] = False
    suffix: Optional[Literal[""]] = None
    best_of: Optional[Literal[1]] = None

    @property
    def prompts(self) -> list[Union[str, list[int]]]:
        """One or several, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]


class Function(BaseModel):
    """A tool's function."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1)
    description: Optional[str] = None
    parameters: Optional[dict[str, Any]] = None
    strict: Optional[Literal[False]] = None


class Tool(BaseModel):
    """What the assistant may call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: Optional[list[Tool]] = None
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    max_tokens: Optional[int] = Field(None, ge=1)
    max_completion_tokens: Optional[int] = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Optional[Literal[0]] = None
    response_format: Optional[dict[Literal["type"], Literal["text"]]] = None

    @property
    def most_tokens(self) -> int | None:
        """What the request says of the answer's length; None: as much as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates are given them; none where `tool_choice` says so."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def templated(self) -> list[dict[str, Any]]:
        """The messages as chat templates want them: the arguments of earlier calls as objects, not as their JSON.

        Raises:
            UserError: They are no JSON object.
        """
        return [_with_objects(message) for message in self.messages]


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    try:
        return {**message, "tool_calls": [_with_object(call) for call in calls]}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UserError(
            f"messages: tool_calls are {str(calls)[:100]}; expected a list of objects with function.name and "
            "function.arguments, the JSON of an object."
        ) from error


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**call["function"], "arguments": dict(found)}}
