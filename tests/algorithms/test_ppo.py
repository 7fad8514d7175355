"""PPO's advantages and returns are verl's on its golden data; VAPO's lambdas; what a masked or charged token gets."""

import pytest
import torch

from mrl.algorithms._critic import ValueObjective
from mrl.algorithms.base import build
from mrl.algorithms.functional.gae import gae
from mrl.config.config import AlgorithmConfig, CriticConfig, OverlongConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.types import RolloutBatch
from tests.algorithms.ragged import alone

FP32 = 3e-6  # values, returns and advantages are kept in fp32; verl's were printed to six decimals
LENS = torch.tensor([5, 3, 4])
ROW = torch.arange(3).repeat_interleave(LENS)
COLUMN = torch.cat([torch.arange(int(length)) for length in LENS])
SCORES = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)


def golden():
    num = ROW.numel()
    return RolloutBatch(
        tokens_P=torch.zeros(num + 3, dtype=torch.int64),
        prompt_lens_B=torch.ones(3, dtype=torch.int64),
        response_lens_B=LENS,
        response_mask_R=torch.ones(num, dtype=torch.bool),
        rollout_logprobs_R=-torch.ones(num),
        group_id_B=torch.arange(3),
        rewards_B=SCORES.float(),
        truncated_B=torch.tensor([False, True, False]),
        values_R=(0.5 + 0.2 * torch.cos(1.0 + ROW + COLUMN.double())).float(),
    )


def made(batch, **settings):
    build(AlgorithmConfig(**{"name": "ppo", **settings}), RolloutConfig(n=1)).advantages(batch, SCORES, alone)
    return batch


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 0.95, [-0.003393, 0.540125, 0.909763, 0.817149, 0.401612], [0.89022, 0.915138, 0.947408, 0.977837, 1.0]),
        (0.99, 0.95, [-0.059471, 0.512728, 0.909723, 0.838175, 0.440055], [0.856196, 0.888427, 0.928738, 0.968058, 1]),
    ],
)
def test_advantages_and_returns_are_verls(gamma, lam, advantages, returns):
    batch = made(golden(), gamma=gamma, lam=lam)
    torch.testing.assert_close(batch.advantages_R[:5], torch.tensor(advantages), rtol=0, atol=FP32)
    torch.testing.assert_close(batch.returns_R[:5], torch.tensor(returns, dtype=torch.float32), rtol=0, atol=FP32)


def test_the_reward_is_that_of_the_last_trained_token():
    """Behind it a tool's answer; of a truncated response nothing is trained."""
    batch = golden()
    batch.response_mask_R[4] = False
    made(batch, overlong=OverlongConfig(mask_truncated=True))
    assert batch.returns_R.tolist() == pytest.approx([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1], abs=FP32)
    assert batch.advantages_R[[4, 5, 6, 7]].tolist() == [0.0] * 4


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_tokens_that_a_correction_rejects_are_skipped_as_in_verl(denominator):
    """verl's own numbers, with the rejected tokens out of its mask; a whole response is among them."""
    batch, rejected = golden(), [1, 2, 5, 6, 7, 8]
    batch.proximal_logprobs_R = batch.rollout_logprobs_R.clone()
    batch.proximal_logprobs_R[rejected] += 0.5
    behind = RolloutCorrectionConfig(
        bypass_mode=False, rollout_rs="token_k2", rollout_rs_threshold="0.1", rollout_rs_denominator=denominator
    )
    made(batch, gamma=0.99, lam=0.95, rollout_correction=behind)
    expected = [-1.00313, 0, 0, 1.259782, -0.005642, 0, 0, 0, 0, 1.066597, -0.211049, -1.106559]
    returns = [0.928738, 0, 0, 0.968058, 1, 0, 0, 0, 0, 0.944316, 0.974756, 1]
    torch.testing.assert_close(batch.advantages_R, torch.tensor(expected), rtol=0, atol=FP32)
    torch.testing.assert_close(batch.returns_R, torch.tensor(returns), rtol=0, atol=FP32)
    assert (~batch.valued_R).nonzero().flatten().tolist() == rejected

    critic = ValueObjective(CriticConfig(), RolloutConfig(n=1))
    critic.weigh(batch, alone)
    values_R = batch.values_R.clone().requires_grad_()
    loss, metrics = critic.loss(values_R, batch)
    loss.backward()
    assert not values_R.grad[rejected].any()
    error_R = (batch.values_R - batch.returns_R)[batch.valued_R]
    assert metrics["critic/vf_loss"].item() == pytest.approx(0.5 * error_R.square().mean().item(), rel=FP32 * 10)


def test_a_kl_in_the_reward_is_charged_to_its_token_and_those_before():
    batch = golden()
    batch.ref_logprobs_R = batch.rollout_logprobs_R.clone()
    batch.ref_logprobs_R[2] -= 0.5  # k1 = 0.5
    made(batch, kl_in="reward", kl_estimator="k1", kl_coef=0.2)
    assert batch.returns_R[:5].tolist() == pytest.approx([0.9, 0.9, 0.9, 1.0, 1.0], abs=FP32)


def test_vapo_learns_monte_carlo_returns_and_has_a_lambda_for_each_length():
    batch = made(golden(), name="vapo", lam_length_alpha=0.5, advantage_std="none")
    assert batch.returns_R.tolist() == pytest.approx(SCORES[ROW].tolist(), abs=FP32)
    rewards_R = torch.where(LENS[ROW] - 1 == COLUMN, SCORES[ROW], 0.0)
    lam_B = torch.tensor([1 - 1 / 2.5, 1 - 1 / 1.5, 0.5], dtype=torch.float64)
    expected_R = gae(rewards_R, golden().values_R, golden().response_mask_R, LENS, gamma=1.0, lam_B=lam_B)
    torch.testing.assert_close(batch.advantages_R, (expected_R - expected_R.mean()).float(), rtol=0, atol=FP32)
