"""Every objective, from rewards to the gradient, is the same at every layout: real ranks, one start for all of them.

Ratios are a token's own and far from every bound, so that rounding moves no token over one: the log-probabilities that
sampled are the actor's own plus fixed distances.
"""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms.base import build
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.config.config import AlgorithmConfig, KlCtrlConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.distributed.collectives import all_reduce_sum
from mrl.parallel_layout import ParallelLayout
from mrl.types import RolloutBatch
from tests.algorithms.ragged import outcomes_of
from tests.algorithms.test_invariance import CONFIGS
from tests.algorithms.test_invariance import _id as words_of
from tests.megatron.actors import ARCHS, make_batch, make_policy, own_part
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

ARCH = replace(ARCHS["qwen2"], num_layers=2)
ROLLOUT = RolloutConfig(n=2, response_length=8)
STILL = LearningRate(0.0, 0.0, "constant", 0, 100)
"""No update changes a weight: each objective begins at the same ones."""
RELATIVE = 1e-4  # end to end; fp32 sums in another order give 1e-5
ABSOLUTE = 1e-5  # of what is zero but for rounding
LAYOUTS = {
    "dp2": ParallelLayout(2),
    "dp4": ParallelLayout(4),
    "tp2": ParallelLayout(2, tp=2),
    "pp2": ParallelLayout(2, pp=2),
    "cp2": ParallelLayout(2, cp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
}
ADAPTIVE = AlgorithmConfig(
    name="ppo", kl_in="reward", kl_coef=0.2, kl_ctrl=KlCtrlConfig("adaptive", target_kl=0.05, horizon=50)
)
BEHIND = RolloutCorrectionConfig(
    bypass_mode=False, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="1.3"
)
OBJECTIVES = {
    **{f"{number} {words_of(config)}": config for number, config in enumerate(CONFIGS)},
    "adaptive kl": ADAPTIVE,
    "ppo with rejected tokens": AlgorithmConfig(name="ppo", lam=0.9, rollout_correction=BEHIND),
}


def whole_batch() -> RolloutBatch:
    """The step's samples, without what the actor's own scores decide."""
    generator = torch.Generator().manual_seed(5)
    batch = make_batch(12)
    num, shape = batch.num_sequences, batch.response_mask_R.shape
    batch.rewards_B = torch.randint(0, 4, (num,), generator=generator).float()
    batch.truncated_B = torch.arange(num) % 5 == 4
    batch.correct_B = batch.rewards_B > 1
    batch.sample_index_B = torch.arange(num) % 2
    batch.values_R = torch.randn(shape, generator=generator)
    batch.advantages_R = batch.weights_R = batch.metric_weights_R = None
    for name, distances in (
        ("rollout_logprobs_R", [-0.6, -0.35, -0.13, 0.0, 0.11, 0.31, 0.55]),
        ("proximal_logprobs_R", [-0.17, 0.09, 0.33]),
        ("ref_logprobs_R", [-0.7, 0.0, 0.2, 0.4]),
    ):
        drawn_R = torch.randint(0, len(distances), shape, generator=generator)
        setattr(batch, name, torch.tensor(distances)[drawn_R])
    return batch


def numbers(grid):
    """Objective -> the metrics of one update, and the coefficient of the KL after it."""
    policy = make_policy(ARCH, grid)
    policy.start_optimizer(STILL)
    whole = whole_batch()
    reduce = lambda tensor: all_reduce_sum(tensor.double(), policy._groups.dp)  # noqa: E731
    found = {}
    for name, config in OBJECTIVES.items():
        algorithm = build(config, ROLLOUT)
        outcomes = outcomes_of(whole)
        outcomes = replace(outcomes, rewards_N=algorithm.shape_rewards(outcomes))
        of_sequence = dict(enumerate(algorithm.outcome_advantages(outcomes).tolist()))
        index = own_part(replace(whole, rewards_B=torch.arange(12.0)), policy).rewards_B.tolist()
        batch = replace(own_part(whole, policy))
        logprobs_R, entropy_R = policy.score(batch)
        for field in ("rollout_logprobs_R", "proximal_logprobs_R", "ref_logprobs_R"):
            setattr(batch, field, logprobs_R + getattr(batch, field))
        outcome_B = torch.tensor([of_sequence[int(row)] for row in index], dtype=torch.float64)
        algorithm.advantages(batch, outcome_B, reduce)
        if algorithm.needs_current:
            batch.current_logprobs_R, batch.current_entropy_R = logprobs_R, entropy_R
        algorithm.weigh(batch, reduce)
        found[name] = policy.update(batch, algorithm) | {"kl coefficient": algorithm.kl_control.coef}
    return found


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, numbers, ParallelLayout(1))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_objective_has_the_numbers_of_one_rank(layout, single):
    grid = LAYOUTS[layout]
    for found in run_ranks(grid.world_size, numbers, grid):
        for name, expected in single.items():
            assert found[name] == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), name


def test_the_objectives_are_told_apart(single):
    """What all of them shared would prove nothing."""
    assert all(metrics["actor/grad_norm"] > 0 for metrics in single.values())
    assert len({round(metrics["actor/grad_norm"], 6) for metrics in single.values()}) > len(single) * 3 / 4
    assert single["adaptive kl"]["kl coefficient"] != ADAPTIVE.kl_coef
