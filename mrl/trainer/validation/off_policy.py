"""Rules of asynchronous sampling and over-sampling, and the default rollout correction for them. Imports no torch.

The keys are `train.mode`, `train.max_off_policy_steps`, `rollout.over_sample_rate`, `rollout.over_age` and
`rollout.mask_offpolicy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl.config.config import Config, RolloutCorrectionConfig
from mrl.rollout.async_schedule import RolloutSchedule

ASYNC_PRESET = "decoupled_token_is"
"""Default of `algorithm.rollout_correction.preset` for asynchronous runs that set no field of the section. Clipping
around the rollout policy would clip tokens because of the updates of earlier steps."""


def with_async_correction(config: Config) -> Config:
    """Returns the config with the rollout correction AHEAD if it samples ahead and sets no correction.

    Distillation without task rewards and policy gradient stays unchanged, because its loss has no importance weights.
    """
    algorithm, loss = config.algorithm, config.distillation.distillation_loss
    only_teacher = config.distillation.enabled and not loss.use_task_rewards and not loss.use_policy_gradient
    is_default = algorithm.rollout_correction == RolloutCorrectionConfig()
    if not RolloutSchedule.of(config).lead or not is_default or only_teacher:
        return config
    return replace(
        config, algorithm=replace(algorithm, rollout_correction=RolloutCorrectionConfig(preset=ASYNC_PRESET))
    )


def describe_correction(config: Config) -> str:
    """Returns the end of a log line about the rollout correction of an asynchronous run; "" for other runs."""
    corrected, given = with_async_correction(config), config.algorithm.rollout_correction
    if corrected is not config:
        preset = corrected.algorithm.rollout_correction.preset
        return f"; rollout correction {preset}, the default for sampling with older weights"
    if not RolloutSchedule.of(config).lead or given == RolloutCorrectionConfig():
        return ""
    return f"; rollout correction {given.preset or 'without preset'}, set by the config"


def off_policy_rules(config: Config, *, supervised: bool) -> Iterator[str]:
    """Yields a message for each broken rule; `supervised` is True for an algorithm that does not sample."""
    train, rollout, rate = config.train, config.rollout, config.rollout.over_sample_rate
    max_age, over = train.max_off_policy_steps, f"rollout.over_sample_rate={config.rollout.over_sample_rate}"
    if supervised and (train.mode == "async" or rate):
        key = "train.mode=async" if train.mode == "async" else over
        yield f"{key} would have no effect because algorithm.name={config.algorithm.name} does not sample. Remove it."
        return
    if train.mode == "async" and rate:
        yield (
            f"{over} is not supported with train.mode=async, which samples prompts of later steps ahead already, up to "
            "train.max_off_policy_steps. Raise that instead, or use train.mode=sync."
        )
    yield from _idle_rules(config)
    if rate and max_age == 0 and rollout.over_age == "wait":
        yield (
            f"{over} with train.max_off_policy_steps=0 and rollout.over_age=wait: each step would wait for all. "
            "Raise train.max_off_policy_steps, or set rollout.over_age=drop to restart unfinished prompts."
        )
    if rate > 1 and max_age is not None:
        yield (
            f"{over} with train.max_off_policy_steps={max_age}: more prompts than one batch can reach the maximum age "
            "in the same step, which trains on one batch. Set rollout.over_sample_rate to at most 1, or "
            "train.max_off_policy_steps to null."
        )
    if rate and rollout.multi_turn.enable:
        yield (
            f"{over} is not supported with rollout.multi_turn.enable: a conversation cannot be continued later. Remove "
            "one of them, or use train.mode=async."
        )
    tokens = rollout.max_num_batched_tokens
    if (
        RolloutSchedule.of(config).by_parts
        and not rollout.enable_chunked_prefill
        and tokens < rollout.max_sequence_length
    ):
        yield (
            f"rollout.enable_chunked_prefill=false with rollout.max_num_batched_tokens={tokens}: a partial rollout is "
            f"prefilled together with its prompt, up to {rollout.max_sequence_length} tokens. Raise "
            "rollout.max_num_batched_tokens, or set rollout.enable_chunked_prefill=true."
        )
    if rollout.enable_rollout_routing_replay and RolloutSchedule.of(config).by_parts:
        key = over if rate else f"train.mode=async with train.max_off_policy_steps={max_age}"
        yield (
            f"{key} is not supported with rollout.enable_rollout_routing_replay: a partial rollout is prefilled again "
            "with other weights, which route its tokens to other experts. Remove one of them, or set "
            "train.max_off_policy_steps=1."
        )


def _idle_rules(config: Config) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    max_age, rate = train.max_off_policy_steps, rollout.over_sample_rate
    if max_age is not None and train.mode == "sync" and not rate:
        yield _idle(
            f"train.max_off_policy_steps={max_age}",
            "train.mode is sync and rollout.over_sample_rate is 0",
            "set train.mode=async or a rollout.over_sample_rate",
        )
    if rollout.over_age != "wait" and train.mode == "async" and not rate:
        yield _idle(
            f"rollout.over_age={rollout.over_age}",
            "train.mode=async trains on prompts in order and waits for each",
            "use train.mode=sync with a rollout.over_sample_rate",
        )
    elif rollout.over_age != "wait" and not rate:
        yield _idle(
            f"rollout.over_age={rollout.over_age}", "rollout.over_sample_rate is 0", "set rollout.over_sample_rate"
        )
    elif rollout.over_age != "wait" and max_age is None:
        yield _idle(
            f"rollout.over_age={rollout.over_age}",
            "train.max_off_policy_steps is null, so there is no maximum age",
            "set train.max_off_policy_steps, for example to 1",
        )
    if rollout.mask_offpolicy and not RolloutSchedule.of(config).by_parts:
        yield _idle(
            "rollout.mask_offpolicy",
            "no response has tokens of two policy versions",
            "set rollout.over_sample_rate, or train.mode=async with train.max_off_policy_steps=2",
        )


def _idle(key: str, why: str, instead: str) -> str:
    return f"{key} is set, but would have no effect because {why}. Remove it, or {instead}."
