"""Validation of a config before any process group exists; all broken rules are reported in one error.

    check_config(config, world_size)                   # rules that need no model
    check(config, arch, world_size, vocab_size, ...)   # also the rules that need the model and its tokenizer

The other files of this folder have the rules of one section each; `megatron.py`, `experts.py` and
`unused_settings.py` have rules across sections. Types are checked in `config/config.py`, fields of `algorithm` in
`algorithms/base.py`, rows of data in `data/`. Imports no torch.
"""

from __future__ import annotations

from mrl.config.config import Config, LearnsFrom
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.trainer.validation.data import data_rules, evaluation_rules
from mrl.trainer.validation.episodes import episode_rules
from mrl.trainer.validation.experts import expert_rules
from mrl.trainer.validation.linear_attention import linear_attention_rules
from mrl.trainer.validation.lora import adapted_module_rules, lora_rules
from mrl.trainer.validation.megatron import megatron_rules, name_rules
from mrl.trainer.validation.model import check_size, model_rules, token_rules
from mrl.trainer.validation.off_policy import off_policy_rules
from mrl.trainer.validation.parallel import build_parallel_layout, check_ranks, division_rules, layout_rules
from mrl.trainer.validation.ranges import fixed_rules, range_rules
from mrl.trainer.validation.rollout import (
    latent_attention_rules,
    length_rules,
    position_rules,
    sampling_rules,
)
from mrl.trainer.validation.rollout_ranks import role_rules
from mrl.trainer.validation.train import share_rules, step_rules
from mrl.trainer.validation.true_on_policy import expert_rule, true_on_policy_rules
from mrl.trainer.validation.unused_settings import unused_setting_rules


def check_config(
    config: Config, world_size: int, *, learns_from: LearnsFrom = "samples", arch: ArchSpec | None = None
) -> None:
    """Checks all rules that need no model.

    Args:
        config: Config to check.
        world_size: Number of ranks of the job.
        learns_from: Kind of data that the algorithm trains on: "samples", "responses" or "pairs".
        arch: Architecture of the actor, if known: layouts that do not divide it are reported before the number of
            ranks.

    Raises:
        UserError: Message with all broken rules, their keys and what to do.
    """
    _raise([*range_rules(config), *fixed_rules(config), *name_rules(config)])
    grid = build_parallel_layout(config, world_size)
    not_divided = [] if arch is None else list(division_rules(arch, grid))
    try:
        check_ranks(config, world_size)
    except UserError:
        _raise(not_divided)
        raise
    broken = [
        *layout_rules(config, grid),
        *role_rules(config, grid, supervised=learns_from != "samples"),
        *off_policy_rules(config, supervised=learns_from != "samples"),
        *true_on_policy_rules(config, grid, supervised=learns_from != "samples"),
        *step_rules(config, grid),
        *length_rules(config),
        *sampling_rules(config),
        *model_rules(config),
        *lora_rules(config),
        *data_rules(config, supervised=learns_from != "samples"),
        *evaluation_rules(config),
        *share_rules(config, grid, supervised=learns_from != "samples"),
        *episode_rules(config),
        *unused_setting_rules(config, grid, learns_from=learns_from),
    ]
    _raise([*not_divided, *broken] if broken else [])


def check(
    config: Config,
    arch: ArchSpec,
    world_size: int,
    tokenizer_vocab_size: int,
    *,
    learns_from: LearnsFrom = "samples",
) -> None:
    """Checks all rules.

    Args:
        config: Config to check.
        arch: Architecture of the actor.
        world_size: Number of ranks of the job.
        tokenizer_vocab_size: Largest token id of the tokenizer plus 1.
        learns_from: Kind of data that the algorithm trains on: "samples", "responses" or "pairs".

    Raises:
        UserError: Message with all broken rules, their keys and what to do.
    """
    check_size(arch)
    check_config(config, world_size, learns_from=learns_from, arch=arch)
    grid = build_parallel_layout(config, world_size)
    broken = [
        *division_rules(arch, grid),
        *position_rules(config, arch),
        *latent_attention_rules(config, arch),
        *expert_rules(config, arch, grid, supervised=learns_from != "samples"),
        *expert_rule(config, arch),
        *linear_attention_rules(config, arch, grid),
        *adapted_module_rules("actor.lora", config.actor.lora, arch),
        *engine_capabilities(config.rollout.name).model_errors(config, arch),
        *megatron_rules(config, arch, grid),
        *token_rules(arch, tokenizer_vocab_size),
    ]
    _raise(broken)


def _raise(broken: list[str]) -> None:
    if len(broken) == 1:
        raise UserError(broken[0])
    if broken:
        raise UserError(f"The config has {len(broken)} errors:" + "".join(f"\n  - {message}" for message in broken))
