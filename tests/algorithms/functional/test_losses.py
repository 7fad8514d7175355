"""The clipped surrogate: goldens by hand, limits, and its gradient."""

import math

import pytest
import torch

from mrl.algorithms.functional.losses import clipped_surrogate

OLD = -1.0


def _surrogate(ratios: list[float], advantages: list[float], dual_clip: float = 0.0):
    logprobs_R = torch.tensor([OLD + math.log(ratio) for ratio in ratios], requires_grad=True)
    old_R = torch.full((len(ratios),), OLD)
    out = clipped_surrogate(
        logprobs_R, old_R, torch.tensor(advantages), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    (grad_R,) = torch.autograd.grad(out.loss_R.sum(), logprobs_R)
    return out, grad_R


def test_clipped_surrogate_by_hand() -> None:
    # max(-r A, -clip(r, 0.8, 1.28) A), and where the clip wins there is no gradient; else d/dlogp = -r A
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 1.25]
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, 2.0]
    out, grad_R = _surrogate(ratios, advantages)
    torch.testing.assert_close(out.loss_R, torch.tensor([-2.0, -2.56, -1.0, 3.0, 1.6, -2.5]))
    torch.testing.assert_close(grad_R, torch.tensor([-2.0, 0.0, -1.0, 3.0, 0.0, -2.5]))
    assert out.clipped_R.tolist() == [0, 1, 0, 0, 1, 0]
    assert out.clipped_lower_R.tolist() == [0] * 6
    torch.testing.assert_close(out.ratio_R, torch.tensor(ratios))


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    # A = -2, c = 3: the loss is at most 6
    out, grad_R = _surrogate([2.9, 5.0, 5.0, 0.1], [-2.0, -2.0, 2.0, -2.0], dual_clip=3.0)
    torch.testing.assert_close(out.loss_R, torch.tensor([5.8, 6.0, -2.56, 1.6]))
    torch.testing.assert_close(grad_R, torch.tensor([5.8, 0.0, 0.0, 0.0]))
    assert out.clipped_lower_R.tolist() == [0, 1, 0, 0]


def test_at_ratio_one_the_gradient_is_reinforce() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_R = (-torch.rand(64, generator=generator)).requires_grad_()
    advantages_R = torch.randn(64, generator=generator)
    out = clipped_surrogate(logprobs_R, logprobs_R, advantages_R, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    (grad_R,) = torch.autograd.grad(out.loss_R.sum(), logprobs_R)
    assert torch.equal(grad_R, -advantages_R)
    assert out.clipped_R.sum() == 0


def test_one_broken_token_gives_neither_inf_nor_gradient() -> None:
    logprobs_R = torch.tensor([-1.0, -1.0, -1e5], requires_grad=True)
    old_R = torch.tensor([-1e5, -1e5, -1.0])
    out = clipped_surrogate(logprobs_R, old_R, torch.tensor([1.0, -1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    out.loss_R.sum().backward()
    assert torch.isfinite(out.loss_R).all()
    assert logprobs_R.grad is not None
    assert logprobs_R.grad.tolist() == [0.0, 0.0, 0.0]


def test_advantages_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="advantages have shape"):
        clipped_surrogate(torch.zeros(3), torch.zeros(3), torch.zeros(1), clip_low=0.2, clip_high=0.2)
