"""Episodes of a replica: the environments' pool, the conversations, and the engine that samples between answers.

Owns who talks to whom: the engine hands over sequences that stopped, their turns go to the environments, and what these
say comes back as token ids. One rank of the replica speaks with the environments; the others hear from it. A failed
environment fails its sample, which is counted and not trained; every wait ends with `rollout.agent.time_limit_s`.

An episode is a function of the seed, the weights, its row and its environment, so that a resumed run repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.algorithms.functional.sampling import stream_key
from mrl.config.config import RolloutConfig
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.collectives import from_rank
from mrl.engines._multiturn_base import Key, Stopped, Talk
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.environments.formats import base as formats
from mrl.environments.pool import EnvironmentPool, Reply
from mrl.errors import UserError
from mrl.rollout.episodes.conversations import Conversation, Read
from mrl.rollout.episodes.ledger import Ledger
from mrl.rollout.episodes.rendering import Chat, Message, Plain, Rendering
from mrl.types import Prompt, Rollout

Schema = Mapping[str, Any]
T = TypeVar("T")

WAIT_S = 1.0
"""Between two questions whether the job was told to stop."""

HEAR_S = 0.02
"""Between two looks at what the environments said, while the engine decodes."""

LIKELY = (
    ({"role": "tool", "name": "tool", "content": "An answer."},),
    ({"role": "user", "content": "An answer."},),
)
"""Messages such as environments answer with, for the check of a chat template."""


def open_pool(config: RolloutConfig, *, num_workers: int | None = None) -> EnvironmentPool:
    """The workers of `rollout.agent`.

    Args:
        config: Its environment is set.
        num_workers: In place of the config's.

    Raises:
        UserError: The environment cannot be imported or made.
    """
    agent = config.agent
    return EnvironmentPool(
        agent.environment or "",
        agent.environment_kwargs,
        num_workers=num_workers or agent.num_workers,
        time_limit_s=agent.time_limit_s,
        memory_limit_mb=agent.memory_limit_mb,
    )


def check_environment(config: RolloutConfig, tokenizer: Tokenizer) -> list[Schema]:
    """Starts one worker, and looks whether the chat template appends; returns the tools that prompts are to offer.

    Raises:
        UserError: The environment cannot be made, or the template does not append.
    """
    formats.find(config.multi_turn.format)
    with open_pool(config, num_workers=1) as pool:
        tools: list[Schema] = list(pool.tools)
    if tokenizer.has_chat_template:
        mode = config.multi_turn.tokenization_sanity_check_mode
        for place, messages in enumerate(LIKELY[0 if tools else 1 :]):
            # with tools a user's message is the exception, and Qwen3's template keeps thoughts between tool calls
            Chat(tokenizer, tools).check(mode, messages, thinks=place == 0)
    return tools


class Episodes:
    """This rank's part in its replica's episodes."""

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Tokenizer,
        tools: Sequence[Schema],
        group: dist.ProcessGroup | None,
        *,
        told_to_stop: Callable[[], bool],
    ) -> None:
        """Starts the workers on the replica's first rank.

        Args:
            config: `rollout`.
            tokenizer: Of the run.
            tools: Of `check_environment`.
            group: The replica's ranks; None: this one alone.
            told_to_stop: Asked while it waits.

        Raises:
            UserError: The environment cannot be made.
        """
        self._config = config
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._tokenizer = tokenizer
        self._renderings: dict[bool, Rendering] = {False: Plain(tokenizer)}
        if tokenizer.has_chat_template:
            self._renderings[True] = Chat(tokenizer, tools)
        form = formats.find(config.multi_turn.format)
        most = config.multi_turn.max_parallel_calls
        schemas = list(map(dict, tools))
        self._read: Read = lambda text, before: formats.action(text, form, schemas, most, prompt=before)
        self._told_to_stop = told_to_stop
        leads = self._group is None or dist.get_rank(self._group) == 0
        self._pool = open_pool(config) if leads else None

    def run(self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: `sampling.n` episodes of each prompt, ordered by prompt, then sample index.

        Args:
            engine: Awake.
            prompts: The same on every rank of the replica.
            sampling: Of each turn; `max_tokens` holds for a whole episode.

        Returns:
            On the replica's first rank with `episode`; where the job was told to stop, fewer.

        Raises:
            UserError: A worker cannot be replaced, or an opened prompt does not fit.
            RuntimeError: What the engine sampled from is not what the episode recorded.
        """
        talk = _Talk(self._pool, self._group, self._told_to_stop)
        try:
            opened = talk.shared(lambda: self._open(talk, prompts, sampling))
            prompts = [replace(one, prompt_ids=ids) for one, ids in zip(prompts, opened, strict=True)]
            rollouts = engine.converse(prompts, sampling, talk)
        finally:
            talk.close()
        for at, rollout in enumerate(rollouts if self._pool is not None else ()):
            conversation = talk.conversations[at // sampling.n, rollout.sample_index]
            conversation.ledger.check(rollout)
            rollout.episode = conversation.episode()
            rollout.finish_reason = "length" if conversation.end == "response_length" else "stop"
        return rollouts

    def close(self) -> None:
        """Ends the workers and all that they started."""
        if self._pool is not None:
            self._pool.shutdown()

    def _open(self, talk: _Talk, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[tuple[int, ...]]:
        """Begins all episodes on the leading rank: the prompts' ids, with what the environments said first."""
        for place, prompt in enumerate(prompts):
            for sample in range(sampling.n):
                seed = stream_key(sampling.seed, prompt.uid, 0) % (1 << 63)  # one task for all samples of a prompt
                rendering = self._renderings[not isinstance(prompt.question, str)]
                ledger = Ledger(sampling.max_tokens)
                conversation = Conversation(rendering, self._read, self._config.multi_turn, ledger)
                talk.open((place, sample), prompt, seed, conversation)
        first = talk.first_messages()
        opened = [self._opening(prompt, sampling.n, place, first, talk) for place, prompt in enumerate(prompts)]
        for (place, _), conversation in talk.conversations.items():
            conversation.before = formats.prompt_tail(opened[place], self._tokenizer.decode)
        return opened

    def _opening(
        self, prompt: Prompt, num_samples: int, place: int, first: Mapping[Key, Sequence[Message]], talk: _Talk
    ) -> tuple[int, ...]:
        """Ids of a prompt; a sample to which the environment said something else than to the others fails."""
        said = {sample: first[place, sample] for sample in range(num_samples) if (place, sample) in first}
        messages = next(iter(said.values()), ())
        for sample, other in said.items():
            if list(other) != list(messages):
                why = "its reset said something else than to another sample with the same seed and row"
                talk.conversations[place, sample].failed(late=False, message=f"{_label(prompt, sample)}: {why}")
        if not messages:
            return prompt.prompt_ids
        ids = self._renderings[not isinstance(prompt.question, str)].opening(prompt.question, messages)
        if len(ids) > self._config.prompt_length:
            raise UserError(
                f"{prompt.source}: the prompt has {len(ids)} tokens with what the environment adds to it, more than "
                f"rollout.prompt_length={self._config.prompt_length}. Raise it."
            )
        return tuple(ids)


class _Talk(Talk):
    """Between the engine's sequences and the environments; on ranks without a pool it only hears.

    Attributes:
        conversations: By sequence, on the leading rank.
    """

    def __init__(
        self, pool: EnvironmentPool | None, group: dist.ProcessGroup | None, told_to_stop: Callable[[], bool]
    ) -> None:
        self.conversations: dict[Key, Conversation] = {}
        self._pool, self._group, self._told_to_stop = pool, group, told_to_stop
        self._names: dict[str, Key] = {}
        self._replies: dict[Key, Reply] = {}
        self._due: set[Key] = set()
        self._heard_at = 0.0

    def open(self, key: Key, prompt: Prompt, seed: int, conversation: Conversation) -> None:
        """Begins an episode, on the leading rank."""
        pool = _given(self._pool)
        name = f"{key[0]}.{key[1]}"
        self.conversations[key], self._names[name] = conversation, key
        self._due.add(key)
        pool.open(name, seed, prompt.row, _label(prompt, key[1]))

    def first_messages(self) -> dict[Key, Sequence[Message]]:
        """What each environment said first, on the leading rank; one that failed or ended said nothing."""
        keys = list(self.conversations)
        self._wait(keys)
        found: dict[Key, Sequence[Message]] = {}
        for key in keys:
            reply = self._replies.pop(key, None)
            if reply is not None and not self._fails(key, reply) and reply.observation is not None:
                found[key] = reply.observation.messages
                if reply.observation.done:
                    self.conversations[key].failed(late=False, message="its reset ended the episode")
        return found

    def ask(self, stopped: Stopped) -> None:
        """See `Talk.ask`."""
        if self._pool is None:
            return
        action = self.conversations[stopped.key].took(stopped.ids, stopped.finish_reason)
        if action is not None:
            self._due.add(stopped.key)
            self._pool.send(f"{stopped.place}.{stopped.sample_index}", action)

    def hear(self) -> None:
        """See `Talk.hear`: workers go on, and one that hangs is ended in time."""
        if self._pool is not None and time.monotonic() >= self._heard_at + HEAR_S:
            self._take(self._pool.poll())
            self._heard_at = time.monotonic()

    def answers(self, keys: Sequence[Key]) -> list[Sequence[int] | None]:
        """See `Talk.answers`."""
        return self.shared(lambda: self._answers(keys))

    def shared(self, make: Callable[[], T]) -> T:
        """Collective over the replica: what the leading rank makes; what it raises, all raise.

        Raises:
            UserError: The leading rank raised it.
        """
        if self._group is None:
            return make()
        box: tuple[T | None, str | None] = (None, None)
        if self._pool is not None:
            try:
                box = (make(), None)
            except UserError as error:
                box = (None, str(error))
        value, refusal = from_rank(dist.get_global_rank(self._group, 0), box, self._group)
        if refusal is not None:
            raise UserError(refusal)
        made: T = value
        return made

    def close(self) -> None:
        """Ends all episodes of this call; those that failed are closed already."""
        for name in self._names if self._pool is not None else ():
            _given(self._pool).close(name)

    def _answers(self, keys: Sequence[Key]) -> list[Sequence[int] | None]:
        self._wait(keys)
        found: list[Sequence[int] | None] = []
        for key in keys:
            reply, conversation = self._replies.pop(key, None), self.conversations[key]
            if reply is None or self._fails(key, reply) or reply.observation is None:
                found.append(None)
            else:
                found.append(conversation.heard(reply.observation))
        return found

    def _wait(self, keys: Sequence[Key]) -> None:
        """Until the environments of these that were asked have answered, or the job was told to stop."""
        pool = _given(self._pool)
        while any(key in self._due for key in keys) and not self._told_to_stop():
            self._take(pool.wait(WAIT_S))

    def _take(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            key = self._names[reply.episode]
            self._replies[key] = reply
            self._due.discard(key)

    def _fails(self, key: Key, reply: Reply) -> bool:
        failure = reply.failure
        if failure is not None:
            self.conversations[key].failed(late=failure.cause == "timeout", message=failure.message)
        return failure is not None


def _label(prompt: Prompt, sample: int) -> str:
    return f"{prompt.source or 'a prompt'} (uid {prompt.uid}, sample {sample})"


def _given(pool: EnvironmentPool | None) -> EnvironmentPool:
    if pool is None:
        raise RuntimeError("this rank does not speak with the environments")
    return pool
