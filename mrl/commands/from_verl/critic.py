"""Translates verl's `critic.*`, and gamma and lambda of GAE; verl reads these only with `adv_estimator=gae`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.translated_keys import ACTOR, ROOT

SCHEDULES = ("constant", "linear", "cosine")


def critic(verl: VerlRun, warmup: Callable[..., int]) -> Iterator[tuple[str, Any]]:
    """Yields keys of mrl and their values.

    Args:
        verl: Settings of the run.
        warmup: Function (section, epochs) -> optimizer steps of warm-up.
    """
    for name in ("gamma", "lam"):
        yield f"algorithm.{name}", verl[f"algorithm.{name}"]
    # verl already trains the actor in step critic_warmup itself
    yield "train.critic_warmup", max(0, verl["trainer.critic_warmup"] - 1)
    path = verl.given.get("critic.model.path")
    yield "critic.path", None if path == verl[f"{ROOT}model.path"] else path
    epochs = verl["critic.ppo_epochs"]
    yield "critic.ppo_epochs", epochs
    yield "critic.cliprange_value", verl["critic.cliprange_value"]
    mode = verl["critic.loss_agg_mode"] or verl[f"{ACTOR}loss_agg_mode"]
    yield "critic.loss_aggregation", mode.replace("-", "_")
    rate = verl["critic.optim.lr"]
    yield "critic.lr", rate
    yield "critic.weight_decay", verl["critic.optim.weight_decay"]
    yield from zip(("critic.adam_beta1", "critic.adam_beta2"), verl["critic.optim.betas"], strict=False)
    yield "critic.adam_eps", verl["critic.optim.eps"]
    own = "critic.optim.clip_grad"
    yield "critic.clip_grad", verl[own if verl.megatron or own in verl.given else "critic.grad_clip"]
    style = "lr_decay_style" if verl.megatron else "lr_scheduler_type"
    schedule = verl.one_of(f"critic.optim.{style}", SCHEDULES, "constant")
    yield "critic.lr_schedule", schedule
    if schedule != "constant":
        least = verl["critic.optim.min_lr"] if verl.megatron else rate * (verl["critic.optim.min_lr_ratio"] or 0.0)
        yield "critic.min_lr", least
    yield "critic.lr_warmup_steps", warmup("critic.", epochs or verl[f"{ACTOR}ppo_epochs"])
    for name in ("param_offload", "optimizer_offload"):
        yield f"critic.{name}", verl[f"critic.{'megatron' if verl.megatron else 'fsdp'}.{name}"]
    size = verl.given.get("critic.ppo_mini_batch_size")
    if isinstance(size, int) and size != verl[f"{ACTOR}ppo_mini_batch_size"]:
        verl.notes["critic.ppo_mini_batch_size"] = "the critic has the actor's minibatches"
