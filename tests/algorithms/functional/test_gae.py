"""GAE and the value loss against verl's values, the equations written out, and numerical gradients."""

import pytest
import torch

from mrl.algorithms.functional.advantages import whiten
from mrl.algorithms.functional.gae import gae, length_adaptive_lam, value_loss

VERL = 1e-9  # both fp64; verl adds 1e-8 to the count that a mean is divided by
LOSS = 1e-7  # errors of values are fp32
ROUNDING = 1e-12  # fp64 sums in another order
GRADIENT = 1e-6  # central differences in fp64 of an fp32 loss's equation
LENS = torch.tensor([5, 3, 4])
ROW = torch.arange(3).repeat_interleave(LENS)
COLUMN = torch.cat([torch.arange(int(length)) for length in LENS])
ALL = torch.ones(12, dtype=torch.bool)
SCORES = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
VALUES = 0.5 + 0.2 * torch.cos(1.0 + ROW + COLUMN.double())
REWARDS = torch.where(LENS[ROW] - 1 == COLUMN, SCORES[ROW], 0.0)

GOLDEN = {
    (1.0, 1.0): (
        [0.18901197277, 0.638997202651, 0.908977131331, 0.750733457458, 0.309754685012, -1.713376854294,
         -1.443396925614, -1.601640599487, 0.908977131331, 0.750733457458, 0.309754685012, -0.008525336297],
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
    ),
    (1.0, 0.95): (
        [-0.003393474289, 0.540125402202, 0.909763237571, 0.817148548629, 0.401611735358, -1.67835698294,
         -1.425481378369, -1.641003678676, 0.874828106089, 0.780374726017, 0.362902448398, 0.061481317136],
        [0.890219642901, 0.91513801186, 0.947408354553, 0.977836621855, 1.0, 0.032640460636, 0.018463563791, 0.0,
         0.93351139139, 0.963208239578, 0.984601702867, 1.0],
    ),
    (0.99, 0.95): (
        [-0.05947076573, 0.512728375745, 0.909722763602, 0.838174570994, 0.440055181949, -1.679308230469,
         -1.420991331257, -1.63999033582, 0.852560438483, 0.777395915897, 0.375431412575, 0.093692010978],
        [0.856195643574, 0.888426897667, 0.928737717579, 0.968058255636, 1.0, 0.032140406212, 0.018278928153, 0.0,
         0.906408105619, 0.944315978167, 0.974755685838, 1.0],
    ),
}  # fmt: skip
"""verl 0.9.1, `compute_gae_advantage_return` in fp64: whitened advantages and returns of the three rows."""
GAP = (
    [0.100871939343, 0.672365869637, 0.891988461777, 0.498581196087, -1.595697525392, -1.340438053492,
     -1.556844995592, 0.90620405878, 0.83192917918, 0.434722310768, 0.156317564178],
    [0.894107969701, 0.928737717579, 0.968058255636, 1.0, 0.032140406212, 0.018278928153, 0.0, 0.906408105619,
     0.944315978167, 0.974755685838, 1.0],
)  # fmt: skip
"""... with gamma 0.99 and lambda 0.95 where the third token of the first row is not trained, without it."""
CLIPPED = {
    0.5: (0.13322294223938, 0.0, [-0.002476490524, -0.01879817926, -0.050255904288, -0.069633841218, -0.060912070442,
        0.035538847873, 0.004708099025, 0.006799499452, -0.076598931092, -0.056480134434, -0.01923110718,
        -0.00092987239]),
    0.1: (0.14713214353860, 0.5, [0.0, 0.0, -0.050255904288, -0.069633841218, -0.060912070442, 0.035538847873, 0.0,
        0.0, -0.076598931092, -0.056480134434, 0.0, 0.0]),
}  # fmt: skip
"""verl 0.9.1, `compute_value_loss` by its clip: loss, part of the tokens whose clipped error counts, gradient."""


def alone(tensor):
    return tensor


@pytest.mark.parametrize(("gamma", "lam"), GOLDEN)
def test_gae_and_its_whitening_are_verls(gamma, lam):
    assert_verls(ALL, gamma, lam, GOLDEN[gamma, lam])


def test_gae_over_a_gap_is_verls():
    assert_verls((ROW != 0) | (COLUMN != 2), 0.99, 0.95, GAP)


def assert_verls(mask_R, gamma, lam, golden):
    lam_B = torch.full((3,), lam, dtype=torch.float64)
    advantages_R = gae(REWARDS, VALUES, mask_R, LENS, gamma=gamma, lam_B=lam_B)
    white_R = whiten(advantages_R, mask_R, alone, std="unbiased", eps=1e-8, under_root=True)
    whitened, returns = (torch.tensor(row, dtype=torch.float64) for row in golden)
    torch.testing.assert_close(white_R[mask_R], whitened, rtol=0, atol=VERL)
    torch.testing.assert_close((advantages_R + VALUES)[mask_R], returns, rtol=0, atol=VERL)


@pytest.mark.parametrize("clip", CLIPPED)
def test_the_value_loss_and_its_gradient_are_verls(clip):
    loss, clipped, gradient = CLIPPED[clip]
    returns_R = VALUES + gae(REWARDS, VALUES, ALL, LENS, gamma=1.0, lam_B=torch.full((3,), 0.95))
    new_R = (VALUES + 0.3 * torch.sin(1.0 + 2 * ROW + COLUMN.double())).requires_grad_()
    found = value_loss(new_R, VALUES, returns_R, clip=clip)
    assert found.loss_R.mean().item() == pytest.approx(loss, abs=LOSS)
    assert found.clipped_R.mean().item() == clipped
    (grad_R,) = torch.autograd.grad(found.loss_R.mean(), new_R)
    torch.testing.assert_close(grad_R, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=LOSS)


def value_loss_64(values_R, old_R, returns_R, clip):
    """The equation as verl has it, in fp64."""
    near_R = torch.max(torch.min(values_R, old_R + clip), old_R - clip)
    return 0.5 * torch.max((values_R - returns_R) ** 2, (near_R - returns_R) ** 2)


def test_the_gradient_of_the_value_loss_is_the_slope_of_its_equation():
    torch.manual_seed(0)
    old_R, returns_R = torch.randn(2, 200, dtype=torch.float64)
    values_R = (old_R + 0.5 * torch.randn(200, dtype=torch.float64)).float().requires_grad_()
    value_loss(values_R, old_R.float(), returns_R.float(), clip=0.2).loss_R.sum().backward()
    at, step = values_R.detach().double(), 1e-6
    old_R, returns_R = old_R.float().double(), returns_R.float().double()
    ends = [value_loss_64(at + sign * step, old_R, returns_R, 0.2) for sign in (1, -1)]
    torch.testing.assert_close(values_R.grad.double(), (ends[0] - ends[1]) / (2 * step), rtol=GRADIENT, atol=GRADIENT)
    assert 0 < (values_R.grad == 0).double().mean() < 1  # the clipped branch is flat


def gae_by_verls_loop(rewards, values, mask, gamma, lam):
    """One response: V and A are carried over tokens that are not trained."""
    following, last, found = 0.0, 0.0, []
    for reward, value, trained in zip(reversed(rewards), reversed(values), reversed(mask), strict=True):
        new = reward + gamma * following - value + gamma * lam * last
        following, last = (value, new) if trained else (following, last)
        found.append(last if trained else 0.0)
    return found[::-1]


def test_tokens_that_are_not_trained_are_skipped_and_sequences_have_their_own_lambda():
    torch.manual_seed(1)
    lens = [4, 1, 9, 3, 6]
    rewards_R, values_R = torch.randn(2, sum(lens), dtype=torch.float64)
    mask_R = torch.rand(sum(lens)) > 0.4
    mask_R[4] = False  # a response of which nothing is trained
    lam_B = torch.tensor([0.9, 0.5, 1.0, 0.0, 0.95], dtype=torch.float64)
    found_R = gae(rewards_R, values_R, mask_R, torch.tensor(lens), gamma=0.98, lam_B=lam_B)
    parts = [part.split(lens) for part in (rewards_R, values_R, mask_R)]
    expected = [
        value
        for *one, lam in zip(*parts, lam_B, strict=True)
        for value in gae_by_verls_loop(*(part.tolist() for part in one), 0.98, float(lam))
    ]
    assert 0 < mask_R.sum() < len(mask_R)
    torch.testing.assert_close(found_R, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=ROUNDING)
    assert gae(rewards_R[:0], values_R[:0], mask_R[:0], torch.tensor([]).long(), gamma=1, lam_B=lam_B[:0]).shape == (0,)


def test_the_lambda_of_a_length_sums_to_that_part_of_it():
    lens_B = torch.tensor([0, 1, 20, 40, 1000])
    lam_B = length_adaptive_lam(lens_B, 0.05)
    torch.testing.assert_close(lam_B, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.98], dtype=torch.float64))
    assert (1 / (1 - lam_B))[-1].item() == pytest.approx(0.05 * 1000)


def test_whitening_is_the_same_however_the_tokens_are_spread():
    torch.manual_seed(2)
    values_R = torch.randn(30, dtype=torch.float64) + 3
    mask_R = torch.rand(30) > 0.2
    whole_R = whiten(values_R, mask_R, alone, std="unbiased", eps=1e-2, under_root=True)
    kept_R = values_R[mask_R]
    torch.testing.assert_close(whole_R[mask_R], (kept_R - kept_R.mean()) / (kept_R.var() + 1e-2).sqrt())
    for cuts in ([7, 23], [1, 2, 27], [10, 10, 5, 5]):
        shares = list(zip(values_R.split(cuts), mask_R.split(cuts), strict=True))
        sums = [torch.stack([(v * m).sum() for v, m in shares]).sum(), mask_R.double().sum()]
        squares = (((values_R - sums[0] / sums[1]) * mask_R) ** 2).sum().reshape(1)
        parts = []
        for share in shares:
            totals = iter([torch.stack(sums), squares])
            parts.append(whiten(*share, lambda _: next(totals), std="unbiased", eps=1e-2, under_root=True))  # noqa: B023
        torch.testing.assert_close(torch.cat(parts), whole_R, rtol=0, atol=ROUNDING)
