"""Scoring of rollouts by the weighted sum of the configured reward functions.

Fast built-in functions and Python objects that a script passed run in this process, all others in worker processes
under time and memory limits, and judges in a thread. A function that raises, returns no finite number, hangs or kills
its process fails only its sample. A sample without a score has the reward NaN, and training leaves it out
(`rollout/sample_table.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from mrl.config import registry
from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.config.user_code import is_object, is_user_code
from mrl.errors import UserError
from mrl.rewards._bound_reward import Outcome, RewardCall
from mrl.rewards._cache import CacheLookup, ScoreCache, functions_identity
from mrl.rewards._call_batches import CallBatch, Order, ScoringTask, check_batch, group_calls
from mrl.rewards._endpoint import scoring_arguments
from mrl.rewards._judge_client import JudgeQueries, make_judge
from mrl.rewards._object_calls import ObjectCalls
from mrl.rewards._pool import RewardPool, Scored
from mrl.rewards._signatures import NUM_TURNS, Sample
from mrl.rewards.environment import ENVIRONMENT_REWARD
from mrl.rewards.judge import Judge
from mrl.types import Prompt, Rollout

MODEL = "model"
"""Key of the reward model's score in `reward_parts`."""

Key = tuple[int, int]
"""Identifies a sample: uid of its prompt, index within the prompt's group."""

_EXCERPT_CHARS = 200


def _no_variables(*names: str) -> Mapping[str, str]:
    return {}


class Scorer(AbstractContextManager["Scorer"]):
    """Scores rollouts with the functions of a config; one per scoring rank, with worker processes until `close`."""

    def __init__(
        self,
        config: RewardConfig,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int] = (),
        special_ids: Collection[int] = (),
        variables: Callable[..., Mapping[str, str]] = _no_variables,
        scores: Path | None = None,
    ) -> None:
        """Imports the functions, and starts worker processes if any function needs them.

        Args:
            config: Functions, weights and limits.
            decode: Converts token ids to text, special tokens included (`Tokenizer.decode`).
            eos_ids: End tokens; one at the end of a response is removed before scoring.
            special_ids: Tokens that are removed from texts for judges and for functions with verl's or TRL's signature.
            variables: Returns the environment variables among the given names that are set; used for judges' API keys.
            scores: Path of the score cache without its suffix; None disables the cache.

        Raises:
            UserError: No function is configured, or one cannot be imported or called with its kwargs.
        """
        if not config.functions and config.model.path is None:
            raise UserError("reward.functions is empty: name at least one, such as [{name: exact_match}].")
        self._config = config
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._special_ids = frozenset(special_ids)
        self._labels, self._weights = part_names(config), list(part_weights(config).values())
        self._has_model = config.model.path is not None
        self._local: dict[int, RewardCall] = {}
        self._remote: list[int] = []
        self._judges: dict[int, Judge] = {}
        self._cache = None
        if scores is not None and config.cache_mb:
            self._cache = ScoreCache(scores.parent, scores.name, config.cache_mb)
        for function in config.functions:
            _check_limit(function, config.time_limit_s)
        for index, function in enumerate(config.functions):
            if _builtin_flag(function.name, "ASKS"):
                self._judges[index] = make_judge(function.name, function.kwargs, variables)
            elif _builtin_flag(function.name, "IN_PROCESS"):
                self._local[index] = RewardCall(function.name, function.kwargs)
            elif not is_object(function.name):
                self._remote.append(index)
        self._objects = ObjectCalls({i: one for i, one in enumerate(config.functions) if is_object(one.name)})
        self._pool: RewardPool | None = None
        if self._remote:
            self._pool = RewardPool(
                [(config.functions[index].name, config.functions[index].kwargs) for index in self._remote],
                num_workers=max(1, config.num_workers),
                time_limit_s=config.time_limit_s,
                memory_limit_mb=config.memory_limit_mb,
            )
        self._batches = self._group_functions()
        self._identities = [self._judge_identity(), *map(self._worker_identity, self._batches)]

    def _group_functions(self) -> list[CallBatch]:
        """Groups the workers' functions by calling style; raises UserError for an impossible `batch` setting."""
        functions = self._config.functions
        for index in (*self._local, *self._judges):
            check_batch(functions[index].name, functions[index].batch, takes_lists=False)
        if self._pool is None:
            return []
        named = [functions[index] for index in self._remote]
        try:
            return group_calls([one.name for one in named], self._pool.styles, [one.batch for one in named])
        except UserError:
            self.close()
            raise

    def _judge_identity(self) -> str:
        functions = [(self._config.functions[index], judge) for index, judge in self._judges.items()]
        return functions_identity([(one.name, scoring_arguments(one.kwargs), judge.source) for one, judge in functions])

    def _worker_identity(self, batch: CallBatch) -> str:
        sources = () if self._pool is None else self._pool.sources
        functions = [(self._config.functions[self._remote[place]], sources[place]) for place in batch.calls]
        return functions_identity([(one.name, one.kwargs, source) for one, source in functions])

    def score(
        self,
        rollouts: Sequence[Rollout],
        abort_requested: Callable[[], bool] = lambda: False,
        by_model: Mapping[Key, Outcome] | None = None,
    ) -> None:
        """Sets all `reward...` fields of each rollout, and `response_text` if it is empty.

        If a function fails on a sample, the sample's reward and the function's part are `reward.error_value`; if that
        is null, the reward is NaN and the part is missing. The reward is also NaN if every function abstains, or if
        the environment of an episode failed, whose error becomes `reward_error`. Of an episode, the last turn is
        scored.

        Args:
            rollouts: Rollouts to score, modified in place.
            abort_requested: Polled; once it returns true, this method returns and leaves rollouts without a reward.
            by_model: Outcomes of the reward model; required if the config has one.

        Raises:
            UserError: More than `reward.max_failed_frac` of the rollouts failed; the message quotes the first failure.
        """
        prepared = [(rollout, self._reward_input(rollout)) for rollout in rollouts]
        rollouts = [rollout for rollout, sample in prepared if sample is not None]
        samples = [sample for _, sample in prepared if sample is not None]
        allowed = math.floor(self._config.max_failed_frac * len(samples))
        order = [(rollout.prompt.uid, rollout.sample_index) for rollout in rollouts]
        found, computed = self._score_remotely(samples, order, allowed, abort_requested)
        if by_objects := self._objects.score(samples, order, allowed, abort_requested):
            found |= by_objects
            computed = set(range(len(samples)))
        num_failed, num_given_up, first_failure = 0, 0, ""
        for row, (rollout, sample) in enumerate(zip(rollouts, samples, strict=True)):
            remote = [by_row.get(row) for by_row in found.values()]
            if None in remote:
                num_given_up += 1
                continue  # too many samples failed, or a stop was requested
            outcomes = {index: call([sample])[0] for index, call in self._local.items()}
            for indices, scored in zip(found, remote, strict=True):
                outcomes.update(zip(indices, scored or (), strict=True))
            if self._has_model:
                outcomes[len(self._config.functions)] = (by_model or {})[order[row]]
            rollout.reward_cached = bool(found) and row not in computed
            self._set_rewards(rollout, outcomes)
            if rollout.reward_error is not None:
                num_failed += 1
                first_failure = first_failure or rollout.reward_error
        if num_failed > allowed:
            others = f" ({num_given_up} others were not tried)" if num_given_up else ""
            raise UserError(
                f"{num_failed} of {len(samples) - num_given_up} samples could not be scored{others}, more than "
                f"reward.max_failed_frac={self._config.max_failed_frac:g}. The first: {first_failure}"
            )

    def _score_remotely(
        self, samples: Sequence[Sample], order: Order, allowed: int, abort_requested: Callable[[], bool]
    ) -> tuple[dict[tuple[int, ...], dict[int, list[Outcome]]], set[int]]:
        """Scores samples with worker processes and judges concurrently, and reads known scores from the cache.

        Returns:
            (indices of functions) -> row -> an outcome of each function; and the rows that were not all from the cache.
        """
        found: dict[tuple[int, ...], dict[int, list[Outcome]]] = {}
        judges_identity, *batch_identities = self._identities
        single = [(row,) for row in range(len(samples))] if self._judges else []
        judge_cache = CacheLookup.look_up(self._cache, judges_identity, samples, single)
        by_calls = {
            batch.calls: (batch, CacheLookup.look_up(self._cache, identity, samples, batch.units(order)))
            for batch, identity in zip(self._batches, batch_identities, strict=True)
        }
        with ExitStack() as stack:
            queries = None
            if self._judges:
                missing = {row: samples[row] for row in judge_cache.keys}

                def on_judged(row: int, outcomes: list[Outcome]) -> None:
                    judge_cache.keep([(row, outcomes)])

                queries = stack.enter_context(JudgeQueries(list(self._judges.values()), missing, allowed, on_judged))
            if self._pool is not None:
                computed: dict[tuple[int, ...], dict[int, list[Outcome]]] = {calls: {} for calls in by_calls}

                def on_scored(answered: list[Scored]) -> None:
                    for calls in {task.calls for task, _, _ in answered}:
                        by_row = {row: outcomes for task, row, outcomes in answered if task.calls == calls}
                        computed[calls] |= by_row
                        by_calls[calls][1].keep(by_row.items())

                workers = max(1, self._config.num_workers)
                tasks = [
                    task for batch, cached in by_calls.values() for task in batch.tasks(cached.to_compute, workers)
                ]
                self._pool.run(samples, tasks, allowed, abort_requested, on_scored)
                for calls, (_, cached) in by_calls.items():
                    found[tuple(self._remote[place] for place in calls)] = cached.known_scores(computed[calls])
            if queries is not None:
                given_up = any(len(by_row) < len(samples) for by_row in found.values())
                judged = queries.done if given_up else queries.wait(abort_requested)
                found[tuple(self._judges)] = judge_cache.known_scores(judged)
        return found, set(judge_cache.keys).union(*(cached.keys for _, cached in by_calls.values()))

    def check_rows(self, prompts: Sequence[Prompt], kind: str, *, episodes: bool = False) -> list[str]:
        """Finds rows that the built-in functions cannot score, by scoring an empty response to each row.

        Judges are not queried, only their prompts are filled in. Users' functions are not called.

        Args:
            prompts: First rows of the training or held-out data.
            kind: "training" or "held-out", for messages.
            episodes: True if samples are episodes, which have an environment's reward.

        Returns:
            A warning for each function that fails on some rows.

        Raises:
            UserError: A function fails on more than `reward.max_failed_frac` of the rows, so the run would stop.
        """
        samples = [_empty_sample(prompt, episodes=episodes) for prompt in prompts]
        problems: dict[int, dict[int, str]] = {}

        def collect(answered: Sequence[Scored]) -> None:
            for task, row, outcomes in answered:
                if outcomes[0].error:
                    problems.setdefault(self._remote[task.calls[0]], {})[row] = outcomes[0].error

        for index, call in self._local.items():
            problems[index] = {row: error for row, one in enumerate(samples) if (error := call([one])[0].error)}
        for index, judge in self._judges.items():
            problems[index] = {row: error for row, one in enumerate(samples) if (error := judge.problem_with(one))}
        if self._pool is not None:
            own = [is_user_code(self._config.functions[index].name) for index in self._remote]
            calls = [place for place, is_users in enumerate(own) if not is_users]
            tasks = [ScoringTask((place,), ((row,),)) for place in calls for row in range(len(samples))]
            self._pool.run(samples, tasks, len(samples), on_scored=collect)
        warnings = []
        for index, by_row in sorted(problems.items()):
            if by_row:
                row, allowed = min(by_row), self._config.max_failed_frac
                found = (
                    f"reward '{self._config.functions[index].name}' cannot score {len(by_row)} of the first "
                    f"{len(samples)} {kind} rows"
                )
                example = f"One is {prompts[row].source or 'a prompt'}: {by_row[row]}."
                if len(by_row) > allowed * len(samples):
                    raise UserError(f"{found}, more than reward.max_failed_frac={allowed:g}. {example}")
                warnings.append(f"{found}. {example}")
        return warnings

    def close(self) -> None:
        """Ends the worker processes and closes the score cache."""
        if self._pool is not None:
            self._pool.shutdown()
        if self._cache is not None:
            self._cache.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _reward_input(self, rollout: Rollout) -> Sample | None:
        """Sets the rollout's text and returns what functions see of it; None if its environment failed."""
        prompt, episode, ids = rollout.prompt, rollout.episode, rollout.response_ids
        kept = self._without_end(ids)
        response = self._decode(kept)
        if not rollout.response_text:
            rollout.response_text = response + (self._decode(ids[-1:]) if len(kept) < len(ids) else "")
        rollout.reward_error = None if episode is None else episode.error
        if rollout.reward_error is not None:
            rollout.reward, rollout.reward_parts, rollout.reward_facts = math.nan, {}, {}
            return None
        extra = {**prompt.extra, "response_length": len(ids), "finish_reason": rollout.finish_reason}
        if episode is not None:
            turns = [part for part in rollout.segments if part.sampled]
            kept = self._without_end(ids[turns[-1].start : turns[-1].end] if turns else [])
            response = self._decode(kept)
            extra |= {ENVIRONMENT_REWARD: episode.reward, NUM_TURNS: episode.num_turns}
        text = response
        if not self._special_ids.isdisjoint(kept):
            text = self._decode([token for token in kept if token not in self._special_ids])
        return Sample(
            prompt.text,
            response,
            prompt.answer,
            extra,
            text,
            tuple(ids),
            prompt.question,
            prompt.data_source,
            prompt.row,
        )

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns a response without its end token."""
        return ids[:-1] if ids and ids[-1] in self._eos_ids else ids

    def _set_rewards(self, rollout: Rollout, outcomes: dict[int, Outcome]) -> None:
        ordered = [outcomes[index] for index in range(len(self._labels))]
        failed = {index: outcome for index, outcome in enumerate(ordered) if outcome.error}
        error_value = self._config.error_value
        rollout.reward_parts, rollout.reward_facts = {}, {}
        for label, outcome in zip(self._labels, ordered, strict=True):
            if (value := error_value if outcome.error else outcome.score) is not None:
                rollout.reward_parts[label] = value
            if outcome.facts:  # on equal keys the first function wins
                rollout.reward_facts = outcome.facts | rollout.reward_facts
        rollout.reward_error = self._describe(rollout, failed) if failed else None
        if failed or not rollout.reward_parts:
            rollout.reward = math.nan if error_value is None or not failed else error_value
        else:
            rollout.reward = math.fsum(
                weight * outcome.value for weight, outcome in zip(self._weights, ordered, strict=True)
            )

    def _describe(self, rollout: Rollout, failed: dict[int, Outcome]) -> str:
        known = [*(function.name for function in self._config.functions), MODEL]
        names = " or ".join(f"'{known[index]}'" for index in failed)
        text = rollout.response_text
        excerpt = text if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]}..."
        return (
            f"reward {names} failed on {rollout.prompt.source or 'a prompt'} (uid {rollout.prompt.uid}, sample "
            f"{rollout.sample_index}): {next(iter(failed.values())).error}. Response: {excerpt!r}"
        )


def _empty_sample(prompt: Prompt, *, episodes: bool) -> Sample:
    """Returns an empty response to a prompt."""
    extra = {**prompt.extra, "response_length": 0, "finish_reason": "stop"}
    if episodes:
        extra |= {ENVIRONMENT_REWARD: 0.0, NUM_TURNS: 1}
    return Sample(
        prompt.text,
        "",
        prompt.answer,
        extra,
        question=prompt.question,
        data_source=prompt.data_source,
        row=prompt.row,
    )


def _builtin_flag(name: str, attribute: str) -> bool:
    """Returns a built-in function's flag such as `IN_PROCESS`; False for users' functions."""
    return not is_user_code(name) and bool(registry.find("rewards", name, attribute, default=False))


def _check_limit(function: RewardFunctionConfig, time_limit_s: float) -> None:
    """Raises UserError if a function's own limit is not below the worker's, because its samples would fail."""
    default = None if is_user_code(function.name) else registry.find("rewards", function.name, "LIMIT_S", default=None)
    if default is None:
        return
    limit_s = function.kwargs.get("limit_s", default)
    if isinstance(limit_s, (int, float)) and limit_s >= time_limit_s:
        raise UserError(
            f"reward.functions: '{function.name}': kwargs.limit_s={limit_s:g} must be below reward.time_limit_s="
            f"{time_limit_s:g}, at which the sample fails. Raise time_limit_s or lower limit_s."
        )


def part_names(config: RewardConfig) -> list[str]:
    """Returns the keys of `reward_parts`: short names of the functions, "name#2" for repeats, the reward model last."""
    labels: list[str] = [MODEL] if config.model.path is not None else []
    for function in config.functions:
        short = function.name.replace(":", ".").rpartition(".")[2]
        same = sum(label.partition("#")[0] == short for label in labels)
        labels.append(short if same == 0 else f"{short}#{same + 1}")
    return labels if config.model.path is None else [*labels[1:], MODEL]


def part_weights(config: RewardConfig) -> dict[str, float]:
    """Returns the weight of each function and of the reward model, by key of `reward_parts`."""
    weights = [*(function.weight for function in config.functions), config.model.weight]
    return dict(zip(part_names(config), weights, strict=False))
