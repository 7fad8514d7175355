"""The distillation's loss beside an algorithm's, and in its place."""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms._distillation import Distillation
from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, DistillationLossConfig, RolloutConfig, RolloutCorrectionConfig
from tests.megatron.actors import make_batch

EXACT = 1e-12  # float64
TASK = build(AlgorithmConfig(name="grpo"), RolloutConfig(n=2))


def losses(config, *compared, task=TASK):
    """Total, metrics and the gradient of the log-probabilities, float64."""
    batch = make_batch(6)
    for name in ("rollout_logprobs_R", "advantages_R", "weights_R", "metric_weights_R"):
        setattr(batch, name, getattr(batch, name).double())
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(2, batch.response_mask_R.numel(), generator=generator, dtype=torch.float64)
    batch.teacher_logprobs_R = batch.rollout_logprobs_R + noise[0]
    logprobs = (batch.rollout_logprobs_R + 0.1 * noise[1]).requires_grad_()
    batch.proximal_logprobs_R = (batch.rollout_logprobs_R + 0.2 * noise[0]) if task.needs_proximal else None
    total, metrics = Distillation(config).training_loss(task)(logprobs, noise[0].exp(), *compared, batch)
    total.backward()
    alone = logprobs.detach().clone().requires_grad_()
    value, _ = task.loss(alone, noise[0].exp(), batch)
    value.backward()
    return total.detach(), metrics, logprobs.grad, (value.detach(), alone.grad), batch


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


CORRECTED = {
    "tests": {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.15"},
    "weights": {"rollout_is": "token", "rollout_is_threshold": "1.1"},
    "both": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01", "rollout_is": "sequence"},
}


@pytest.mark.parametrize("correction", CORRECTED)
@pytest.mark.parametrize("mode", ["k1", "k3", "reverse_kl"])
def test_a_decoupled_correction_rejects_and_weighs_as_in_verl(mode, correction):
    """What is rejected leaves every mode; weights multiply the policy gradient's surrogate."""
    gradient = mode == "k1"
    config = DistillationLossConfig(loss_mode=mode, use_policy_gradient=gradient, use_task_rewards=False)
    section = RolloutCorrectionConfig(bypass_mode=False, **CORRECTED[correction])
    task = build(AlgorithmConfig(name="grpo", rollout_correction=section), RolloutConfig(n=2))
    plain = build(
        AlgorithmConfig(name="grpo", rollout_correction=RolloutCorrectionConfig(bypass_mode=False)), RolloutConfig(n=2)
    )
    compared = [] if mode != "reverse_kl" else [torch.rand(make_batch(6).response_mask_R.shape, dtype=torch.float64)]
    compared = [each.requires_grad_() for each in compared]
    _, _, gradient_R, _, batch = losses(config, *compared, task=task)
    found_R = compared[0].grad.clone() if compared else gradient_R
    if compared:
        compared[0].grad = None
    _, _, whole_R, _, _ = losses(config, *compared, task=plain)
    whole_R = compared[0].grad if compared else whole_R
    corrected = task.correction.for_microbatch(batch, batch.proximal_logprobs_R)
    factor_R = torch.ones_like(found_R)
    if corrected.kept_R is not None:
        assert 0 < corrected.kept_R[batch.response_mask_R].double().mean() < 1
        factor_R = factor_R * corrected.kept_R
    if gradient and corrected.weights_R is not None:
        factor_R = factor_R * corrected.weights_R
    torch.testing.assert_close(found_R, whole_R * factor_R, rtol=EXACT, atol=EXACT)


def test_in_bypass_mode_the_ratio_is_the_weight():
    """Tests reject by the policy in training; `rollout_is` belongs to the algorithm's own loss."""
    section = RolloutCorrectionConfig(loss_type="reinforce", bypass_mode=True, rollout_is="token")
    task = build(AlgorithmConfig(name="grpo", rollout_correction=section), RolloutConfig(n=2))
    config = DistillationLossConfig(loss_mode="k1", use_policy_gradient=True, use_task_rewards=False)
    total, _, gradient, _, _ = losses(config, task=task)
    same, _, plain, _, _ = losses(config)
    assert torch.equal(total, same) and torch.equal(gradient, plain)
