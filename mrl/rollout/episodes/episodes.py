"""Multi-turn episodes of a rollout replica: connects the engine with a pool of environment workers.

The engine passes on each sequence that finished a turn, the turn goes to its environment, and the environment's answer
comes back as token ids. Only the first rank of a replica talks to environments and broadcasts the answers. A failed
environment fails its sample, which is counted and not trained on; an environment has `rollout.agent.time_limit_s` to
answer.

An episode depends only on the seed, the weights, its data row and its environment, so a resumed run repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.algorithms.functional.sampling import stream_key
from mrl.config.config import RolloutConfig
from mrl.config.user_code import is_object
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.collectives import broadcast_object
from mrl.engines._multiturn_base import FinishedTurn, MultiTurnClient, SequenceKey
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.environments._object_pool import ObjectPool
from mrl.environments.formats import base as formats
from mrl.environments.pool import EnvironmentPool, Reply
from mrl.errors import UserError
from mrl.rollout.episodes.episode_state import EpisodeState, Read
from mrl.rollout.episodes.rendering import ChatRendering, Message, PlainRendering, Rendering
from mrl.rollout.episodes.token_record import Ledger
from mrl.types import Prompt, Rollout

Schema = Mapping[str, Any]
T = TypeVar("T")

WAIT_S = 1.0
"""Seconds between two checks for a stop request while waiting for environments."""

POLL_S = 0.02
"""Seconds between two polls of the environments while the engine decodes."""

TYPICAL_MESSAGES = (
    ({"role": "tool", "name": "tool", "content": "An answer."},),
    ({"role": "user", "content": "An answer."},),
)
"""Typical messages of environments, to check the chat template with."""


Pool = EnvironmentPool | ObjectPool


def open_pool(config: RolloutConfig, *, num_workers: int | None = None) -> Pool:
    """Starts the environment workers of `rollout.agent`; a Python object runs in this process instead.

    Args:
        config: Config section `rollout` with `agent.environment`.
        num_workers: Number of worker processes; None: the config's.

    Raises:
        UserError: The environment cannot be imported or constructed.
    """
    agent = config.agent
    if is_object(agent.environment or ""):
        return ObjectPool(agent.environment or "", agent.environment_kwargs)
    return EnvironmentPool(
        agent.environment or "",
        agent.environment_kwargs,
        num_workers=num_workers or agent.num_workers,
        time_limit_s=agent.time_limit_s,
        memory_limit_mb=agent.memory_limit_mb,
    )


def check_environment(config: RolloutConfig, tokenizer: Tokenizer) -> list[Schema]:
    """Checks the environment in one worker and the chat template; returns the environment's tool schemas.

    Raises:
        UserError: The environment cannot be constructed, or the template is not append-only, see `rendering.py`.
    """
    formats.find_format(config.multi_turn.format)
    with open_pool(config, num_workers=1) as pool:
        tools: list[Schema] = list(pool.tools)
    if tokenizer.has_chat_template:
        mode = config.multi_turn.tokenization_sanity_check_mode
        for index, messages in enumerate(TYPICAL_MESSAGES[0 if tools else 1 :]):
            # With tools, user messages are rare; Qwen3's template keeps reasoning between tool calls but not before a
            # user message, so reasoning is checked with the first kind of message only.
            ChatRendering(tokenizer, tools).check_append_only(mode, messages, with_reasoning=index == 0)
    return tools


class Episodes:
    """Runner of multi-turn episodes on one rank of a replica."""

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Tokenizer,
        tools: Sequence[Schema],
        group: dist.ProcessGroup | None,
        *,
        abort_requested: Callable[[], bool],
    ) -> None:
        """Starts the environment workers on the replica's first rank.

        Args:
            config: Config section `rollout`.
            tokenizer: Tokenizer of the actor.
            tools: Tool schemas from `check_environment`.
            group: Process group of the replica; None: a single rank.
            abort_requested: Returns whether a stop was requested; called while waiting.

        Raises:
            UserError: The environment cannot be constructed.
        """
        self._config = config
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._tokenizer = tokenizer
        self._renderings: dict[bool, Rendering] = {False: PlainRendering(tokenizer)}
        if tokenizer.has_chat_template:
            self._renderings[True] = ChatRendering(tokenizer, tools)
        form = formats.find_format(config.multi_turn.format)
        most = config.multi_turn.max_parallel_calls
        schemas = list(map(dict, tools))
        self._read: Read = lambda text, before: formats.parse_action(text, form, schemas, most, prompt=before)
        self._abort_requested = abort_requested
        leads = self._group is None or dist.get_rank(self._group) == 0
        self._pool = open_pool(config) if leads else None

    def run(self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: runs `sampling.n` episodes of each prompt.

        Args:
            engine: Rollout engine, awake.
            prompts: Prompts of the replica, the same on all its ranks.
            sampling: Distribution of each turn; `max_tokens` limits the complete response.

        Returns:
            Samples ordered by prompt and sample index, fewer after a stop request. `Rollout.episode` is set on the
            replica's first rank.

        Raises:
            UserError: A crashed worker cannot be replaced, or a prompt with the environment's first messages exceeds
                `rollout.prompt_length`.
            RuntimeError: The engine's tokens differ from the episode's record.
        """
        talk = _EnvironmentClient(self._pool, self._group, self._abort_requested)
        try:
            opened = talk.run_on_leader(lambda: self._start_episodes(talk, prompts, sampling))
            prompts = [replace(one, prompt_ids=ids) for one, ids in zip(prompts, opened, strict=True)]
            rollouts = engine.generate_multi_turn(prompts, sampling, talk)
        finally:
            talk.close()
        for at, rollout in enumerate(rollouts if self._pool is not None else ()):
            conversation = talk.conversations[at // sampling.n, rollout.sample_index]
            conversation.ledger.check(rollout)
            rollout.episode = conversation.to_episode()
            rollout.finish_reason = "length" if conversation.end == "response_length" else "stop"
        return rollouts

    def close(self) -> None:
        """Ends the workers and their child processes."""
        if self._pool is not None:
            self._pool.shutdown()

    def _start_episodes(
        self, talk: _EnvironmentClient, prompts: Sequence[Prompt], sampling: SamplingConfig
    ) -> list[tuple[int, ...]]:
        """Starts all episodes on the leading rank; returns the prompt ids with the environments' first messages."""
        for place, prompt in enumerate(prompts):
            for sample in range(sampling.n):
                seed = stream_key(sampling.seed, prompt.uid, 0) % (1 << 63)  # the same task for all samples of a prompt
                rendering = self._renderings[not isinstance(prompt.question, str)]
                ledger = Ledger(sampling.max_tokens)
                conversation = EpisodeState(rendering, self._read, self._config.multi_turn, ledger)
                talk.open((place, sample), prompt, seed, conversation)
        first = talk.first_messages()
        opened = [self._opening(prompt, sampling.n, place, first, talk) for place, prompt in enumerate(prompts)]
        for (place, _), conversation in talk.conversations.items():
            conversation.prompt_tail = formats.prompt_tail(opened[place], self._tokenizer.decode)
        return opened

    def _opening(
        self,
        prompt: Prompt,
        num_samples: int,
        place: int,
        first: Mapping[SequenceKey, Sequence[Message]],
        talk: _EnvironmentClient,
    ) -> tuple[int, ...]:
        """Returns the ids of a prompt; fails samples whose first messages differ from those of the other samples."""
        by_sample = {sample: first[place, sample] for sample in range(num_samples) if (place, sample) in first}
        messages = next(iter(by_sample.values()), ())
        for sample, other in by_sample.items():
            if list(other) != list(messages):
                why = "reset() returned different messages for the same seed and row than for another sample"
                talk.conversations[place, sample].fail(timed_out=False, message=f"{_label(prompt, sample)}: {why}")
        if not messages:
            return prompt.prompt_ids
        ids = self._renderings[not isinstance(prompt.question, str)].initial_ids(prompt.question, messages)
        if len(ids) > self._config.prompt_length:
            raise UserError(
                f"{prompt.source}: the prompt and the environment's first messages have {len(ids)} tokens, more than "
                f"rollout.prompt_length={self._config.prompt_length}. Raise rollout.prompt_length."
            )
        return tuple(ids)


class _EnvironmentClient(MultiTurnClient):
    """Connection of the engine's sequences with the environments for one call of `Episodes.run`.

    Ranks without a pool only receive the leading rank's results.

    Attributes:
        conversations: Conversation of each sequence, on the leading rank.
    """

    def __init__(self, pool: Pool | None, group: dist.ProcessGroup | None, abort_requested: Callable[[], bool]) -> None:
        self.conversations: dict[SequenceKey, EpisodeState] = {}
        self._pool, self._group, self._abort_requested = pool, group, abort_requested
        self._names: dict[str, SequenceKey] = {}
        self._replies: dict[SequenceKey, Reply] = {}
        self._pending: set[SequenceKey] = set()
        self._polled_at = 0.0

    def open(self, key: SequenceKey, prompt: Prompt, seed: int, conversation: EpisodeState) -> None:
        """Starts an episode, on the leading rank."""
        pool = _required(self._pool)
        name = f"{key[0]}.{key[1]}"
        self.conversations[key], self._names[name] = conversation, key
        self._pending.add(key)
        pool.open(name, seed, prompt.row, _label(prompt, key[1]))

    def first_messages(self) -> dict[SequenceKey, Sequence[Message]]:
        """Returns the messages of each environment's reset, on the leading rank; none for failed or ended ones."""
        keys = list(self.conversations)
        self._wait(keys)
        found: dict[SequenceKey, Sequence[Message]] = {}
        for key in keys:
            reply = self._replies.pop(key, None)
            if reply is not None and not self._fails(key, reply) and reply.observation is not None:
                found[key] = reply.observation.messages
                if reply.observation.done:
                    self.conversations[key].fail(timed_out=False, message="reset() ended the episode")
        return found

    def submit(self, turn: FinishedTurn) -> None:
        """Implements `MultiTurnClient.submit`: sends the parsed turn to its environment."""
        if self._pool is None:
            return
        action = self.conversations[turn.key].add_turn(turn.ids, turn.finish_reason)
        if action is not None:
            self._pending.add(turn.key)
            self._pool.send(f"{turn.prompt_index}.{turn.sample_index}", action)

    def poll(self) -> None:
        """Implements `MultiTurnClient.poll`: polls the workers and ends those that exceed their time limit."""
        if self._pool is not None and time.monotonic() >= self._polled_at + POLL_S:
            self._take(self._pool.poll())
            self._polled_at = time.monotonic()

    def wait_for_replies(self, keys: Sequence[SequenceKey]) -> list[Sequence[int] | None]:
        """Implements `MultiTurnClient.wait_for_replies`: waits for the answers and broadcasts them as token ids."""
        return self.run_on_leader(lambda: self._answers(keys))

    def run_on_leader(self, make: Callable[[], T]) -> T:
        """Collective over the replica: calls `make` on the leading rank and broadcasts its result or UserError."""
        if self._group is None:
            return make()
        box: tuple[T | None, str | None] = (None, None)
        if self._pool is not None:
            try:
                box = (make(), None)
            except UserError as error:
                box = (None, str(error))
        value, error_text = broadcast_object(dist.get_global_rank(self._group, 0), box, self._group)
        if error_text is not None:
            raise UserError(error_text)
        result: T = value
        return result

    def close(self) -> None:
        """Closes all episodes of this call; failed ones are closed already."""
        for name in self._names if self._pool is not None else ():
            _required(self._pool).close(name)

    def _answers(self, keys: Sequence[SequenceKey]) -> list[Sequence[int] | None]:
        self._wait(keys)
        found: list[Sequence[int] | None] = []
        for key in keys:
            reply, conversation = self._replies.pop(key, None), self.conversations[key]
            if reply is None or self._fails(key, reply) or reply.observation is None:
                found.append(None)
            else:
                found.append(conversation.add_observation(reply.observation))
        return found

    def _wait(self, keys: Sequence[SequenceKey]) -> None:
        """Waits until the pending environments of these sequences have answered, or a stop was requested."""
        pool = _required(self._pool)
        while any(key in self._pending for key in keys) and not self._abort_requested():
            self._take(pool.wait(WAIT_S))

    def _take(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            key = self._names[reply.episode]
            self._replies[key] = reply
            self._pending.discard(key)

    def _fails(self, key: SequenceKey, reply: Reply) -> bool:
        failure = reply.failure
        if failure is not None:
            self.conversations[key].fail(timed_out=failure.cause == "timeout", message=failure.message)
        return failure is not None


def _label(prompt: Prompt, sample: int) -> str:
    return f"{prompt.source or 'a prompt'} (uid {prompt.uid}, sample {sample})"


def _required(pool: Pool | None) -> Pool:
    if pool is None:
        raise RuntimeError("this rank has no environment pool: only the first rank of a replica has one")
    return pool
