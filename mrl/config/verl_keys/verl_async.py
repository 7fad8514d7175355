"""Verdicts on verl's keys of asynchronous training (verl 0.9.1).

They are `trainer.v1.*` of its trainer config, and those of its recipes `one_step_off_policy` and `fully_async_policy`.
`commands/from_verl/off_policy.py` translates the values. Imports nothing of mrl.
"""

from __future__ import annotations

from typing import Any

V1 = "trainer.v1."
MODE = f"{V1}trainer_mode"
THRESHOLD, STRATEGY = f"{V1}sampler.max_off_policy_threshold", f"{V1}sampler.max_off_policy_strategy"
WARMUP = {mode: f"{V1}{mode}.num_warmup_batches" for mode in ("colocate_async", "separate_async")}
RECIPE = "async_training."

MAPS: dict[str, tuple[str, Any, str]] = {
    MODE: (
        "train.mode",
        "sync",
        "`separate_async` is `async`; `colocate_async` is `sync` with `rollout.over_sample_rate`, since its sampling "
        "stops during updates too",
    ),
    WARMUP["separate_async"]: ("train.max_off_policy_steps", 1, "batches started ahead, rounded up"),
    WARMUP["colocate_async"]: (
        "rollout.over_sample_rate",
        1,
        "with `colocate_async`; at most 1 with a staleness bound",
    ),
    THRESHOLD: (
        "train.max_off_policy_steps",
        8,
        "minus 1, since verl counts the version that trains too; with `separate_async` at most the number of warm-up "
        "batches",
    ),
    STRATEGY: (
        "rollout.over_age",
        "drop",
        "with `colocate_async`; a dropped prompt starts again, in verl another prompt replaces it. With "
        "`separate_async` no prompt exceeds the bound: groups are trained in the order of their prompts",
    ),
    f"{RECIPE}staleness_threshold": (
        "train.max_off_policy_steps",
        0.1,
        "in `fully_async_policy`: batches started ahead, rounded up",
    ),
    f"{RECIPE}trigger_parameter_sync_step": (
        "train.batch_size",
        4,
        "in `fully_async_policy`: product with the next two",
    ),
    f"{RECIPE}require_batches": (
        "train.batch_size",
        1,
        "in `fully_async_policy`: factor of `ppo_mini_batch_size`, which is `train.minibatch_size`",
    ),
    "rollout.total_rollout_steps": ("train.num_steps", 100, "in `fully_async_policy`: prompts of the run"),
    "rollout.nnodes": ("rollout.nnodes", 1, "in both recipes"),
    "rollout.n_gpus_per_node": ("rollout.n_gpus_per_node", 8, "in both recipes"),
}
"""verl's key -> (mrl's key, verl's default, how values differ)."""

_ROLES = "mrl's ranks do not change their role"

MOOT: dict[str, str] = {
    f"{V1}separate_async.parameter_sync_step": (
        "the updates between two weight syncs are those of a step, as in verl: `train.batch_size` / "
        "`train.minibatch_size`"
    ),
    f"{V1}separate_async.hybrid_rollout.switch_*": _ROLES,
    f"{V1}separate_async.hybrid_rollout.adaptive_*": _ROLES,
    f"{V1}sampler.sampler_kwargs*": "mrl has no custom samplers",
    f"{V1}sync": "it is empty",
    f"{RECIPE}partial_rollout": ("a response continues with newer weights if `train.max_off_policy_steps` is above 1"),
    f"{RECIPE}use_trainer_do_validate": "ranks that generate run evaluations too",
    f"{RECIPE}concurrent_samples_per_replica": "`rollout.max_num_seqs`",
    f"{RECIPE}dynamic_schedule_*": _ROLES,
    "rollout.n": "verl's recipes read `actor_rollout_ref.rollout.n`",
    "rollout.test_freq": "verl's recipes read `trainer.test_freq`",
}
"""Pattern -> why no value needs a counterpart."""

_KEEPS = "a rank keeps its role for the entire run"

MISSING: dict[str, str] = {
    f"{V1}separate_async.hybrid_rollout.enable_switch": _KEEPS,
    f"{V1}sampler.custom_sampler.*": "groups are trained in the order of their prompts, or of completion",
    f"{V1}sampler.sync_refill_failed_groups": (
        "a sample without a score is left out; `algorithm.dynamic_sampling` replaces groups whose rewards are all equal"
    ),
    f"{RECIPE}use_dynamic_resource_scheduling": _KEEPS,
}
"""Pattern -> why there is no counterpart; harmless if it is off."""

RECIPES: dict[str, dict[str, Any]] = {
    "one_step_off_policy": {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8},
    "fully_async_policy": {
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 8,
        f"{RECIPE}staleness_threshold": 0.1,
    },
}
"""Recipe (part of its program's name) -> its own defaults, which identify it in a translation."""

BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
"""Default of both recipes, but not of verl's trainer."""
