"""The coefficient of the KL in the reward follows verl's adaptive controller, the same on all ranks."""

import pytest
import torch

from mrl.algorithms._kl_control import KlControl, sequence_means
from mrl.config.config import AlgorithmConfig, KlCtrlConfig

TOKENS = torch.ones(3)


def control(**settings):
    return KlControl(AlgorithmConfig(kl_coef=0.5, kl_ctrl=KlCtrlConfig(**settings)))


def test_a_fixed_coefficient_stays():
    fixed = control()
    assert fixed.charge(TOKENS, 10.0, 1000).tolist() == [0.5] * 3 and fixed.coef == 0.5


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.11, 1 + 0.1 * 64 / 1000), (0.09, 1 - 0.1 * 64 / 1000), (5.0, 1 + 0.2 * 64 / 1000), (0.0, 1 - 0.2 * 64 / 1000)],
)
def test_an_adaptive_one_moves_towards_the_target_after_the_step_has_paid(kl, factor):
    adaptive = control(type="adaptive", target_kl=0.1, horizon=1000)
    assert adaptive.charge(TOKENS, kl, 64).tolist() == [0.5] * 3
    assert adaptive.charged == 0.5 and adaptive.coef == pytest.approx(0.5 * factor)


def test_the_kl_of_a_step_is_the_mean_over_sequences_of_their_mean_per_trained_token():
    kl_R, mask_R = torch.tensor([1.0, 3.0, 9.0, 5.0, 7.0]), torch.tensor([True, True, False, True, False])
    sums = sequence_means(kl_R, mask_R, torch.tensor([0, 0, 0, 1, 2]), 3)
    assert sums.tolist() == [2.0 + 5.0, 2.0]
