"""Sampling distributions of training and held-out rollouts, from `rollout` and `rollout.val_kwargs`."""

from __future__ import annotations

from dataclasses import replace

from mrl.algorithms.functional.sampling import truncates
from mrl.config.config import Config
from mrl.engines.base import SamplingConfig


def training_sampling(config: Config, eos_ids: tuple[int, ...]) -> SamplingConfig:
    """Returns the distribution of training rollouts; `eos_ids` end a response.

    With top-k, top-p or min-p the engine records the kept token ids, so that the actor can apply the same mask.
    """
    rollout = config.rollout
    return SamplingConfig(
        n=rollout.n,
        max_tokens=rollout.response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        greedy=not rollout.do_sample,
        ignore_eos=rollout.ignore_eos,
        stop_token_ids=eos_ids,
        stop=tuple(rollout.stop),
        seed=config.run.seed,
        return_kept_tokens=truncates(rollout.top_k, rollout.top_p, rollout.min_p),
    )


def validation_sampling(config: Config, eos_ids: tuple[int, ...]) -> SamplingConfig:
    """Returns the distribution of held-out rollouts."""
    val = config.rollout.val_kwargs
    return replace(
        training_sampling(config, eos_ids),
        n=val.n,
        temperature=val.temperature or 1.0,
        top_k=val.top_k,
        top_p=val.top_p,
        min_p=val.min_p,
        greedy=val.greedy,
        return_kept_tokens=False,
    )
