"""What a policy observed and did not sample has no gradient, and whatever stands there changes nothing."""

from dataclasses import replace

import pytest
import torch

from mrl.algorithms.base import build
from tests.algorithms.ragged import advantages_of, make_batch
from tests.algorithms.test_invariance import CONFIGS, ROLLOUT, SUM_ORDER, _id, _in_float64, _run

OF_TOKENS = ("rollout_logprobs_R", "ref_logprobs_R", "proximal_logprobs_R", "values_R")


def ran(config, batch):
    batch = _in_float64(batch)
    rows = list(range(batch.num_sequences))
    outcome_N = advantages_of(build(config, ROLLOUT), batch)
    return _run(config, [replace(batch)], outcome_N, [rows], len(rows))


@pytest.mark.parametrize("config", CONFIGS, ids=_id)
def test_observed_tokens_have_no_gradient_and_no_say(config):
    batch = make_batch()
    observed_R = ~batch.response_mask_R
    assert 3 < observed_R.sum() < observed_R.numel() / 2
    loss, metrics, grads = ran(config, batch)
    grad_R = torch.cat([grads[row] for row in range(batch.num_sequences)], 1)
    assert not grad_R[:, observed_R].any()
    assert grad_R[:, ~observed_R].any()
    generator = torch.Generator().manual_seed(3)
    other = {}
    for name in OF_TOKENS:
        values_R = getattr(batch, name).clone()
        values_R[observed_R] = -5 * torch.rand(int(observed_R.sum()), generator=generator)
        other[name] = values_R
    again, metrics_again, grads_again = ran(config, replace(batch, **other))
    assert again == pytest.approx(loss, abs=SUM_ORDER)
    assert metrics_again == pytest.approx(metrics, abs=SUM_ORDER)
    for row, grad in grads.items():
        torch.testing.assert_close(grads_again[row], grad, atol=SUM_ORDER, rtol=0)
