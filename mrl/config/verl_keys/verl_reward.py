"""Verdicts on verl's reward keys: `custom_reward_function`, `reward_model`, and `reward`, which contains both."""

from __future__ import annotations

from typing import Any

_MANAGER = "`batch` becomes `batch: replica` of the function; `naive`, `dapo` and `prime` score as mrl does"
_MODEL = "a classifier with one label, instead of functions"

MAPS: dict[str, tuple[str, Any, str]] = {
    **{f"{prefix}custom_reward_function.{name}": ("reward.functions", value, text) for prefix, name, value, text in (
        ("", "path", None, "`path.py:name`, relative to the config or the working folder"),
        ("", "name", None, ""),
        ("", "reward_kwargs", None, "its `kwargs`"),
        ("reward.", "path", None, "`path.py:name`, relative to the config or the working folder"),
        ("reward.", "name", "compute_score", ""),
        ("reward.", "reward_kwargs", None, "its `kwargs`"),
    )},
    "reward.reward_model.enable": ("reward.model.path", False, _MODEL),
    "reward.reward_model.model_path": ("reward.model.path", None, ""),
    "reward_model.enable": ("reward.model.path", None, _MODEL),
    **{key: ("reward.functions", default, _MANAGER) for key, default in (
        ("reward_model.reward_manager", None), ("reward.reward_manager.name", "naive"))},
    "reward_model.model_path": ("reward.model.path", None, ""),
    "reward_model.model.path": ("reward.model.path", None, ""),
    "reward_model.model.input_tokenizer": ("reward.model.retokenize", None, "null: the actor's token ids"),
    **{f"{prefix}.overlong_buffer{rest}.{name}": (to, None, "of DAPO's manager") for prefix, rest in (
        ("reward_model", ""), ("reward_model.reward_kwargs", "_cfg"), ("reward.reward_kwargs", "_cfg"),
        ("reward", ""), ("custom_reward_function", ""))
       for name, to in (
        ("enable", "algorithm.overlong.buffer_length"), ("len", "algorithm.overlong.buffer_length"),
        ("penalty_factor", "algorithm.overlong.penalty"))},
}  # fmt: skip
"""Key -> (mrl's key, verl's default, how values differ)."""

MANAGERS: dict[str, str] = {
    "naive": "every response is scored by itself, as mrl does",
    "dapo": "every response is scored by itself, as mrl does; its penalty for overlong responses is "
    "`algorithm.overlong`",
    "batch": "the function is called once for all responses of a replica: `batch: replica` in `reward.functions`",
    "prime": "verl scores responses in several processes; mrl does so too, `reward.num_workers`",
}
"""verl's reward manager -> its counterpart in mrl."""

_PLACE = "the reward model runs on the actor's ranks, in its layout"

MOOT: dict[str, str] = {
    "reward.num_workers": "set mrl's `reward.num_workers`, worker processes per replica",
    "reward_model.num_workers": "set mrl's `reward.num_workers`, worker processes per replica",
    "reward.reward_manager.source": "it names the place of the manager",
    "reward.reward_manager.module.name": "it names a class in the file of the manager",
    "reward_model.launch_reward_fn_async": "functions run in worker processes",
    "*reward_kwargs.max_resp_len": "`rollout.response_length`",
    "*overlong_buffer*.log": "`reward/*` is always written",
    **dict.fromkeys(
        [f"{prefix}.{name}" for prefix in ("reward.reward_model", "reward_model") for name in (
            "rollout.*", "n_gpus_per_node", "nnodes", "enable_resource_pool")],
        _PLACE),
    **dict.fromkeys(
        [f"reward_model.{name}" for name in (
            "strategy", "model.fsdp_config.*", "model.use_*", "megatron.*", "ulysses_sequence_parallel_size",
            "use_dynamic_bsz", "forward_max_token_len_per_gpu", "micro_batch_size*", "load_weight")],
        _PLACE),
    "*sandbox_fusion.max_concurrent": "only for verl's sandbox service",
    "*sandbox_fusion.memory_limit_mb": "only for verl's sandbox service",
}  # fmt: skip
"""Pattern -> why no value needs a counterpart."""

SANDBOX = "sandbox_fusion.url"
"""End of the key with the address of verl's sandbox service."""

MISSING: dict[str, str] = {
    f"*{SANDBOX}": "programs run in mrl's own sandbox; your own function may call a service",
    "reward.reward_manager.module.path": "mrl runs no reward manager: write its computation as a function of "
    "`reward.functions`",
    "reward.reward_manager.*": "mrl does not have this reward manager",
    "reward_model.model.external_lib": "no code of a model folder is run",
    "reward_model.model.trust_remote_code": "no code of a model folder is run",
    "reward_model.max_length": "a longer sample has no score; it is not truncated",
    "reward.reward_model.*": "only for verl's reward server",
    "reward_model.*": "only for verl's reward workers",
    "reward.reward_kwargs*": "set them as `kwargs` of the function in `reward.functions`",
}
"""Pattern -> why there is no counterpart."""
