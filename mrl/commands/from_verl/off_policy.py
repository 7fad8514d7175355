"""verl's asynchronous trainers and recipes as `train.mode`, and its partial rollouts as `rollout.over_sample_rate`.

Owns the values; which key goes where is in `config/verl_keys/verl_async.py`.
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
_WHOLE = "only rollout.name=native stops between two tokens: sampling and updates take turns"
_TALKS = "a conversation cannot stop and go on later: sampling and updates take turns"


def with_recipes(given: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the defaults of a recipe where they are one's."""
    is_recipe = any(key.startswith(RECIPE) or key in _OWN for key in given)
    return {**BYPASS, **RECIPES["one_step_off_policy"], **given} if is_recipe else given


def is_fully_async(verl: VerlRun) -> bool:
    """Whether they are the recipe fully_async_policy's."""
    return any(key.startswith(RECIPE) for key in verl.given)


def batch_size(verl: VerlRun) -> int:
    """Prompts of a step; the recipe fully_async_policy counts them in minibatches."""
    if not is_fully_async(verl):
        return int(verl["data.train_batch_size"])
    minibatches = verl[f"{RECIPE}trigger_parameter_sync_step"] * verl[f"{RECIPE}require_batches"]
    return int(minibatches * verl[f"{ACTOR}ppo_mini_batch_size"])


def num_steps(verl: VerlRun) -> int | None:
    """`train.num_steps`; None: the epochs say it."""
    asked: int | None = verl["trainer.total_training_steps"]
    if is_fully_async(verl) and verl.given.get("rollout.total_rollout_steps") is not None:
        return int(max(1, verl["rollout.total_rollout_steps"] // batch_size(verl)))
    return asked


def off_policy(verl: VerlRun, engine: str) -> Iterator[Pair]:
    """Keys of mrl and their values.

    Args:
        verl: The run.
        engine: `rollout.name` of the translation.
    """
    episodes = verl[f"{ROLLOUT}multi_turn.enable"] is True
    cannot = _WHOLE if engine != "native" else _TALKS if episodes else ""
    mode = _mode(verl)
    if mode == "async":
        yield "train.mode", "async"
        yield "train.max_off_policy_steps", _ahead(verl)
    elif mode == "colocate_async" and cannot:
        verl.notes[MODE] = cannot
    elif mode == "colocate_async":
        yield from _beyond(verl)
    if verl[RATE] and (mode != "sync" or cannot):
        verl.notes[RATE] = cannot or "prompts of later steps are begun anyway"
    elif verl[RATE]:
        yield "rollout.over_sample_rate", verl[RATE]
        yield from (("rollout.over_age", "drop"), ("train.max_off_policy_steps", 0))


def differs(verl: VerlRun, rollout: dict[str, Any], mode: str) -> Iterator[str]:
    """What went into the config and is not the same here.

    Args:
        verl: The run.
        rollout: That section of the translation.
        mode: `train.mode` of it.
    """
    if mode == "async" and "nnodes" not in rollout:
        yield (
            "train.mode=async without ranks of their own for rollouts: nothing runs beside the updates. The samples "
            "are those of older weights, and train.mode=sync takes as long"
        )
    if "over_sample_rate" in rollout and verl[RATE]:
        yield (
            f"{RATE}={verl[RATE]}: verl 0.9.1 has the key and nothing reads it. Here so many more prompts are begun, "
            "and those that are not whole in time begin again in the next step"
        )


def _mode(verl: VerlRun) -> str:
    """sync, async, or colocate_async as verl means it."""
    if is_fully_async(verl) or any(key in verl.given for key in _OWN):
        return "async"
    if verl.given.get("trainer.use_v1") is False:
        return "sync"
    modes = {"sync": "sync", "separate_async": "async", "colocate_async": "colocate_async"}
    return verl.one_of(MODE, modes, "sync")


def _ahead(verl: VerlRun) -> int:
    """`train.max_off_policy_steps` of `async`: batches that are begun ahead."""
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
            "with it no response may go on under other weights: train.max_off_policy_steps=1 is taken"
        )
        return 1
    return int(steps)


def _bound(verl: VerlRun) -> int | None:
    """Steps by which a token may be older than the weights it trains; verl counts versions from one to the other."""
    if verl.given.get(THRESHOLD, 8) is None:
        return None
    return int(max(1, verl[THRESHOLD])) - 1


def _beyond(verl: VerlRun) -> Iterator[Pair]:
    """`colocate_async`: prompts beyond a batch are begun, and go on after the updates."""
    warmup, bound = verl[WARMUP["colocate_async"]], _bound(verl)
    if verl[f"{ROLLOUT}enable_rollout_routing_replay"]:
        verl.notes[MODE] = "with enable_rollout_routing_replay no response may go on under other weights"
        return
    if warmup > 1 and bound is not None:
        verl.notes[WARMUP["colocate_async"]] = (
            f"at most a batch beyond the step's own where {THRESHOLD} is not null: 1 is taken"
        )
        warmup = 1
    if warmup <= 0:
        return
    yield "rollout.over_sample_rate", float(warmup)
    strategy = verl.one_of(STRATEGY, ("drop", "wait"), "drop")
    if bound == 0 and strategy == "wait":
        verl.notes[STRATEGY] = "each step would wait for all that was begun: drop is taken"
        strategy = "drop"
    yield "train.max_off_policy_steps", bound
    yield "rollout.over_age", strategy if bound is not None else None
