"""Translates verl's asynchronous trainers (`train.mode`) and partial rollouts (`rollout.over_sample_rate`).

`config/verl_keys/verl_async.py` maps the keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.translated_keys import ACTOR, ROLLOUT
from mrl.config.verl_keys.verl_async import BYPASS, MODE, RECIPE, RECIPES, STRATEGY, THRESHOLD, WARMUP

Pair = tuple[str, Any]

RATE = f"{ROLLOUT}over_sample_rate"
_OWN = tuple(RECIPES["one_step_off_policy"])
_NOT_NATIVE = "only rollout.name=native can pause a response: sampling and updates alternate"
_MULTI_TURN = "a conversation cannot be paused and resumed: sampling and updates alternate"


def with_recipes(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings, with the defaults of verl's asynchronous recipes if a key belongs to one."""
    is_recipe = any(key.startswith(RECIPE) or key in _OWN for key in given)
    return {**BYPASS, **RECIPES["one_step_off_policy"], **given} if is_recipe else given


def is_fully_async(verl: VerlRun) -> bool:
    """Returns whether the settings are those of the recipe fully_async_policy."""
    return any(key.startswith(RECIPE) for key in verl.given)


def batch_size(verl: VerlRun) -> int:
    """Returns the prompts per step; the recipe fully_async_policy gives them in minibatches."""
    if not is_fully_async(verl):
        return int(verl["data.train_batch_size"])
    minibatches = verl[f"{RECIPE}trigger_parameter_sync_step"] * verl[f"{RECIPE}require_batches"]
    return int(minibatches * verl[f"{ACTOR}ppo_mini_batch_size"])


def num_steps(verl: VerlRun) -> int | None:
    """Returns `train.num_steps`; None: the number of epochs determines it."""
    given: int | None = verl["trainer.total_training_steps"]
    if is_fully_async(verl) and verl.given.get("rollout.total_rollout_steps") is not None:
        return int(max(1, verl["rollout.total_rollout_steps"] // batch_size(verl)))
    return given


def off_policy(verl: VerlRun, engine: str) -> Iterator[Pair]:
    """Yields keys of mrl and their values.

    Args:
        verl: Settings of the run.
        engine: `rollout.name` of the translation.
    """
    episodes = verl[f"{ROLLOUT}multi_turn.enable"] is True
    cannot = _NOT_NATIVE if engine != "native" else _MULTI_TURN if episodes else ""
    mode = _mode(verl)
    if mode == "async":
        yield "train.mode", "async"
        yield "train.max_off_policy_steps", _ahead(verl)
    elif mode == "colocate_async" and cannot:
        verl.notes[MODE] = cannot
    elif mode == "colocate_async":
        yield from _beyond(verl)
    if verl[RATE] and (mode != "sync" or cannot):
        verl.notes[RATE] = cannot or "prompts of later steps are started anyway"
    elif verl[RATE]:
        yield "rollout.over_sample_rate", verl[RATE]
        yield from (("rollout.over_age", "drop"), ("train.max_off_policy_steps", 0))


def differs(verl: VerlRun, rollout: dict[str, Any], mode: str) -> Iterator[str]:
    """Yields what was translated but behaves differently in mrl.

    Args:
        verl: Settings of the run.
        rollout: Section `rollout` of the translation.
        mode: `train.mode` of the translation.
    """
    if mode == "async" and "nnodes" not in rollout:
        yield (
            "train.mode=async without separate rollout ranks (rollout.nnodes): sampling does not overlap with updates. "
            "The samples are from older weights, and train.mode=sync takes as long"
        )
    if "over_sample_rate" in rollout and verl[RATE]:
        yield (
            f"{RATE}={verl[RATE]}: verl 0.9.1 has the key but does not read it. mrl starts so many more prompts, and "
            "restarts those that are not complete in time in the next step"
        )


def _mode(verl: VerlRun) -> str:
    """Returns "sync", "async", or verl's "colocate_async"."""
    if is_fully_async(verl) or any(key in verl.given for key in _OWN):
        return "async"
    if verl.given.get("trainer.use_v1") is False:
        return "sync"
    modes = {"sync": "sync", "separate_async": "async", "colocate_async": "colocate_async"}
    return verl.one_of(MODE, modes, "sync")


def _ahead(verl: VerlRun) -> int:
    """Returns `train.max_off_policy_steps` for `async`: the batches that are sampled ahead."""
    if is_fully_async(verl):
        steps = math.ceil(verl[f"{RECIPE}staleness_threshold"])
    elif any(key in verl.given for key in _OWN):
        steps = 1
    else:
        bound = _bound(verl)
        ahead = max(0, math.ceil(verl[WARMUP["separate_async"]]))
        steps = ahead if bound is None else min(ahead, bound)
    if steps > 1 and verl[f"{ROLLOUT}enable_rollout_routing_replay"]:
        verl.notes[f"{ROLLOUT}enable_rollout_routing_replay"] = (
            "with it no response may continue with newer weights: train.max_off_policy_steps=1 is used"
        )
        return 1
    return int(steps)


def _bound(verl: VerlRun) -> int | None:
    """Returns the most steps by which a token may be older than the weights it trains; verl counts from 1."""
    if verl.given.get(THRESHOLD, 8) is None:
        return None
    return int(max(1, verl[THRESHOLD])) - 1


def _beyond(verl: VerlRun) -> Iterator[Pair]:
    """Yields the settings for `colocate_async`: extra prompts are started, and continue after the updates."""
    warmup, bound = verl[WARMUP["colocate_async"]], _bound(verl)
    if verl[f"{ROLLOUT}enable_rollout_routing_replay"]:
        verl.notes[MODE] = "with enable_rollout_routing_replay no response may continue with newer weights"
        return
    if warmup > 1 and bound is not None:
        verl.notes[WARMUP["colocate_async"]] = f"at most 1 if {THRESHOLD} is not null: 1 is used"
        warmup = 1
    if warmup <= 0:
        return
    yield "rollout.over_sample_rate", float(warmup)
    strategy = verl.one_of(STRATEGY, ("drop", "wait"), "drop")
    if bound == 0 and strategy == "wait":
        verl.notes[STRATEGY] = "each step would wait for all started prompts: drop is used"
        strategy = "drop"
    yield "train.max_off_policy_steps", bound
    yield "rollout.over_age", strategy if bound is not None else None
