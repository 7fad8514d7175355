"""KL estimators: values by hand, sign, clamps, and what their gradients estimate."""

import json
import math
from pathlib import Path

import pytest
import torch

from mrl.algorithms.functional.kl import MAX_K3, kl_penalty
from tests.algorithms.functional import verl_losses
from tests.algorithms.functional.verl_losses import KL, SPREADS, rows

GOLDEN = json.loads((Path(verl_losses.__file__).with_suffix(".json")).read_text(encoding="utf-8"))
VERL = 1e-9  # fp64 on both sides
FP64_SUM = 1e-6  # the estimators are fp32; the enumerated vocabularies have 8 terms of order 1


def test_estimators_by_hand() -> None:
    # d = log pi - log pi_ref = [0.5, -0.5]; k1 = d; k2 = d^2 / 2; k3 = e^-d - 1 + d
    logprobs_R, ref_R = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5])
    torch.testing.assert_close(kl_penalty(logprobs_R, ref_R, "k1"), torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(kl_penalty(logprobs_R, ref_R, "k2"), torch.tensor([0.125, 0.125]))
    want_R = torch.tensor([math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])
    torch.testing.assert_close(kl_penalty(logprobs_R, ref_R, "k3"), want_R)


def test_k2_and_k3_are_never_negative_and_zero_at_equality() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs_R = -torch.rand(1000, generator=generator) * 5
    ref_R = logprobs_R + torch.randn(1000, generator=generator) * torch.logspace(-6, 1, 1000)
    for estimator in ("k2", "k3"):
        assert (kl_penalty(logprobs_R, ref_R, estimator) >= 0).all()
        assert (kl_penalty(logprobs_R, logprobs_R, estimator) == 0).all()


@pytest.mark.parametrize("estimator", [*KL, "k2"])
def test_a_broken_token_stays_finite_without_gradient(estimator: str) -> None:
    logprobs_R = torch.tensor([-1e4, -1.0], requires_grad=True)
    kl_R = kl_penalty(logprobs_R, torch.tensor([-1.0, -1e4]), estimator)  # type: ignore[arg-type]
    assert torch.isfinite(kl_R).all()
    kl_R.sum().backward()
    assert logprobs_R.grad is not None
    assert logprobs_R.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("estimator", KL)
def test_value_and_gradient_are_those_of_verl(estimator: str, spread: str) -> None:
    old, new, _, mask = rows(spread)
    logprobs = new.clone().requires_grad_()
    value = (kl_penalty(logprobs, old, estimator) * mask).sum() / mask.sum()  # type: ignore[arg-type]
    value.backward()
    want = GOLDEN[spread][f"kl {estimator}"]
    assert value.item() == pytest.approx(want["loss"], abs=VERL)
    torch.testing.assert_close(logprobs.grad, torch.tensor(want["grad"], dtype=torch.float64), rtol=0, atol=VERL)


def test_k3_is_clamped_as_documented() -> None:
    kl_R = kl_penalty(torch.tensor([-10.0, -1.0]), torch.tensor([-1.0, -13.0]), "k3")
    assert kl_R[0] == MAX_K3  # e^9 - 10 is above it
    assert kl_R[1] == MAX_K3  # e^-12 - 1 + 12 is above it


def _expected_gradient(estimator: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E_pi[d estimator / d logits] over a whole vocabulary, and the gradients of KL(pi || ref) and KL(ref || pi)."""
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    ref_V = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    value = (logprobs_V.detach().exp() * kl_penalty(logprobs_V, ref_V, estimator)).sum()  # type: ignore[arg-type]
    (got_V,) = torch.autograd.grad(value, logits_V, retain_graph=True)
    reverse = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    (reverse_V,) = torch.autograd.grad(reverse, logits_V, retain_graph=True)
    forward = (ref_V.exp() * (ref_V - logprobs_V)).sum()
    (forward_V,) = torch.autograd.grad(forward, logits_V)
    return got_V, reverse_V, forward_V


def test_gradients_in_a_loss_are_the_documented_ones() -> None:
    k1_V, _, _ = _expected_gradient("k1")
    torch.testing.assert_close(k1_V, torch.zeros_like(k1_V), rtol=0, atol=FP64_SUM)
    k2_V, reverse_V, _ = _expected_gradient("k2")
    torch.testing.assert_close(k2_V, reverse_V, rtol=FP64_SUM, atol=FP64_SUM)
    for estimator in ("k1+", "k3+"):
        got_V, _, _ = _expected_gradient(estimator)
        torch.testing.assert_close(got_V, reverse_V, rtol=FP64_SUM, atol=FP64_SUM)
    k3_V, _, forward_V = _expected_gradient("k3")
    torch.testing.assert_close(k3_V, forward_V, rtol=FP64_SUM, atol=FP64_SUM)


def test_k1_and_k3_are_unbiased_values() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs_V = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    ref_V = torch.randn(8, generator=generator, dtype=torch.float64).log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - ref_V)).sum().item()
    for estimator in ("k1", "k3"):
        mean = (logprobs_V.exp() * kl_penalty(logprobs_V, ref_V, estimator)).sum().item()
        assert mean == pytest.approx(exact, abs=FP64_SUM)


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]
