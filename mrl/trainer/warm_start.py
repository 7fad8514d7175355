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
from mrl.trainer.training_state import not_of_a_run


def begin_warm_start(job: Trainer) -> tuple[Algorithm, PromptSource, int]:
    """Collective over the job: returns the SFT algorithm, the training prompts in another order, and the steps done."""
    config, rollout, rate = job.config, job.config.rollout, warm_start_learning_rate(job.config)
    sft = algorithms.build(AlgorithmConfig(name="sft"), rollout)
    seed = config.run.seed + 1
    source = load_training(config.data, job.tokenizer, prompt_length=rollout.prompt_length, seed=seed, tools=job.tools)
    standing = job.progress.standing
    if standing is None:
        with on_trainers(job.groups) as here:
            if here:
                job.policy.start_optimizer(rate)
        return sft, source, 0
    saved = standing.state["warm_start"]
    with on_trainers(job.groups) as here:
        if here:
            job.policy.follow(rate)
    with raise_on_all_ranks(), not_of_a_run(job.commits.checkpoints.path(0)):
        source.load_state_dict(saved["source"])
    job.log.warm_start_resumed(saved["step"])
    return sft, source, int(saved["step"])
