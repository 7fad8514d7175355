"""The sections `rollout.multi_turn`, with verl's names and defaults, and `rollout.agent`.

Owns their fields and defaults. What they do is `mrl/rollout/episodes/`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from mrl.config.paths import FilePath


@dataclass(frozen=True)
class MultiTurnConfig:
    """Conversations with an environment in place of single answers."""

    enable: bool = False
    """true: each sample is an episode with `rollout.agent.environment`; `response_length` holds for all its tokens."""
    max_assistant_turns: Optional[int] = None
    """The policy's turns; the environment still answers the last one with its reward. null: as many as there is room
    for."""
    max_user_turns: Optional[int] = None
    """Answers of the environment that the policy is shown; null: as many as there is room for."""
    max_parallel_calls: int = 1
    """Tool calls of one turn that are made; the policy is told of those that are not."""
    max_tool_response_length: int = 256
    """Characters of a tool's answer that the policy is shown."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """What is kept of a longer one, as in verl: left: its beginning; right: its end; middle: half of either."""
    format: str = "hermes"
    """How the policy writes a tool call: hermes, llama3_json or qwen3_coder, as vLLM names them."""
    tokenization_sanity_check_mode: Literal["strict", "ignore_strippable", "disable"] = "strict"
    """Whether the chat template must append for a run to start: strict: to the letter; ignore_strippable: but for white
    space; disable: it need not. Tokens that were sampled are trained as they are either way."""


@dataclass(frozen=True)
class AgentConfig:
    """The environment of `rollout.multi_turn.enable`."""

    environment: Optional[FilePath] = None
    """Name of a file in `mrl/environments/`, or a path to a class of your own."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its constructor."""
    num_workers: int = 8
    """Processes of each engine replica in which environments answer at the same time."""
    time_limit_s: float = 30.0
    """For one answer, s; then the sample fails and the worker is replaced."""
    memory_limit_mb: int = 2048
    """For one worker and all that it starts, MiB; 0: none."""
