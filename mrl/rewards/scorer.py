"""Scores rollouts: the weighted sum of the reward functions, with time limits and failures that name their sample.

Owns which function runs where, what a failed sample is worth and when failures stop the job. A reward function that
raises, returns no finite number, hangs or kills its process fails its sample only. A sample without a score has the
reward NaN: the loop leaves it out (`rollout/sample_table.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from mrl.config import registry
from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.config.user_code import is_own
from mrl.errors import UserError
from mrl.rewards._cache import ScoreCache, Spared, identity_of
from mrl.rewards._call import Outcome, RewardCall
from mrl.rewards._call_batches import Bundle, Order, Task, bundles_of, check_batch
from mrl.rewards._endpoint import asked_of
from mrl.rewards._judge_client import Asking, judge_of
from mrl.rewards._pool import WorkerPool
from mrl.rewards._remote import Answered
from mrl.rewards._signatures import NUM_TURNS, Sample
from mrl.rewards.environment import ENVIRONMENT_REWARD
from mrl.rewards.judge import Judge
from mrl.types import Prompt, Rollout

MODEL = "model"
"""What the reward model is called beside the functions."""

Key = tuple[int, int]
"""A sample: its prompt's uid, and its index."""

_EXCERPT_CHARS = 200


def _no_variables(*names: str) -> Mapping[str, str]:
    return {}


class Scorer:
    """Built once per scoring rank; holds the worker processes until `close`."""

    def __init__(
        self,
        config: RewardConfig,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int] = (),
        special_ids: Collection[int] = (),
        variables: Callable[..., Mapping[str, str]] = _no_variables,
        scores: Path | None = None,
    ) -> None:
        """Imports the functions and starts the workers, where any function needs one.

        Args:
            config: Functions, weights, limits.
            decode: Token ids to text, end tokens written out (`Tokenizer.decode`).
            eos_ids: An end token at the end of a response is cut off before the functions see it.
            special_ids: Functions with verl's or TRL's signature, and judges, see texts without these tokens.
            variables: Gives those of the named environment variables that are set: keys of judges.
            scores: Files that keep what workers and judges say, without their endings; None: everything is computed.

        Raises:
            UserError: No function is named, or one cannot be imported or called with its kwargs.
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
            if _says_of_itself(function.name, "ASKS"):
                self._judges[index] = judge_of(function.name, function.kwargs, variables)
            elif _says_of_itself(function.name, "IN_PROCESS"):
                self._local[index] = RewardCall(function.name, function.kwargs)
            else:
                self._remote.append(index)
        self._pool: WorkerPool | None = None
        if self._remote:
            self._pool = WorkerPool(
                [(config.functions[index].name, config.functions[index].kwargs) for index in self._remote],
                num_workers=max(1, config.num_workers),
                time_limit_s=config.time_limit_s,
                memory_limit_mb=config.memory_limit_mb,
            )
        self._bundles = self._bundled()
        self._identities = [self._identity_of_judges(), *map(self._identity_of_workers, self._bundles)]

    def _bundled(self) -> list[Bundle]:
        """The workers' functions by how they are called; UserError where one is to be called otherwise."""
        functions = self._config.functions
        for index in (*self._local, *self._judges):
            check_batch(functions[index].name, functions[index].batch, lists=False)
        if self._pool is None:
            return []
        named = [functions[index] for index in self._remote]
        try:
            return bundles_of([one.name for one in named], self._pool.ways, [one.batch for one in named])
        except UserError:
            self.close()
            raise

    def _identity_of_judges(self) -> str:
        functions = [(self._config.functions[index], judge) for index, judge in self._judges.items()]
        return identity_of([(one.name, asked_of(one.kwargs), judge.source) for one, judge in functions])

    def _identity_of_workers(self, bundle: Bundle) -> str:
        sources = () if self._pool is None else self._pool.sources
        functions = [(self._config.functions[self._remote[place]], sources[place]) for place in bundle.calls]
        return identity_of([(one.name, one.kwargs, source) for one, source in functions])

    def score(
        self,
        rollouts: Sequence[Rollout],
        told_to_stop: Callable[[], bool] = lambda: False,
        by_model: Mapping[Key, Outcome] | None = None,
    ) -> None:
        """Sets all `reward...` fields of each rollout, and `response_text` where it is empty.

        A failed sample's reward, and the failed function's part, is `reward.error_value`; where that is null, the
        reward is NaN and there is no such part. The reward is NaN too where no function has an opinion, and where an
        episode's environment failed, which is the sample's `reward_error`. Of an episode the last turn is scored.

        Args:
            rollouts: In any number.
            told_to_stop: Asked now and then; once it is true this returns with rollouts that have no reward.
            by_model: What the reward model gave, where the config has one.

        Raises:
            UserError: More than `reward.max_failed_frac` of the rollouts failed; the first failure is named.
        """
        prepared = [(rollout, self._prepare(rollout)) for rollout in rollouts]
        rollouts = [rollout for rollout, sample in prepared if sample is not None]
        samples = [sample for _, sample in prepared if sample is not None]
        allowed = math.floor(self._config.max_failed_frac * len(samples))
        order = [(rollout.prompt.uid, rollout.sample_index) for rollout in rollouts]
        found, computed = self._elsewhere(samples, order, allowed, told_to_stop)
        num_failed, num_given_up, first_failure = 0, 0, ""
        for row, (rollout, sample) in enumerate(zip(rollouts, samples, strict=True)):
            elsewhere = [by_row.get(row) for by_row in found.values()]
            if None in elsewhere:
                num_given_up += 1
                continue  # too many failed, or told to stop
            outcomes = {index: call([sample])[0] for index, call in self._local.items()}
            for indices, said in zip(found, elsewhere, strict=True):
                outcomes.update(zip(indices, said or (), strict=True))
            if self._has_model:
                outcomes[len(self._config.functions)] = (by_model or {})[order[row]]
            rollout.reward_cached = bool(found) and row not in computed
            self._set(rollout, outcomes)
            if rollout.reward_error is not None:
                num_failed += 1
                first_failure = first_failure or rollout.reward_error
        if num_failed > allowed:
            others = f" ({num_given_up} others were not tried)" if num_given_up else ""
            raise UserError(
                f"{num_failed} of {len(samples) - num_given_up} samples could not be scored{others}, more than "
                f"reward.max_failed_frac={self._config.max_failed_frac:g}. The first: {first_failure}"
            )

    def _elsewhere(
        self, samples: Sequence[Sample], order: Order, allowed: int, told_to_stop: Callable[[], bool]
    ) -> tuple[dict[tuple[int, ...], dict[int, list[Outcome]]], set[int]]:
        """What workers and judges say, both at the same time, and what they said before.

        Returns:
            Their functions -> row -> an outcome for each; and the rows for which any of them was called.
        """
        found: dict[tuple[int, ...], dict[int, list[Outcome]]] = {}
        of_judges, *of_bundles = self._identities
        alone = [(row,) for row in range(len(samples))] if self._judges else []
        judged = Spared.of(self._cache, of_judges, samples, alone)
        worked = {
            bundle.calls: (bundle, Spared.of(self._cache, identity, samples, bundle.units(order)))
            for bundle, identity in zip(self._bundles, of_bundles, strict=True)
        }
        with ExitStack() as stack:
            asking = None
            if self._judges:
                asked = {row: samples[row] for row in judged.keys}

                def heard(row: int, outcomes: list[Outcome]) -> None:
                    judged.keep([(row, outcomes)])

                asking = stack.enter_context(Asking(list(self._judges.values()), asked, allowed, heard))
            if self._pool is not None:
                said: dict[tuple[int, ...], dict[int, list[Outcome]]] = {calls: {} for calls in worked}

                def tell(answered: list[Answered]) -> None:
                    for calls in {task.calls for task, _, _ in answered}:
                        by_row = {row: outcomes for task, row, outcomes in answered if task.calls == calls}
                        said[calls] |= by_row
                        worked[calls][1].keep(by_row.items())

                workers = max(1, self._config.num_workers)
                tasks = [task for bundle, spared in worked.values() for task in bundle.tasks(spared.asked, workers)]
                self._pool.run(samples, tasks, allowed, told_to_stop, tell)
                for calls, (_, spared) in worked.items():
                    found[tuple(self._remote[place] for place in calls)] = spared.joined(said[calls])
            if asking is not None:
                given_up = any(len(by_row) < len(samples) for by_row in found.values())
                answered = asking.done if given_up else asking.wait(told_to_stop)
                found[tuple(self._judges)] = judged.joined(answered)
        return found, set(judged.keys).union(*(spared.keys for _, spared in worked.values()))

    def check_rows(self, prompts: Sequence[Prompt], kind: str, *, episodes: bool = False) -> list[str]:
        """Scores an empty response to each row with mrl's own functions, which shows rows that they cannot score.

        A judge is not asked: its question is made. Functions of a user's own are not called.

        Args:
            prompts: The first rows of the training or of the held-out data.
            kind: "training" or "held-out".
            episodes: Whether samples are episodes, which an environment rewards.

        Returns:
            A warning for each function that cannot score some of them.

        Raises:
            UserError: A function fails on more than `reward.max_failed_frac` of the rows: the run would stop.
        """
        samples = [_empty_sample(prompt, episodes=episodes) for prompt in prompts]
        problems: dict[int, dict[int, str]] = {}

        def collect(answered: Sequence[Answered]) -> None:
            for task, row, outcomes in answered:
                if outcomes[0].error:
                    problems.setdefault(self._remote[task.calls[0]], {})[row] = outcomes[0].error

        for index, call in self._local.items():
            problems[index] = {row: error for row, one in enumerate(samples) if (error := call([one])[0].error)}
        for index, judge in self._judges.items():
            problems[index] = {row: error for row, one in enumerate(samples) if (error := judge.problem_with(one))}
        if self._pool is not None:
            own = [is_own(self._config.functions[index].name) for index in self._remote]
            calls = [place for place, is_users in enumerate(own) if not is_users]
            tasks = [Task((place,), ((row,),)) for place in calls for row in range(len(samples))]
            self._pool.run(samples, tasks, len(samples), tell=collect)
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
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Scorer:
        """Itself; `close` follows at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `close`."""
        self.close()

    def _prepare(self, rollout: Rollout) -> Sample | None:
        """Sets its text; what functions see of it, None where its environment failed: it is not scored."""
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
            told = [part for part in rollout.segments if part.sampled]
            kept = self._without_end(ids[told[-1].start : told[-1].end] if told else [])
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
        """A response without its end token."""
        return ids[:-1] if ids and ids[-1] in self._eos_ids else ids

    def _set(self, rollout: Rollout, outcomes: dict[int, Outcome]) -> None:
        of_all = [outcomes[index] for index in range(len(self._labels))]
        failed = {index: outcome for index, outcome in enumerate(of_all) if outcome.error}
        instead = self._config.error_value
        rollout.reward_parts, rollout.reward_facts = {}, {}
        for label, outcome in zip(self._labels, of_all, strict=True):
            if (value := instead if outcome.error else outcome.score) is not None:
                rollout.reward_parts[label] = value
            if outcome.facts:  # of two functions that say the same the first counts
                rollout.reward_facts = outcome.facts | rollout.reward_facts
        rollout.reward_error = self._describe(rollout, failed) if failed else None
        if failed or not rollout.reward_parts:
            rollout.reward = math.nan if instead is None or not failed else instead
        else:
            rollout.reward = math.fsum(
                weight * outcome.value for weight, outcome in zip(self._weights, of_all, strict=True)
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
    """An empty response to a prompt."""
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


def _says_of_itself(name: str, attribute: str) -> bool:
    """Whether a built-in has the attribute; a dotted path is foreign code and never does."""
    return not is_own(name) and bool(registry.find("rewards", name, attribute, default=False))


def _check_limit(function: RewardFunctionConfig, time_limit_s: float) -> None:
    """Raises UserError where a function's own limit cannot end it before the worker's: its samples would fail."""
    default = None if is_own(function.name) else registry.find("rewards", function.name, "LIMIT_S", default=None)
    if default is None:
        return
    limit_s = function.kwargs.get("limit_s", default)
    if isinstance(limit_s, (int, float)) and limit_s >= time_limit_s:
        raise UserError(
            f"reward.functions: '{function.name}': kwargs.limit_s={limit_s:g} is not below reward.time_limit_s="
            f"{time_limit_s:g}, after which a sample has failed. Raise that, or lower limit_s."
        )


def part_names(config: RewardConfig) -> list[str]:
    """Keys of `reward_parts`: each function's own name, with a number where it comes twice; last the reward model's."""
    labels: list[str] = [MODEL] if config.model.path is not None else []
    for function in config.functions:
        short = function.name.replace(":", ".").rpartition(".")[2]
        same = sum(label.partition("#")[0] == short for label in labels)
        labels.append(short if same == 0 else f"{short}#{same + 1}")
    return labels if config.model.path is None else [*labels[1:], MODEL]


def part_weights(config: RewardConfig) -> dict[str, float]:
    """Factor of each function and of the reward model in the total, by its key in `reward_parts`."""
    weights = [*(function.weight for function in config.functions), config.model.weight]
    return dict(zip(part_names(config), weights, strict=False))
