"""Mismatch metrics against torch's own mean, std and corrcoef, whole and in parts."""

import pytest
import torch

from mrl.algorithms.functional.train_infer_mismatch import mismatch_metrics, mismatch_sums

ONE_PASS = 1e-9  # fp64 variances from sums of squares, 500 numbers below 1
FP32_RATIO = 1e-6  # the log-ratios behind the KLs are fp32
FP32_K3 = 1e-4  # k3 of a log-ratio of 0.05 is 1e-3: what is left of fp32 after the cancellation


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout_R = -torch.rand(500, generator=generator) * 4
    actor_R = (rollout_R + 0.05 * torch.randn(500, generator=generator)).clamp(max=0)
    return rollout_R, actor_R, torch.rand(500, generator=generator) > 0.2


def test_metrics_agree_with_torch() -> None:
    rollout_R, actor_R, mask_R = _batch()
    p, q = rollout_R[mask_R].double().exp(), actor_R[mask_R].double().exp()
    d = (actor_R - rollout_R)[mask_R].double()
    got = mismatch_metrics(*mismatch_sums(rollout_R, actor_R, mask_R))
    diff = (p - q).abs()
    assert got["training/rollout_probs_diff_valid"] == 1.0
    assert got["training/rollout_probs_diff_mean"] == pytest.approx(diff.mean().item(), rel=ONE_PASS)
    assert got["training/rollout_probs_diff_max"] == diff.max().item()
    assert got["training/rollout_probs_diff_std"] == pytest.approx(diff.std().item(), rel=ONE_PASS)
    corr = torch.corrcoef(torch.stack([p, q]))[0, 1].item()
    assert got["training/rollout_actor_probs_pearson_corr"] == pytest.approx(corr, rel=ONE_PASS)
    assert got["rollout_corr/kl"] == pytest.approx(-d.mean().item(), rel=FP32_RATIO, abs=FP32_RATIO)
    assert got["rollout_corr/k3_kl"] == pytest.approx((d.exp() - 1 - d).mean().item(), rel=FP32_K3)


def test_parts_add_up() -> None:
    batch = _batch()
    whole, largest = mismatch_sums(*batch)
    parts = [mismatch_sums(*(tensor[part] for tensor in batch)) for part in (slice(0, 100), slice(100, 500))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole, rtol=ONE_PASS, atol=0)
    assert torch.maximum(parts[0][1], parts[1][1]) == largest


def test_equal_constant_and_empty_are_defined() -> None:
    mask_R = torch.ones(7, dtype=torch.bool)
    same = torch.tensor([-0.3, -0.1, -2.0, -1.0, -0.7, -3.0, -0.2])
    equal = mismatch_metrics(*mismatch_sums(same, same, mask_R))
    assert equal["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    assert equal["training/rollout_probs_diff_std"] == 0.0
    corr = "training/rollout_actor_probs_pearson_corr"
    for level in torch.arange(-2, 0, 0.05).tolist():  # a constant's sums of squares round to either side of 0
        constant = torch.full((7,), level)
        assert mismatch_metrics(*mismatch_sums(constant, constant, mask_R))[corr] == 1
        assert mismatch_metrics(*mismatch_sums(constant, same, mask_R))[corr] == 0
        assert mismatch_metrics(*mismatch_sums(same, constant, mask_R))[corr] == 0
    empty = mismatch_metrics(*mismatch_sums(same, same, ~mask_R))
    assert empty["training/rollout_probs_diff_valid"] == 0.0
    assert all(value == value for value in empty.values())  # no NaN
