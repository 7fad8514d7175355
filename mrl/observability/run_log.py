"""Distributes metrics, samples and notes to all loggers, and defines the rows of samples.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config import registry
from mrl.config.config import Config
from mrl.config.user_code import describe_error, is_user_code
from mrl.errors import UserError, shown
from mrl.observability.loggers.base import Logger, Opening, Phase
from mrl.types import Rollout


def logger_names(config: Config) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Yields each logger of mrl's folder and of `observe.loggers` once, with its kwargs; None without an entry."""
    listed = {entry.name: entry.kwargs for entry in config.observe.loggers}
    for name in registry.names("observability.loggers"):
        yield name, listed.pop(name, None)
    yield from listed.items()


def open_logger(name: str, opening: Opening) -> Logger | None:
    """Returns the logger of this name; None if the config does not enable it.

    Raises:
        UserError: A user's logger cannot be made, or is no `Logger`.
    """
    found = registry.find("observability.loggers", name, "LOGGER")
    if isinstance(found, Logger) or not is_user_code(name):
        return found if isinstance(found, Logger) else found(opening)
    try:
        made = found(opening)
    except UserError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise UserError(
            f"observe.loggers: '{name}' cannot be made from an mrl.Opening: {describe_error(error)}."
        ) from error
    if made is not None and not isinstance(made, Logger):
        raise UserError(f"observe.loggers: '{name}' returned {shown(made)}, expected an mrl.Logger.")
    return made


class RunLog:
    """Front end of all loggers. On ranks other than 0 all methods do nothing."""

    def __init__(self, config: Config, run: RunDir, resume_step: int | None, *, rank: int = 0) -> None:
        """Opens every logger in `observability/loggers` that the config enables.

        Args:
            config: Configuration with all defaults filled in.
            run: Run folder whose `start` was called (rank 0).
            resume_step: RL steps in the checkpoint that the run resumes from; later lines are deleted. None: a new run,
                which deletes lines of a run that never reached a checkpoint.
            rank: Global rank of this process.

        Raises:
            UserError: An enabled logger cannot work.
        """
        self._loggers: list[Logger] = []
        self._where = ""
        if rank == 0:
            try:
                for name, kwargs in logger_names(config):
                    opening = Opening(config, run, resume_step, kwargs)
                    logger = open_logger(name, opening)
                    if logger is not None:
                        self._loggers.append(logger)
                    elif kwargs is not None:
                        raise UserError(
                            f"observe.loggers names '{name}', which returned no logger. Remove the entry, and "
                            "enable it by its own key of `observe`."
                        )
            except BaseException:
                self.close()
                raise

    def add(self, logger: Logger) -> None:
        """Adds a logger, which `close` closes."""
        self._loggers.append(logger)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of RL step `step` (from 1). Further calls for a step add to its line."""
        self._call("record", "train", step, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs held-out metrics after `step` steps (0: before the first); they join the line of that step."""
        self._call("record", "val", step, metrics)

    def warm_start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of supervised step `step` (from 1); `actor/...` becomes `warm_start/...`."""
        renamed = {name.replace("actor/", "warm_start/", 1): value for name, value in metrics.items()}
        self._call("record", "warm_start", step, renamed)

    def warm_start_resumed(self, step: int) -> None:
        """Deletes metrics after supervised step `step`, from which the warm start resumes."""
        self._call("warm_start_resumed", step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs sampled responses of `step`, given as `sample_rows`."""
        phases: tuple[Phase, ...] = ("train", "val")
        for phase in phases:
            chosen = [{key: row[key] for key in row if key != "phase"} for row in rows if row["phase"] == phase]
            if chosen:
                self._call("samples", phase, step, chosen)

    def note(self, text: str) -> None:
        """Logs an event in one line (resumed from ..., checkpoint written ...)."""
        self._call("note", text)

    def phase(self, where: str) -> None:
        """Shows the current activity; the callback for `Timers(on_phase=...)`."""
        self._where = where
        self._call("phase", where)

    def progress(self, text: str) -> None:
        """Shows the progress inside the current phase."""
        self._call("progress", f"{self._where}: {text}")

    def sync(self) -> None:
        """Flushes everything logged so far to disk."""
        self._call("sync")

    def _call(self, method: str, *args: Any) -> None:
        """Calls a method of every logger; an exception of a user's logger becomes a UserError that names it."""
        for logger in self._loggers:
            try:
                getattr(logger, method)(*args)
            except UserError:
                raise
            except Exception as error:
                if type(logger).__module__.partition(".")[0] == "mrl":
                    raise
                name = type(logger).__name__
                raise UserError(f"logger {name}: {method} raised {describe_error(error)}.") from error

    def close(self) -> None:
        """Closes every logger, even if closing one of them fails."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)
            self._loggers.clear()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def sample_rows(rollouts: Sequence[Rollout], *, phase: str, num_samples: int) -> list[dict[str, Any]]:
    """Returns the first `num_samples` rollouts as rows of samples.jsonl.

    Args:
        rollouts: Scored rollouts; those of evaluations in the order of the held-out prompts, so that every evaluation
            shows the same prompts.
        phase: "train" or "val".
        num_samples: Value of `observe.num_samples`.
    """
    return [
        {
            "phase": phase,
            "uid": rollout.prompt.uid,
            "sample_index": rollout.sample_index,
            "prompt": rollout.prompt.text,
            **_question(rollout.prompt.question),
            "response": rollout.response_text,
            "answer": rollout.prompt.answer,
            "reward": rollout.reward if math.isfinite(rollout.reward) else None,
            "reward_parts": rollout.reward_parts,
            "reward_error": rollout.reward_error,
            "finish_reason": rollout.finish_reason,
            "response_length": len(rollout.response_ids),
            **_episode_columns(rollout),
        }
        for rollout in rollouts[:num_samples]
    ]


def _question(question: str | list[dict[str, Any]]) -> dict[str, str]:
    """Returns the text of chat messages without system messages and the chat template; {} for a plain prompt."""
    if isinstance(question, str):
        return {}
    messages = [message for message in question if message["role"] != "system"]
    names = len(messages) > 1
    texts = (f"{message['role']}: {message['content']}" if names else str(message["content"]) for message in messages)
    return {"question": "\n".join(texts)}


def _episode_columns(rollout: Rollout) -> dict[str, Any]:
    """Returns an episode's end reason, its environment's facts, and author, text, tokens and reward of each turn."""
    episode = rollout.episode
    if episode is None:
        return {}
    rewards = iter(episode.turn_rewards)
    turns = [
        {"by": by, "text": text, "tokens": part.end - part.start, "reward": next(rewards) if by == "policy" else None}
        for (by, text), part in zip(episode.turns, rollout.segments, strict=True)
    ]
    return {"episode_end": episode.end, "episode_facts": episode.facts, "turns": turns}
