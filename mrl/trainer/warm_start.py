"""Setup of the supervised warm start: algorithm, learning rate and prompts. The loop is in `train.py`."""

from __future__ import annotations

from mrl.algorithms import base as algorithms
from mrl.algorithms.base import Algorithm
from mrl.config.config import AlgorithmConfig
from mrl.data.prompts import PromptSource, load_training
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.trainer.learning_rate import warm_start_learning_rate
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.trainer import Trainer
from mrl.trainer.training_state import malformed_state_is_user_error


def begin_warm_start(trainer: Trainer) -> tuple[Algorithm, PromptSource, int]:
    """Collective over the job: returns the SFT algorithm, the training prompts in another order, and the steps done."""
    config, rollout, rate = trainer.config, trainer.config.rollout, warm_start_learning_rate(trainer.config)
    sft = algorithms.build(AlgorithmConfig(name="sft"), rollout)
    seed = config.run.seed + 1
    source = load_training(
        config.data, trainer.tokenizer, prompt_length=rollout.prompt_length, seed=seed, tools=trainer.tools
    )
    standing = trainer.progress.last_state
    if standing is None:
        with on_trainers(trainer.groups) as here:
            if here:
                trainer.actor.start_optimizer(rate)
        return sft, source, 0
    saved = standing.state["warm_start"]
    with on_trainers(trainer.groups) as here:
        if here:
            trainer.actor.set_lr_schedule(rate)
    with raise_on_all_ranks(), malformed_state_is_user_error(trainer.checkpointing.checkpoints.path(0)):
        source.load_state_dict(saved["source"])
    trainer.log.warm_start_resumed(saved["step"])
    return sft, source, int(saved["step"])
