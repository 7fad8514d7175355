"""The steps of the optimizer against torch's AdamW."""

import pytest
import torch

from tests.megatron.actors import ARCHS, LAYOUTS, PEAK, make_policy, train
from tests.ranks import run_ranks

ROUNDING = 2e-7  # fp32 weights of order 1, three steps of 1e-3 in another order of operations
STEPS = 3
SETTINGS = {"adam_beta1": 0.7, "adam_beta2": 0.6, "adam_eps": 1e-3, "weight_decay": 0.3}


def distance_to_torch(settings):
    """Largest difference of a weight to torch's AdamW on the same gradients, and how far the weights moved."""
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"], actor={**SETTINGS, "clip_grad": 0.0, **settings})
    ours = dict(policy.chunks[0].named_parameters())
    start = {name: weight.detach().clone() for name, weight in ours.items()}
    theirs = {name: torch.nn.Parameter(weight.clone()) for name, weight in start.items()}
    groups = [
        {"params": [theirs[name] for name in theirs if (theirs[name].dim() > 1) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, SETTINGS["weight_decay"]), (False, 0.0))
    ]
    betas = (SETTINGS["adam_beta1"], SETTINGS["adam_beta2"])
    adamw = torch.optim.AdamW(groups, lr=PEAK, betas=betas, eps=SETTINGS["adam_eps"], foreach=False)
    for step in range(STEPS):
        train(policy, 1, first=step)
        for name, weight in theirs.items():
            weight.grad = ours[name].main_grad.float().clone()
        adamw.step()
    with torch.no_grad():
        apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
        return apart, min(float((ours[name] - start[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("distributed", [True, False])
def test_its_steps_are_those_of_torchs_adamw(distributed):
    apart, moved = run_ranks(1, distance_to_torch, {"use_distributed_optimizer": distributed})[0]
    assert apart <= ROUNDING < 100 * ROUNDING < moved


OTHERS = {"adam_beta1": 0.8, "adam_beta2": 0.7, "adam_eps": 2e-3, "weight_decay": 0.4}


@pytest.mark.parametrize("name", OTHERS)
def test_another_setting_is_seen_in_its_steps(name):
    apart, _ = run_ranks(1, distance_to_torch, {name: OTHERS[name]})[0]
    assert apart > 10 * ROUNDING
