"""A step runs the actor forward no more often than its losses need: by counting the runs of its schedule."""

import pytest

from mrl.config.config import load
from mrl.megatron.forward_backward import ForwardBackward
from mrl.train import run_step
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from tests.observed import CONFIG

KL = "algorithm.kl_in=loss"
ONE = "train.minibatch_size=4"
DECOUPLED = "algorithm.rollout_correction.bypass_mode=false"
REJECTS = "algorithm.rollout_correction.preset=decoupled_seq_is_rs"
KEPT = "algorithm.rollout_correction.rollout_rs_denominator=kept"
NORMALIZED = "algorithm.rollout_correction.rollout_is_batch_normalize=true"
TWICE = "actor.ppo_epochs=2"
CHOOSES = "algorithm.top_entropy_quantile=0.5"
PPO = "algorithm.name=ppo"
RENEWED = "reference.update_interval=1"

CASES = {
    "nothing asked": ([ONE], [0, 0]),
    "decoupled, one update": ([ONE, DECOUPLED], [0, 0]),
    "decoupled, one minibatch twice": ([ONE, DECOUPLED, TWICE], [0, 0]),
    "decoupled, two minibatches": ([DECOUPLED], [1, 1]),
    "rejected tokens count": ([ONE, REJECTS], [0, 0]),
    "rejected tokens do not count": ([ONE, REJECTS, KEPT], [1, 1]),
    "weights over their mean": ([ONE, REJECTS, NORMALIZED], [1, 1]),
    "the critic skips what is rejected": ([ONE, PPO, "rollout.n=1", REJECTS], [2, 2]),
    "tokens chosen at the weights before": ([ONE, DECOUPLED, CHOOSES], [1, 1]),
    "reference": ([ONE, KL], [0, 1]),
    "reference, two minibatches": ([KL], [1, 1]),
    "reference, decoupled": ([ONE, KL, DECOUPLED], [0, 1]),
    "reference, decoupled, two minibatches": ([KL, DECOUPLED], [1, 2]),
    "reference, tokens chosen": ([ONE, KL, CHOOSES], [1, 2]),
    "reference renewed in each step": ([ONE, KL, RENEWED], [0, 0]),
    "reference renewed, two minibatches": ([KL, DECOUPLED, RENEWED], [1, 1]),
    "KL in the reward": ([ONE, "algorithm.name=reinforce_pp", "algorithm.kl_in=reward"], [1, 1]),
    "no update yet": ([ONE, PPO, "rollout.n=1", KL, DECOUPLED, "train.critic_warmup=1"], [1, 1]),
}
"""Overrides, and passes without a backward in the first steps; one of PPO's is the critic's."""


@pytest.mark.parametrize("case", CASES)
def test_no_pass_is_made_twice(case, tmp_path, monkeypatch):
    overrides, expected = CASES[case]
    run, ran = ForwardBackward.run, []

    def counted(self, *args, backward, **more):
        ran.append(backward)
        return run(self, *args, backward=backward, **more)

    monkeypatch.setattr(ForwardBackward, "run", counted)
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = load(tmp_path / "config.yaml", [f"run.output_dir={tmp_path}/run", "train.num_steps=2", *overrides])
    passes = []
    with open_trainer(build_run_plan(config), log=False) as trainer:
        trainer.resume()
        trainer.init_reference_and_critic(0)
        for step in (1, 2):
            ran.clear()
            with trainer.progress.step(step):
                run_step(trainer, step)
            passes.append(ran.count(False))
    assert passes == expected
