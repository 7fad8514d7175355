"""verl's programs: which ones are translated, and mrl's alternatives to the others.

A program is named by its module (`verl.trainer.main_ppo`) or by its file.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

PROGRAM = re.compile(
    r"(?:[\w./~${}-]*[./])?(?:main_(?!process\b)\w+|\w+_main_ppo|fully_async_main|(?:fsdp_|megatron_)?sft_trainer(?:_ray)?)"
    r"(?:\.py)?|verl\.trainer\.main"
)
"""Word of a command line that names one of verl's programs, or a copy of one."""

MENTIONED = r"main_|_main\b|sft_trainer|verl\.trainer"
"""Extended regular expression (bash) that matches shell text which starts such a program."""

RL = (
    "*main_ppo", "*main_ppo_sync", "*main_ppo_split", "*main_ppo_*", "*main_dapo", "*main_entropy", "*fully_async_main",
)  # fmt: skip
"""Patterns of programs with the keys of verl's trainer config."""

SFT = ("*sft_trainer", "*sft_trainer_ray")
"""Patterns of programs with the keys of verl's SFT config."""

VERLS_OWN = ("verl.", "recipe.", "main_ppo", "main_dapo", "main_entropy", "main_ppo_split", "fully_async_main")
"""Prefixes of the names of verl's own programs."""

_ONLINE_DPO = "mrl has DPO on pairs in the data, `algorithm.name=dpo`, and no preference loss on its own samples"

REFUSED: dict[str, str] = {
    "*vla.main_*": "it trains policies of robots on images; mrl trains language models on text",
    "*.main_sac": "soft actor-critic needs a replay buffer; mrl has GRPO, PPO and others, `algorithm.name`",
    "*spo_main_ppo": "SPO tracks a value per prompt; mrl's baselines are the group's mean, `algorithm.name=rloo`, "
    "or a critic, `algorithm.name=ppo`",
    "*gvpo_main_ppo": "mrl has no GVPO loss; choose one of `algorithm.policy_loss`",
    "*main_prime": "PRIME trains an implicit process reward model online; mrl has a fixed reward model, "
    "`reward.model.path`, with `algorithm.name=rloo`",
    "*main_spin": f"SPIN trains on preferences. {_ONLINE_DPO}",
    "*main_sppo": f"SPPO trains on preferences. {_ONLINE_DPO}",
    "*main_gkd": "in mrl, on-policy distillation is section `distillation` of a config (docs/distillation.md)",
    "*main_flowrl": "mrl has no FlowRL loss; choose one of `algorithm.policy_loss`",
    "*main_dance*": "it trains image and video generators; mrl trains language models",
    "*main_atropos*": "its samples come from an Atropos server; mrl samples itself, `rollout.agent.environment`",
    "*main_rep_exp": "its exploration bonus has no counterpart; add your own reward to `reward.functions`",
    "*main_dynamo": "it samples through NVIDIA Dynamo; mrl's engines are `native`, `vllm` and `trtllm`",
    "*main_generation*": "it trains nothing; `mrl evaluate` samples and scores held-out prompts",
    "*main_eval": "it trains nothing; `mrl evaluate` samples and scores held-out prompts",
    "verl.trainer.main": "it is EasyR1's, which has its own keys (worker.*); use the keys of verl's main_ppo",
}
"""Pattern -> why a program is not translated, and mrl's alternative."""

UNKNOWN = "mrl does not know what it trains; pass the command line of a verl.trainer.main_ppo with its settings"


def program(word: str) -> str:
    """Returns the module that a word of a command line names; "" for any other word."""
    if not PROGRAM.fullmatch(word):
        return ""
    return word.removesuffix(".py").strip("./").replace("/", ".")


def kind(name: str) -> str:
    """Returns "rl" or "sft" for a program whose settings are translated; "" for others."""
    if any(fnmatchcase(name, pattern) for pattern in REFUSED):
        return ""
    return next(
        (word for word, known in (("rl", RL), ("sft", SFT)) if any(fnmatchcase(name, one) for one in known)), ""
    )


def why_not(name: str) -> str:
    """Returns why a program is not translated, and mrl's alternative."""
    return next((why for pattern, why in REFUSED.items() if fnmatchcase(name, pattern)), UNKNOWN)


def is_verls(name: str) -> bool:
    """Returns whether a program is verl's own, and not another project's copy."""
    return name.startswith(VERLS_OWN)


_CONFIGS = """
ppo_trainer ppo_megatron_trainer ppo_trainer_split dapo_trainer dapo_megatron_trainer dapo_transfer_queue_trainer
entropy_trainer one_step_off_ppo_trainer one_step_off_ppo_megatron_trainer fully_async_ppo_trainer
fully_async_ppo_megatron_trainer fully_async_dapo_trainer transfer_queue_ppo_trainer transfer_queue_ppo_megatron_trainer
_generated_ppo_trainer _generated_ppo_megatron_trainer legacy_ppo_trainer legacy_ppo_megatron_trainer
sft_trainer sft_trainer_engine
"""
CONFIGS = frozenset(_CONFIGS.split())
"""Names of verl's main config files, whose values are verl's defaults."""

_GROUPS = """
actor algorithm critic data distillation engine model model_engine npu_profile optim profiler ref reward reward_manager
reward_model rollout transfer_queue legacy_reward_impl
"""
GROUPS = frozenset(_GROUPS.split())
"""Folders of verl's other config files."""
