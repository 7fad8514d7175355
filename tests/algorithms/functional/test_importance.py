"""Ratios: their clamp, their gradient."""

import math

import pytest
import torch

from mrl.algorithms.functional.importance import MAX_LOG_RATIO, log_ratio


def test_log_ratio_is_clamped_and_the_clamped_token_gets_no_gradient() -> None:
    logprobs_R = torch.tensor([-1.0, -0.5, -float("inf"), -1e4], requires_grad=True)
    old_R = torch.tensor([-1.5, -100.0, -1.0, -1.0])
    got_R = log_ratio(logprobs_R, old_R)
    assert got_R.tolist() == [0.5, MAX_LOG_RATIO, -MAX_LOG_RATIO, -MAX_LOG_RATIO]
    got_R.exp().sum().backward()
    assert logprobs_R.grad is not None
    assert torch.isfinite(logprobs_R.grad).all()
    assert logprobs_R.grad.tolist()[1:] == [0.0, 0.0, 0.0]
    assert logprobs_R.grad[0].item() == pytest.approx(math.exp(0.5))


def test_log_ratio_is_fp32_and_treats_the_denominator_as_a_constant() -> None:
    logprobs_R = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    old_R = torch.tensor([-2.0], dtype=torch.bfloat16, requires_grad=True)
    got_R = log_ratio(logprobs_R, old_R)
    assert got_R.dtype == torch.float32
    got_R.sum().backward()
    assert old_R.grad is None


def test_log_ratio_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match="one entry for each response token"):
        log_ratio(torch.zeros(3), torch.zeros(1))
