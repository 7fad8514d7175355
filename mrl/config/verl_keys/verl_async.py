"""What becomes of verl's keys of asynchronous training, as data.

Owns `trainer.v1.*` of its trainer config (verl 0.9.1), and what its recipes `one_step_off_policy` and
`fully_async_policy` add. `commands/from_verl/off_policy.py` has the values. It imports nothing of mrl.
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
        "`separate_async` is `async`; `colocate_async` is `sync` with `rollout.over_sample_rate`: sampling stops for "
        "the updates there too",
    ),
    WARMUP["separate_async"]: ("train.max_off_policy_steps", 1, "batches begun ahead; a part of one counts as one"),
    WARMUP["colocate_async"]: ("rollout.over_sample_rate", 1, "of `colocate_async`, at most 1 where ages have a bound"),
    THRESHOLD: (
        "train.max_off_policy_steps",
        8,
        "less 1, since verl counts the version that trains too; with `separate_async` the warm-up batches are the "
        "bound where they are fewer",
    ),
    STRATEGY: (
        "rollout.over_age",
        "drop",
        "of `colocate_async`; what is dropped begins again, there another prompt takes its place. With "
        "`separate_async` nothing gets older: groups are taken in the order of their prompts",
    ),
    f"{RECIPE}staleness_threshold": (
        "train.max_off_policy_steps",
        0.1,
        "of `fully_async_policy`: batches begun ahead; a part of one counts as one",
    ),
    f"{RECIPE}trigger_parameter_sync_step": ("train.batch_size", 4, "of `fully_async_policy`: times the next two"),
    f"{RECIPE}require_batches": (
        "train.batch_size",
        1,
        "of `fully_async_policy`: times `ppo_mini_batch_size`, which is `train.minibatch_size`",
    ),
    "rollout.total_rollout_steps": ("train.num_steps", 100, "of `fully_async_policy`: prompts of the run"),
    "rollout.nnodes": ("rollout.nnodes", 1, "of both recipes"),
    "rollout.n_gpus_per_node": ("rollout.n_gpus_per_node", 8, "of both recipes"),
}
"""verl's key -> mrl's, verl's default, how values differ."""

_ROLES = "of ranks that change their role, which are not there"

MOOT: dict[str, str] = {
    f"{V1}separate_async.parameter_sync_step": (
        "the updates between two refits are those of a step: `train.batch_size` / `train.minibatch_size`, there too"
    ),
    f"{V1}separate_async.hybrid_rollout.switch_*": _ROLES,
    f"{V1}separate_async.hybrid_rollout.adaptive_*": _ROLES,
    f"{V1}sampler.sampler_kwargs*": "of a sampler of one's own, which is not there",
    f"{V1}sync": "nothing is in it",
    f"{RECIPE}partial_rollout": (
        "a response goes on under the next weights where `train.max_off_policy_steps` is above 1"
    ),
    f"{RECIPE}use_trainer_do_validate": "ranks that sample answer held-out prompts too",
    f"{RECIPE}concurrent_samples_per_replica": "`rollout.max_num_seqs`",
    f"{RECIPE}dynamic_schedule_*": _ROLES,
    "rollout.n": "verl's recipes read `actor_rollout_ref.rollout.n`",
    "rollout.test_freq": "verl's recipes read `trainer.test_freq`",
}
"""Pattern -> why no value of it needs a counterpart."""

_KEEPS = "a rank keeps its role for the whole run"

MISSING: dict[str, str] = {
    f"{V1}separate_async.hybrid_rollout.enable_switch": _KEEPS,
    f"{V1}sampler.custom_sampler.*": "groups are taken in the order of their prompts, or of their ends",
    f"{V1}sampler.sync_refill_failed_groups": (
        "a sample without a score is left out; `algorithm.dynamic_sampling` draws other prompts for groups that have "
        "nothing to learn from"
    ),
    f"{RECIPE}use_dynamic_resource_scheduling": _KEEPS,
}
"""Pattern -> why there is no counterpart; harmless while it is off."""

RECIPES: dict[str, dict[str, Any]] = {
    "one_step_off_policy": {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 8},
    "fully_async_policy": {
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 8,
        f"{RECIPE}staleness_threshold": 0.1,
    },
}
"""Recipe, as it stands in the name of its program -> its own defaults, by which a translation knows it."""

BYPASS = {"algorithm.rollout_correction.bypass_mode": True}
"""Default of both recipes, and not of verl's trainer."""
