"""Keys whose loss does not change what a run trains: logging, evaluation, speed, memory, checkpoints, the machine.

`from-verl` ends with status 2 if any other setting of a verl run is lost.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from mrl.config.verl_keys.translated_keys import ACTOR, MEGATRON, ROLLOUT, ROOT
from mrl.config.verl_keys.verl_async import RECIPE, V1

WITHOUT_EFFECT: tuple[str, ...] = (
    "trainer.logger", "trainer.val_before_train", "trainer.test_freq", "trainer.save_freq", "trainer.default_hdfs_dir",
    "trainer.checkpoint_callback_class", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "data.val_*",
    "*.trust_remote_code", "*.override_config.*attn_implementation", f"{ROOT}model.tiled_mlp.*",
    f"{ROOT}model.mtp.enable_rollout", f"{MEGATRON}use_megatron_fsdp", f"{ACTOR}*dynamic_context_parallel",
    f"{MEGATRON}max_seqlen_per_dp_cp_rank", f"{MEGATRON}num_layers_per_virtual_pipeline_stage",
    *(f"{ROLLOUT}{name}" for name in (
        "val_kwargs.*", "expert_parallel_size", "moe_tensor_parallel_size", "pipeline_model_parallel_size",
        "over_sample_rate", "enable_chunked_prefill", "max_num_batched_tokens",
        "disaggregation.*", "checkpoint_manager_class", "custom", "mtp.enable_rollout")),
    "transfer_queue.*", f"{V1}separate_async.hybrid_rollout.*", f"{RECIPE}use_dynamic_resource_scheduling",
    "run.output_dir", "observe.*", "checkpoint.*", "rollout.val_kwargs.*", "train.eval_interval",
)  # fmt: skip
"""Patterns of verl's keys, and of mrl's where a translated value is refused."""


def changes_training(key: str) -> bool:
    """Returns whether a run without the setting of this key may train something else."""
    return not any(fnmatchcase(key, pattern) for pattern in WITHOUT_EFFECT)
