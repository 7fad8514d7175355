"""Rules of `rollout.true_on_policy`, bit-identical log-probabilities of engine and actor. Imports no torch.

The engines' `FIELDS` say which engines support it.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config import user_code
from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.rollout.async_schedule import RolloutSchedule

KEY = "rollout.true_on_policy=true"
NO_DEVICE = (
    "engine and actor share batch-invariant kernels for CPUs only; the order of additions in a GPU kernel depends on "
    "the batch"
)


def true_on_policy_rules(config: Config, grid: ParallelLayout, *, supervised: bool) -> Iterator[str]:
    """Yields a message for each setting under which log-probabilities would differ, or that the mode does not support.

    Args:
        config: Config with the algorithm's defaults filled in.
        grid: Parallel layout.
        supervised: True for an algorithm that does not sample.
    """
    if config.rollout.true_on_policy:
        yield from _engine(config, supervised=supervised)
        yield from _actor(config, grid)


def _engine(config: Config, *, supervised: bool) -> Iterator[str]:
    rollout, dtype = config.rollout, config.model.dtype
    if supervised:
        yield f"{KEY} would have no effect because algorithm.name={config.algorithm.name} does not sample. Remove it."
    if user_code.is_user_code(rollout.name):
        yield (
            f"{KEY} with rollout.name={rollout.name}: this engine does not compute log-probabilities with the actor's "
            "kernels. Use rollout.name=native."
        )
    if rollout.dtype not in (None, dtype):
        yield (
            f"{KEY} with rollout.dtype={rollout.dtype} and model.dtype={dtype}: rounded weights give other "
            "log-probabilities. Remove rollout.dtype."
        )
    if rollout.quantization is not None:
        yield (
            f"{KEY} with rollout.quantization={rollout.quantization}: quantized weights give other log-probabilities. "
            "Remove one of them."
        )
    if rollout.enforce_eager:
        yield (
            f"{KEY} with rollout.enforce_eager=true: the order of additions in PyTorch's operators depends on the "
            "batch. Remove rollout.enforce_eager."
        )
    if RolloutSchedule.of(config).is_off_policy:
        which = (
            f"rollout.over_sample_rate={rollout.over_sample_rate}" if rollout.over_sample_rate else "train.mode=async"
        )
        yield (
            f"{KEY} with {which}: tokens are sampled by older weights than those they update, so the policies differ, "
            "not only the rounding. Remove one of them, or set train.max_off_policy_steps=0."
        )


def _actor(config: Config, grid: ParallelLayout) -> Iterator[str]:
    rollout, actor = config.rollout, config.actor
    if config.run.device == "cuda":
        yield f"{KEY} with run.device=cuda: {NO_DEVICE}. Set run.device=cpu, or remove it."
    if actor.transformer_impl == "te":
        yield (
            f"{KEY} with actor.transformer_impl=te: TransformerEngine's layers do not use the engine's kernels. Set "
            "actor.transformer_impl=local."
        )
    if rollout.tensor_model_parallel_size != grid.tp:
        yield (
            f"{KEY} with rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} and "
            f"parallel.tensor_model_parallel_size={grid.tp}: both must add the partial sums of the same number of "
            "ranks. Set them to one number."
        )
    if grid.cp > 1:
        yield (
            f"{KEY} with parallel.context_parallel_size={grid.cp}: context-parallel attention does not use the "
            "engine's kernels. Set it to 1, and raise parallel.tensor_model_parallel_size if memory is short."
        )
    if config.megatron.transformer:
        yield (
            f"{KEY} with megatron.transformer={{{', '.join(config.megatron.transformer)}}}: these settings do not "
            "reach the engine. Remove them."
        )


def expert_rule(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for an MoE model."""
    if config.rollout.true_on_policy and arch.moe is not None:
        yield (
            f"{KEY} with an MoE model ({arch.family}): Megatron's dispatcher adds the outputs of a token's experts in "
            "another order than the engine, and the routers round differently. Use a dense model, or remove it and set "
            "actor.router_replay=rollout to replay the engine's routing."
        )


def check_device(config: Config, device: str) -> None:
    """Checks the device that was chosen automatically.

    Raises:
        UserError: The device is not a CPU.
    """
    if config.rollout.true_on_policy and device != "cpu":
        raise UserError(f"{KEY} on {device}: {NO_DEVICE}. Set run.device=cpu, or remove it.")
