"""The distillation's loss beside an algorithm's, and in its place."""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms._distillation import Distillation
from mrl.algorithms.base import build
from mrl.config import AlgorithmConfig, RolloutConfig
from mrl.schema.distillation import DistillationLossConfig
from tests.megatron.actors import make_batch

EXACT = 1e-12  # float64
TASK = build(AlgorithmConfig(name="grpo"), RolloutConfig(n=2))


def losses(config, *compared):
    """Total, metrics and the gradient of the log-probabilities, float64."""
    batch = make_batch(6)
    for name in ("rollout_logprobs_R", "advantages_R", "weights_R", "metric_weights_R"):
        setattr(batch, name, getattr(batch, name).double())
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, batch.response_mask_R.numel(), generator=generator, dtype=torch.float64)
    batch.teacher_logprobs_R = batch.rollout_logprobs_R + noise[0]
    logprobs = (batch.rollout_logprobs_R + 0.1 * noise[1]).requires_grad_()
    total, metrics = Distillation(config).beside(TASK.loss)(logprobs, noise[0].exp(), *compared, batch)
    total.backward()
    task = logprobs.detach().clone().requires_grad_()
    value, _ = TASK.loss(task, noise[0].exp(), batch)
    value.backward()
    return total.detach(), metrics, logprobs.grad, (value.detach(), task.grad), batch


@pytest.mark.parametrize("mode", ["k2", "k3", "abs"])
def test_beside_the_task_it_is_added_with_its_coefficient(mode):
    alone = DistillationLossConfig(loss_mode=mode, use_task_rewards=False)
    drawn, metrics, gradient, (task, of_task), batch = losses(alone)
    assert float(drawn) == pytest.approx(float(metrics["distillation/loss"]), rel=EXACT)
    assert not gradient[~batch.response_mask_R].any()
    total, metrics, both, _, _ = losses(replace(alone, use_task_rewards=True, distillation_loss_coef=0.3))
    torch.testing.assert_close(total, task + 0.3 * drawn, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(both, of_task + 0.3 * gradient, rtol=EXACT, atol=EXACT)
    assert float(metrics["actor/loss"]) == pytest.approx(float(total), rel=EXACT)


def test_the_policy_gradient_of_k1_on_policy_is_that_of_its_value():
    """sum of w d (grad log pi), whatever the task's loss is."""
    config = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    wide = replace(config, clip_ratio_low=1.0, clip_ratio_high=100.0)
    _, metrics, gradient, _, batch = losses(wide)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, batch.response_mask_R.numel(), generator=generator, dtype=torch.float64)
    d = 0.1 * noise[1] - noise[0]
    ratio = (0.1 * noise[1]).exp()
    bounded = (d > 0) & (ratio > 3.0)
    expected = torch.where(batch.response_mask_R & ~bounded, batch.weights_R * d * ratio, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=EXACT, atol=EXACT)
    assert metrics["distillation/pg_clipfrac"] == 0


def test_what_a_token_that_is_not_trained_holds_is_not_read():
    config = DistillationLossConfig(loss_mode="reverse_kl", use_task_rewards=False, loss_max_clamp=0.5)
    mask = make_batch(6).response_mask_R
    divergence = torch.where(mask, torch.linspace(0, 1, mask.numel(), dtype=torch.float64), torch.nan).requires_grad_()
    total, metrics, _, _, batch = losses(config, divergence)
    kept = divergence.detach()[mask]
    torch.testing.assert_close(total, (batch.weights_R[mask] * kept.clamp(max=0.5)).sum(), rtol=EXACT, atol=EXACT)
    assert metrics["distillation/loss_max"] == kept.max() and metrics["distillation/loss_min"] == kept.min()
    assert torch.equal(divergence.grad, torch.where(mask & (divergence <= 0.5), batch.weights_R, 0.0))
