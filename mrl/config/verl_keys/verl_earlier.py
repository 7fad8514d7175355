"""Verdicts on keys of verl before 0.9 that it no longer has; `renamed_keys.py` has those with a new name."""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_PROFILER = "no profiler; `timing_s/*` is always measured"

MOOT: dict[str, str] = {
    f"{_ACTOR}load_weight": "the weights come from `model.path`",
    f"{_ACTOR}profile.*": _PROFILER,
    f"{_ACTOR}sum_pi_squared_checkpointing": "only other estimators of verl use it",
    "actor_rollout_ref.model.gradient_checkpointing_kwargs.*": "set `actor.recompute`",
    "actor_rollout_ref.model.enable_activation_offloading": "`actor.recompute` saves the memory",
    f"{_ROLLOUT}layer_name_map.*": "tensor names are defined in `mrl/models`",
    f"{_ROLLOUT}*swap_space": "engines do not swap; `rollout.gpu_memory_utilization`",
    f"{_ROLLOUT}skip_dump_dir": "only for `skip_rollout`",
    f"{_ROLLOUT}chat_scheduler": "the engine runs in the ranks, without servers",
    f"{_ROLLOUT}sglang_rollout_mode": "the engine runs in the ranks, without servers",
    f"{_ROLLOUT}profiler.discrete": _PROFILER,
    f"{_ROLLOUT}update_weights_bucket_megabytes": "`rollout.checkpoint_engine.update_weights_bucket_megabytes`",
    "reward_manager.source": "it names the place of the manager",
    "reward_manager.module.name": "it names a class in the file of the manager",
    "reward_model.use_reward_loop": "functions run in worker processes",
    **dict.fromkeys(
        [f"algorithm.rollout_is_{name}" for name in ("threshold", "threshold_lower", "level", "mode")],
        "only for `rollout_is` of the same section"),
    "trainer.remove_previous_ckpt*": "`checkpoint.keep_last` limits the number of checkpoints",
    "trainer.tensorboard_dir": "TensorBoard's files are in the run folder",
    **dict.fromkeys(
        ("trainer.profile_steps", "trainer.npu_profile.*", "trainer.controller_nsight_options.*",
         "trainer.worker_nsight_options.*"),
        _PROFILER),
    "ray_init.*": "no Ray",
}  # fmt: skip
"""Pattern -> why no value needs a counterpart."""

MISSING: dict[str, str] = {
    f"{_ACTOR}megatron.num_layers_per_virtual_pipeline_stage": "set `parallel.virtual_pipeline_model_parallel_size`",
    f"{_ROLLOUT}use_fire_sampling": "no FIRE sampling: each token is sampled at `rollout.temperature`",
    f"{_ROLLOUT}skip_rollout": "every step samples its responses",
    "algorithm.rollout_is": "of the correction, `algorithm.rollout_correction.rollout_is` is `token` or `sequence`",
    "algorithm.rollout_is_veto_threshold": "no veto by single tokens: set `algorithm.rollout_correction.rollout_rs`",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "no veto by single tokens: set "
    "`algorithm.rollout_correction.rollout_rs`",
}
"""Pattern -> why there is no counterpart; harmless if it is off."""
