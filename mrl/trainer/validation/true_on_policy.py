"""Refuses `rollout.true_on_policy` where engine and actor could not have the same bits, each field with the reason.

Owns these rules; that other engines cannot have it stands with them (`FIELDS`). It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config import user_code
from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import Grid
from mrl.rollout.async_schedule import Schedule

KEY = "rollout.true_on_policy=true"
NO_DEVICE = (
    "engine and actor share functions that are compiled for processors; the kernels of a GPU add a row's numbers in an "
    "order that follows from the rows beside it"
)


def true_on_policy_rules(config: Config, grid: Grid, *, supervised: bool) -> Iterator[str]:
    """A message for each field under which log-probabilities would differ, or which the mode has no answer for.

    Args:
        config: What was asked for.
        grid: The layout.
        supervised: The algorithm samples nothing.
    """
    if config.rollout.true_on_policy:
        yield from _engine(config, supervised=supervised)
        yield from _actor(config, grid)


def _engine(config: Config, *, supervised: bool) -> Iterator[str]:
    rollout, dtype = config.rollout, config.model.dtype
    if supervised:
        yield f"{KEY} with algorithm.name={config.algorithm.name}: nothing is sampled to train on. Leave it out."
    if user_code.is_own(rollout.name):
        yield (
            f"{KEY} with rollout.name={rollout.name}: its log-probabilities are not computed by the functions of the "
            "actor. Take rollout.name=native."
        )
    if rollout.dtype not in (None, dtype):
        yield (
            f"{KEY} with rollout.dtype={rollout.dtype} and model.dtype={dtype}: rounded weights have other "
            "log-probabilities. Leave rollout.dtype out."
        )
    if rollout.quantization is not None:
        yield (
            f"{KEY} with rollout.quantization={rollout.quantization}: quantised weights have other log-probabilities. "
            "Leave one of them out."
        )
    if rollout.enforce_eager:
        yield (
            f"{KEY} with rollout.enforce_eager=true: PyTorch's operators add a row's numbers in an order that follows "
            "from the rows beside it. Leave rollout.enforce_eager out."
        )
    if Schedule.of(config).is_off_policy:
        which = (
            f"rollout.over_sample_rate={rollout.over_sample_rate}" if rollout.over_sample_rate else "train.mode=async"
        )
        yield (
            f"{KEY} with {which}: tokens are sampled by older weights than those that train, so the difference is one "
            "of policies, not of rounding. Leave one of them out, or take train.max_off_policy_steps=0."
        )


def _actor(config: Config, grid: Grid) -> Iterator[str]:
    rollout, actor = config.rollout, config.actor
    if config.run.device == "cuda":
        yield f"{KEY} with run.device=cuda: {NO_DEVICE}. Set run.device=cpu, or leave it out."
    if actor.transformer_impl == "te":
        yield (
            f"{KEY} with actor.transformer_impl=te: TransformerEngine's layers do not compute by the engine's "
            "functions. Take actor.transformer_impl=local."
        )
    if rollout.tensor_model_parallel_size != grid.tp:
        yield (
            f"{KEY} with rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} and "
            f"parallel.tensor_model_parallel_size={grid.tp}: both must add the partial sums of as many ranks. Set them "
            "to one number."
        )
    if grid.cp > 1:
        yield (
            f"{KEY} with parallel.context_parallel_size={grid.cp}: attention over ranks does not compute by the "
            "engine's functions. Set it to 1, and parallel.tensor_model_parallel_size up where memory is short."
        )
    if config.megatron.transformer:
        yield (
            f"{KEY} with megatron.transformer={{{', '.join(config.megatron.transformer)}}}: what is passed on to "
            "Megatron's layers does not reach the engine. Leave it out."
        )


def expert_rule(config: Config, arch: ArchSpec) -> Iterator[str]:
    """A message where the model has experts."""
    if config.rollout.true_on_policy and arch.moe is not None:
        yield (
            f"{KEY} with a mixture of experts ({arch.family}): Megatron's dispatcher adds up a token's experts in "
            "another order than the engine, and their routers round probabilities otherwise. Take a dense model; "
            "without the mode actor.router_replay=rollout keeps the choice of experts."
        )


def check_device(config: Config, device: str) -> None:
    """Refuses a device that was found where none was asked for.

    Raises:
        UserError: It is not a CPU.
    """
    if config.rollout.true_on_policy and device != "cpu":
        raise UserError(f"{KEY} on {device}: {NO_DEVICE}. Set run.device=cpu, or leave it out.")
