"""The loss, its gradient and the metrics do not depend on how the batch is cut, ordered or spread over ranks."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms._policy_loss import LOSSES
from mrl.algorithms.base import SumReduce, build
from mrl.config.config import (
    AlgorithmConfig,
    ClipCovConfig,
    KlCovConfig,
    OverlongConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from mrl.types import RolloutBatch
from tests.algorithms.ragged import advantages_of, alone, make_batch, on_ranks

ROUNDING = 1e-6  # nats, of fp32 log-probabilities of a few nats
SUM_ORDER = 1e-6  # float64 losses of about 60 tokens; advantages and weights are rounded to fp32 (6e-8)

TOKEN = RolloutCorrectionConfig(bypass_mode=False, rollout_is="token")
SEQUENCE = RolloutCorrectionConfig(bypass_mode=False, rollout_is="sequence", rollout_is_batch_normalize=True)
TESTS: dict[str, Any] = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "8,3"}

CONFIGS = [
    AlgorithmConfig(name="grpo", kl_in="loss", entropy_coef=0.1, rollout_correction=TOKEN),
    AlgorithmConfig(name="rloo", kl_in="loss", rollout_correction=replace(TOKEN, **TESTS)),
    AlgorithmConfig(name="reinforce_pp", rollout_correction=replace(SEQUENCE, **TESTS, rollout_rs_denominator="kept")),
    AlgorithmConfig(name="grpo", rollout_correction=RolloutCorrectionConfig(**TESTS, off_policy_mask_threshold=0.1)),
    AlgorithmConfig(name="dapo", rollout_correction=RolloutCorrectionConfig(**TESTS, rollout_rs_denominator="kept")),
    AlgorithmConfig(name="dapo", rollout_correction=replace(SEQUENCE, bypass_mode=True, loss_type="reinforce")),
    AlgorithmConfig(name="grpo", overlong=OverlongConfig(mask_truncated=True), dual_clip=2.0),
    AlgorithmConfig(name="dr_grpo"),
    AlgorithmConfig(name="dapo", overlong=OverlongConfig(buffer_length=3)),
    AlgorithmConfig(name="rloo"),
    AlgorithmConfig(name="reinforce_pp", kl_in="reward", kl_estimator="k1", kl_coef=0.2),
    AlgorithmConfig(name="reinforce_pp_baseline"),
    AlgorithmConfig(name="maxrl", kl_in="loss", kl_estimator="k3+", kl_unbiased=True),
    AlgorithmConfig(name="gdpo"),
    AlgorithmConfig(name="opo"),
    AlgorithmConfig(name="grpo_passk", advantage_std="none"),
    AlgorithmConfig(name="grpo", advantage_std_over="batch"),
    AlgorithmConfig(name="ppo", kl_in="reward", kl_coef=0.2, lam=0.9, gamma=0.95),
    AlgorithmConfig(name="vapo", overlong=OverlongConfig(mask_truncated=True)),
    AlgorithmConfig(name="ppo", rollout_correction=replace(SEQUENCE, **TESTS, rollout_rs_denominator="kept")),
    AlgorithmConfig(name="sft"),
    AlgorithmConfig(name="grpo", policy_loss="clip_cov", clip_cov=ClipCovConfig(0.2, -1.0, 1.0)),
    AlgorithmConfig(name="grpo", policy_loss="kl_cov", kl_cov=KlCovConfig(0.2, 1.0)),
    AlgorithmConfig(name="grpo", top_entropy_quantile=0.3),
    AlgorithmConfig(name="grpo", positive_example_nll_weight=0.1),
    *(AlgorithmConfig(name="grpo", policy_loss=name, rollout_correction=TOKEN) for name in LOSSES),  # type: ignore[arg-type]
]
ROLLOUT = RolloutConfig(n=3, response_length=7)


def _id(config: AlgorithmConfig) -> str:
    acting = config.rollout_correction.resolved
    how = [acting.loss_type, acting.rollout_is, acting.rollout_rs and acting.rollout_rs_denominator]
    return " ".join(
        [
            config.name,
            config.policy_loss or config.kl_in,
            *("decoupled" for _ in range(not acting.bypass_mode)),
            *filter(None, how),
        ]
    )


def _policy(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies that depend on a token's own values only, so that they follow the token."""
    rollout_R = batch.rollout_logprobs_R
    return rollout_R * 0.9 - 0.4 * (rollout_R * 50).sin() - 0.5, 1.0 + (rollout_R * 20).cos()


def _run(config: AlgorithmConfig, parts: list[RolloutBatch], outcome_N: Tensor, rows: list[list[int]], cut: int):
    """Loss, metrics and the gradient of each sequence, from `parts` on ranks, in microbatches of `cut` sequences."""
    algorithm = build(config, ROLLOUT)
    losses: list[float] = []
    metrics: dict[str, list[float]] = {}
    grads: dict[int, Tensor] = {}

    def work(part: RolloutBatch, reduce: SumReduce, rank: int) -> None:
        part.current_logprobs_R, part.current_entropy_R = _policy(part)
        algorithm.advantages(part, outcome_N[rows[rank]], reduce)
        part.current_logprobs_R = _policy(part)[0] if algorithm.needs_current else None
        algorithm.weigh(part, reduce)
        for start in range(0, part.num_sequences, cut):
            chosen = list(range(part.num_sequences))[start : start + cut]
            microbatch = part.select(chosen)
            logprobs_R, entropy_R = (tensor.requires_grad_() for tensor in _policy(microbatch))
            loss, found = algorithm.loss(logprobs_R, entropy_R, microbatch)
            grad_R = torch.cat(
                [
                    torch.stack(
                        torch.autograd.grad(loss, (logprobs_R, entropy_R), allow_unused=True, materialize_grads=True)
                    )
                ],
                1,
            )
            for row, grad in zip(chosen, grad_R.split(microbatch.response_lens_B.tolist(), 1), strict=True):
                grads[rows[rank][row]] = grad
            losses.append(loss.item())
            for key, value in found.items():
                metrics.setdefault(key, []).append(value.item())

    on_ranks(parts, work)
    pick = {"max": max, "min": min}
    reduced = algorithm.finalize_metrics({key: pick.get(key[-3:], sum)(values) for key, values in metrics.items()})
    return sum(losses), reduced, grads


def _in_float64(batch: RolloutBatch) -> RolloutBatch:
    """As it is, in float64: what differs then is no rounding."""
    floats = {item.name: getattr(batch, item.name) for item in fields(batch)}
    wide = {name: value.double() for name, value in floats.items() if value is not None and value.is_floating_point()}
    return replace(batch, **wide)


def _spread(batch: RolloutBatch, rows: list[list[int]]) -> list[RolloutBatch]:
    return [batch.select(part) for part in rows]


@pytest.mark.parametrize("config", CONFIGS, ids=_id)
def test_cut_order_and_ranks_change_nothing(config: AlgorithmConfig) -> None:
    batch = _in_float64(make_batch(seed=7))
    outcome_N = advantages_of(build(config, ROLLOUT), batch)
    everything = [list(range(12))]
    loss, metrics, grads = _run(config, _spread(batch, everything), outcome_N, everything, cut=12)
    assert any(grad.abs().sum() > 0 for grad in grads.values())
    shuffled = [torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()]
    uneven = [[5, 0, 11], [1, 2, 3, 4, 6, 7, 8], [10, 9]]
    for rows, cut in [(everything, 5), (everything, 1), (shuffled, 4), (uneven, 2), ([*uneven, []], 12)]:
        got_loss, got_metrics, got_grads = _run(config, _spread(batch, rows), outcome_N, rows, cut)
        assert got_loss == pytest.approx(loss, rel=SUM_ORDER, abs=SUM_ORDER)
        assert got_metrics == pytest.approx(metrics, rel=SUM_ORDER, abs=SUM_ORDER)
        assert got_grads.keys() == grads.keys()
        for row, grad in grads.items():
            torch.testing.assert_close(got_grads[row], grad, rtol=SUM_ORDER, atol=SUM_ORDER)


@pytest.mark.parametrize("config", CONFIGS, ids=_id)
def test_untrained_tokens_reach_neither_loss_nor_gradient(config: AlgorithmConfig) -> None:
    batch = make_batch(seed=8)
    algorithm = build(config, ROLLOUT)
    outcome_N = advantages_of(algorithm, batch)
    spoiled = replace(batch)
    results = []
    for current in (batch, spoiled):
        if current is spoiled:
            for name in ("rollout_logprobs_R", "proximal_logprobs_R", "ref_logprobs_R"):
                value_R = getattr(spoiled, name)
                setattr(spoiled, name, torch.where(spoiled.response_mask_R, value_R, float("nan")))
        current.current_logprobs_R, current.current_entropy_R = _policy(batch)
        algorithm.advantages(current, outcome_N, alone)
        logprobs_R, entropy_R = _policy(batch)
        current.current_logprobs_R = logprobs_R if algorithm.needs_current else None
        algorithm.weigh(current, alone)
        if current is spoiled:
            logprobs_R = torch.where(current.response_mask_R, logprobs_R, float("nan"))
            entropy_R = torch.where(current.response_mask_R, entropy_R, float("nan"))
        logprobs_R.requires_grad_()
        loss, metrics = algorithm.loss(logprobs_R, entropy_R, current)
        (grad_R,) = torch.autograd.grad(loss, logprobs_R)
        assert (grad_R[~current.response_mask_R] == 0).all()
        results.append((loss.item(), {key: value.item() for key, value in metrics.items()}, grad_R))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("config", CONFIGS, ids=_id)
def test_a_batch_without_any_trained_token_gives_zero_and_no_nan(config: AlgorithmConfig) -> None:
    batch = make_batch(seed=9)
    batch.response_mask_R = torch.zeros_like(batch.response_mask_R)
    algorithm = build(config, ROLLOUT)
    batch.current_logprobs_R, batch.current_entropy_R = _policy(batch)
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    logprobs_R, entropy_R = (tensor.requires_grad_() for tensor in _policy(batch))
    batch.current_logprobs_R = logprobs_R.detach() if algorithm.needs_current else None
    algorithm.weigh(batch, alone)
    loss, metrics = algorithm.loss(logprobs_R, entropy_R, batch)
    (grad_R,) = torch.autograd.grad(loss, logprobs_R)
    assert loss.item() == 0
    assert (grad_R == 0).all()
    assert all(torch.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.0, -0.1])
def test_rounding_between_engine_and_reference_is_no_advantage(name: str, estimator: str, reward: float) -> None:
    """Equal rewards teach nothing, also while the reference still is the policy that sampled."""
    batch = make_batch(seed=3)
    batch.rewards_B[:] = reward
    noise_R = torch.randn(batch.rollout_logprobs_R.shape, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    batch.ref_logprobs_R = batch.rollout_logprobs_R + ROUNDING * noise_R
    algorithm = build(AlgorithmConfig(name=name, kl_in="reward", kl_estimator=estimator, kl_coef=0.2), ROLLOUT)
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    assert batch.advantages_R.abs().max() == 0
