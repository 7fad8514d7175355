"""Refuses sampling ahead of the updates, or beyond a batch, where it cannot be or would have no effect.

Owns the rules of `train.mode`, `train.max_off_policy_steps`, `rollout.over_sample_rate`, `rollout.over_age` and
`rollout.mask_offpolicy`, and which correction a run takes that asks for none. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mrl.config.config import Config, RolloutCorrectionConfig
from mrl.rollout.async_schedule import Schedule

AHEAD = "decoupled_token_is"
"""`algorithm.rollout_correction.preset` of a run that samples ahead and sets no field of the section: with the clip
around what sampled, tokens would be clipped for what earlier steps did to them."""


def corrected_ahead(config: Config) -> Config:
    """The config with the correction of runs that sample ahead, where it asks for none.

    Where only a teacher is learned from, and not as a policy gradient, weights would act on nothing: it stays.
    """
    algorithm, loss = config.algorithm, config.distillation.distillation_loss
    only_teacher = config.distillation.enabled and not loss.use_task_rewards and not loss.use_policy_gradient
    open_section = algorithm.rollout_correction == RolloutCorrectionConfig()
    if not Schedule.of(config).lead or not open_section or only_teacher:
        return config
    return replace(config, algorithm=replace(algorithm, rollout_correction=RolloutCorrectionConfig(preset=AHEAD)))


def told_correction(config: Config) -> str:
    """Of a run that samples ahead: how its loss is corrected for that, and why so; "" of others. It follows a line."""
    corrected, asked = corrected_ahead(config), config.algorithm.rollout_correction
    if corrected is not config:
        preset = corrected.algorithm.rollout_correction.preset
        return f"; rollout correction {preset}, since older weights sample and the config names none"
    if not Schedule.of(config).lead or asked == RolloutCorrectionConfig():
        return ""
    return f"; rollout correction {asked.preset or 'of its own'}, by the config"


def off_policy_rules(config: Config, *, supervised: bool) -> Iterator[str]:
    """A message for each broken rule.

    Args:
        config: What was asked for.
        supervised: The algorithm samples nothing.
    """
    train, rollout, rate = config.train, config.rollout, config.rollout.over_sample_rate
    most, over = train.max_off_policy_steps, f"rollout.over_sample_rate={config.rollout.over_sample_rate}"
    if supervised and (train.mode == "async" or rate):
        key = "train.mode=async" if train.mode == "async" else over
        yield f"{key} with algorithm.name={config.algorithm.name}: nothing is sampled. Leave it out."
        return
    if train.mode == "async" and rate:
        yield (
            f"{over} with train.mode=async: the prompts of later steps are begun ahead anyway, as far as "
            "train.max_off_policy_steps allows. Raise that, or take train.mode=sync."
        )
    yield from _idle_rules(config)
    if rate and most == 0 and rollout.over_age == "wait":
        yield (
            f"{over} with train.max_off_policy_steps=0: each step would wait for all that was begun. Raise "
            "train.max_off_policy_steps, or set rollout.over_age=drop, and what is not whole begins again."
        )
    if rate > 1 and most is not None:
        yield (
            f"{over} with train.max_off_policy_steps={most}: more prompts than a batch could reach that age in the "
            "same step, which takes one batch. Take at most 1, or leave train.max_off_policy_steps at null."
        )
    if rate and rollout.multi_turn.enable:
        yield (
            f"{over} with rollout.multi_turn.enable: a conversation cannot stop and go on later. Leave one out, "
            "or take train.mode=async."
        )
    tokens = rollout.max_num_batched_tokens
    if Schedule.of(config).by_parts and not rollout.enable_chunked_prefill and tokens < rollout.longest:
        yield (
            f"rollout.enable_chunked_prefill=false with rollout.max_num_batched_tokens={tokens}: a response that "
            f"goes on is read with its prompt, up to {rollout.longest} tokens at once. Raise the one, or set the other."
        )
    if rollout.enable_rollout_routing_replay and Schedule.of(config).by_parts:
        key = over if rate else f"train.mode=async with train.max_off_policy_steps={most}"
        yield (
            f"{key} with rollout.enable_rollout_routing_replay: a response that goes on is read again under other "
            "weights, which choose other experts for its tokens. Leave one of them out, or take "
            "train.max_off_policy_steps=1."
        )


def _idle_rules(config: Config) -> Iterator[str]:
    train, rollout = config.train, config.rollout
    most, rate = train.max_off_policy_steps, rollout.over_sample_rate
    if most is not None and train.mode == "sync" and not rate:
        yield _idle(
            f"train.max_off_policy_steps={most}",
            "train.mode is sync and rollout.over_sample_rate is 0",
            "set train.mode=async or a rollout.over_sample_rate",
        )
    if rollout.over_age != "wait" and train.mode == "async" and not rate:
        yield _idle(
            f"rollout.over_age={rollout.over_age}",
            "with train.mode=async groups are taken in the order of their prompts, and each is waited for",
            "take train.mode=sync with a rollout.over_sample_rate",
        )
    elif rollout.over_age != "wait" and not rate:
        yield _idle(
            f"rollout.over_age={rollout.over_age}", "rollout.over_sample_rate is 0", "set rollout.over_sample_rate"
        )
    elif rollout.over_age != "wait" and most is None:
        yield _idle(
            f"rollout.over_age={rollout.over_age}",
            "train.max_off_policy_steps is null: no age is too old",
            "set train.max_off_policy_steps, to 1 for example",
        )
    if rollout.mask_offpolicy and not Schedule.of(config).by_parts:
        yield _idle(
            "rollout.mask_offpolicy",
            "no response has tokens of two versions",
            "set rollout.over_sample_rate, or train.mode=async with train.max_off_policy_steps=2",
        )


def _idle(key: str, why: str, instead: str) -> str:
    return f"{key} is set, but would have no effect because {why}. Leave it out, or {instead}."
