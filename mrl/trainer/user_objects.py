"""Python objects that a script passes to `mrl.train` and `mrl.evaluate`: their names in the config, and their checks.

A config contains names only. An object with a path, such as a function of an imported module, gets its path: reward
functions and environments then run in worker processes, and the run can be resumed from the command line. An object
without one (of the script itself, a lambda, an instance) gets a name that only this process knows; see
`config/user_code.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from mrl.algorithms.base import Algorithm
from mrl.config import user_code
from mrl.config.config import Config, RewardConfig, code_names, load
from mrl.environments.base import Environment
from mrl.errors import UserError, shown
from mrl.observability.loggers.base import Logger
from mrl.trainer.callbacks import Callback
from mrl.trainer.validation.episodes import REWARD

Given = Any
"""An object, a name as in a config, or a mapping with the keys of the config's list entry, whose "name" is either."""


@contextmanager
def with_objects(
    config: Config,
    *,
    rewards: Sequence[Given] | None = None,
    environments: Sequence[Given] | None = None,
    algorithm: Given = None,
    callbacks: Sequence[Given] = (),
    loggers: Sequence[Given] = (),
) -> Iterator[Config]:
    """Yields the config with the names of these objects, which can be loaded inside the block.

    Args:
        config: Result of `load_config`.
        rewards: Replace `reward.functions`.
        environments: One environment, which replaces `rollout.agent.environment`; sets `rollout.multi_turn.enable`, and
            the reward `environment` if neither `rewards` nor the config name rewards.
        algorithm: Replaces `algorithm.name`.
        callbacks: Are added to `observe.callbacks`.
        loggers: Are added to `observe.loggers`.

    Raises:
        UserError: An object is of another kind than its parameter.
    """
    if not isinstance(config, Config):
        raise UserError(f"Got {shown(config)}, expected a Config. Pass the result of `mrl.load_config`.")
    objects: dict[str, Any] = {}
    settings = asdict(config)
    if rewards is not None:
        settings["reward"]["functions"] = _entries("rewards", rewards, objects)
    if environments is not None:
        _set_environment(settings, _entries("environments", environments, objects), keeps_rewards=rewards is not None)
    if algorithm is not None:
        (entry,) = _entries("algorithm", [algorithm], objects)
        settings["algorithm"]["name"] = entry["name"]
    settings["observe"]["callbacks"] += _entries("callbacks", callbacks, objects)
    settings["observe"]["loggers"] += _entries("loggers", loggers, objects)
    given = any(value is not None for value in (rewards, environments, algorithm)) or callbacks or loggers
    with user_code.named_objects(objects):
        yield load(settings) if given else config


def describe_objects(config: Config) -> list[dict[str, str]]:
    """Returns key, name and module of each Python object in a config, for run.json."""
    return [
        {"key": key, "name": name, "module": name.removeprefix(user_code.OBJECT_PREFIX).rpartition(".")[0]}
        for key, names in code_names(config).items()
        for name in names
        if user_code.is_object(name)
    ]


def objects_notes(config: Config) -> list[str]:
    """Returns a log line about rewards and environments that run without limits; [] if there are none."""
    names = [
        user_code.target_of(one["name"])
        for one in describe_objects(config)
        if one["key"].startswith(("reward.", "rollout.agent."))
    ]
    if not names:
        return []
    return [
        f"{', '.join(names)}: Python objects of this script, called in this process without limits of time and memory. "
        "In a file, named as 'path/to/file.py:name', they run in worker processes with limits."
    ]


def check_same_objects(config: Config) -> None:
    """Collective over the job: checks that every rank was given objects of the same names and source files.

    Raises:
        UserError: The ranks differ.
    """
    from mrl.distributed.collectives import broadcast_from_rank_0, raise_on_all_ranks
    from mrl.rewards._bound_reward import source_digest

    own = [
        (key, name, source_digest(user_code.load(name)) if user_code.is_object(name) else "")
        for key, names in code_names(config).items()
        for name in names
    ]
    first = [tuple(one) for one in broadcast_from_rank_0(own)]
    with raise_on_all_ranks():
        if own != first:
            other = next(iter({*own} ^ {*first}), ("", "", ""))
            raise UserError(
                f"the ranks were given different code: '{other[1]}' of {other[0]} is not the same on every rank. Pass "
                "the same rewards, environments, algorithm, callbacks and loggers on every rank."
            )


def _set_environment(settings: dict[str, Any], entries: list[dict[str, Any]], *, keeps_rewards: bool) -> None:
    if len(entries) != 1:
        raise UserError(
            f"environments has {len(entries)} entries, but all episodes of a run have one environment. Pass one, for "
            "example one that chooses by the row that `reset` receives."
        )
    (entry,) = entries
    unknown = [key for key in entry if key not in ("name", "kwargs")]
    if unknown:
        raise UserError(f"environments: unknown key '{unknown[0]}', expected 'name' and 'kwargs'.")
    settings["rollout"]["agent"]["environment"] = entry["name"]
    if "kwargs" in entry:
        settings["rollout"]["agent"]["environment_kwargs"] = entry["kwargs"]
    settings["rollout"]["multi_turn"]["enable"] = True
    functions = settings["reward"]["functions"]
    if not keeps_rewards and functions == asdict(RewardConfig())["functions"]:
        settings["reward"]["functions"] = [{"name": REWARD}]


def _entries(parameter: str, given: Any, objects: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns entries of the config's list; adds objects without a path to `objects`."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise UserError(f"{parameter}={shown(given)}: expected a list, such as {parameter}=[...].")
    found = []
    for one in given:
        entry = dict(one) if isinstance(one, Mapping) else {"name": one}
        if "name" not in entry:
            raise UserError(f"{parameter}: {shown(one)} has no 'name', the object or its path.")
        thing = entry["name"]
        entry["name"] = thing if isinstance(thing, str) else _name(parameter, thing, objects)
        found.append(entry)
    return found


def _name(parameter: str, thing: Any, objects: dict[str, Any]) -> str:
    """Returns the path of an object, or a name under which it is added to `objects`."""
    wanted, fits = _KINDS[parameter]
    if not fits(thing):
        raise UserError(f"{parameter}: got {shown(thing)}, expected {wanted}.")
    path = user_code.path_of(thing)
    if path is not None:
        return path
    name = user_code.object_name(thing, objects)
    objects[name] = thing
    return name


def _is_kind(base: type, thing: Any) -> bool:
    """Returns whether an object is an instance or a subclass of `base`, or a function."""
    return isinstance(thing, base) or (issubclass(thing, base) if isinstance(thing, type) else callable(thing))


_KINDS: dict[str, tuple[str, Any]] = {
    "rewards": ("a function", callable),
    "environments": (
        "a class such as a subclass of mrl.Environment, or a function that returns one",
        lambda thing: callable(thing) and not isinstance(thing, Environment),
    ),
    "algorithm": (
        "a subclass of mrl.Algorithm",
        lambda thing: isinstance(thing, type) and issubclass(thing, Algorithm),
    ),
    "callbacks": ("an mrl.Callback, a subclass, or a function that returns one", functools.partial(_is_kind, Callback)),
    "loggers": ("an mrl.Logger, a subclass, or a function that returns one", functools.partial(_is_kind, Logger)),
}
"""Parameter -> what it takes, for messages, and a check."""
