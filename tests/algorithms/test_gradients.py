"""Every algorithm's loss and gradient against a reference written here in plain float64 loops.

The reference follows the papers' formulas sequence by sequence; it shares no code with mrl.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, OverlongConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.types import RolloutBatch
from tests.algorithms.ragged import VOCAB, advantages_of, alone, make_batch

FP32 = 2e-6  # mrl computes the loss in fp32 from the same numbers; gradients are relative to their largest entry
RESPONSE_LENGTH = 7


@dataclass(frozen=True)
class Case:
    """A config, and what its formula says."""

    config: AlgorithmConfig
    baseline: str = "mean"  # none, mean, leave_one_out
    group_std: str = "none"  # unbiased, population, none
    whiten: bool = False
    eps: float = 0.0
    aggregation: str = "token_mean"
    low: float = 0.2
    high: float = 0.2


def _case(name: str, **knobs: object) -> AlgorithmConfig:
    return AlgorithmConfig(name=name, **knobs)  # type: ignore[arg-type]


def _decoupled(rollout_is: str | None = None, threshold: str | None = None, **more: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(bypass_mode=False, rollout_is=rollout_is, rollout_is_threshold=threshold, **more)  # type: ignore[arg-type]


CASES = {
    "grpo": Case(_case("grpo"), group_std="unbiased", eps=1e-6, aggregation="seq_mean_token_mean"),
    "grpo population": Case(
        _case("grpo", advantage_std="population", advantage_eps=1e-4, loss_aggregation="seq_mean_token_sum"),
        group_std="population",
        eps=1e-4,
        aggregation="seq_mean_token_sum",
    ),
    "grpo dual clip": Case(
        _case("grpo", dual_clip=1.5), group_std="unbiased", eps=1e-6, aggregation="seq_mean_token_mean"
    ),
    "grpo k1": Case(
        _case("grpo", kl_in="loss", kl_coef=0.3, kl_estimator="k1"),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "grpo k2 entropy": Case(
        _case("grpo", kl_in="loss", kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "grpo abs unbiased": Case(
        _case("grpo", kl_in="loss", kl_coef=0.3, kl_estimator="abs", kl_unbiased=True),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "grpo k3 decoupled": Case(
        _case("grpo", kl_in="loss", kl_coef=0.3, kl_estimator="k3", rollout_correction=_decoupled("token", "1.2")),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "grpo decoupled, no weight": Case(
        _case("grpo", rollout_correction=_decoupled()),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "rloo decoupled, weight of the response": Case(
        _case("rloo", rollout_correction=_decoupled("sequence", "0.2_5.0")),
        baseline="leave_one_out",
        aggregation="seq_mean_token_sum",
    ),
    "dapo rejecting, entropy": Case(
        _case(
            "dapo",
            entropy_coef=0.2,
            rollout_correction=_decoupled("token", "1.2", rollout_rs="token_k1", rollout_rs_threshold="5"),
        ),
        group_std="unbiased",
        eps=1e-6,
        high=0.28,
    ),
    "dapo rejecting, kept": Case(
        _case(
            "dapo",
            rollout_correction=_decoupled(
                rollout_rs="token_k1", rollout_rs_threshold="5", rollout_rs_denominator="kept"
            ),
        ),
        group_std="unbiased",
        eps=1e-6,
        high=0.28,
    ),
    "dapo bypassing, rejecting": Case(
        _case("dapo", rollout_correction=RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="5")),
        group_std="unbiased",
        eps=1e-6,
        high=0.28,
    ),
    "dapo reinforce": Case(
        _case(
            "dapo",
            rollout_correction=RolloutCorrectionConfig(
                loss_type="reinforce", rollout_is="token", rollout_is_threshold="1.2"
            ),
        ),
        group_std="unbiased",
        eps=1e-6,
    ),
    "grpo masked": Case(
        _case("grpo", overlong=OverlongConfig(mask_truncated=True)),
        group_std="unbiased",
        eps=1e-6,
        aggregation="seq_mean_token_mean",
    ),
    "dr_grpo": Case(_case("dr_grpo"), aggregation="seq_mean_token_sum_norm"),
    "dapo": Case(
        _case("dapo", overlong=OverlongConfig(buffer_length=4, penalty=0.7)), group_std="unbiased", eps=1e-6, high=0.28
    ),
    "rloo": Case(_case("rloo"), baseline="leave_one_out", aggregation="seq_mean_token_sum"),
    "reinforce_pp": Case(_case("reinforce_pp"), baseline="none", whiten=True, eps=1e-8),
    "reinforce_pp kl": Case(
        _case("reinforce_pp", kl_in="reward", kl_coef=0.4, kl_estimator="k1"), baseline="none", whiten=True, eps=1e-8
    ),
    "reinforce_pp_baseline": Case(_case("reinforce_pp_baseline"), whiten=True, eps=1e-8),
    "reinforce_pp_baseline kl": Case(
        _case("reinforce_pp_baseline", kl_in="reward", kl_coef=0.4, kl_estimator="k3"), whiten=True, eps=1e-8
    ),
}


def _std(values: list[float], kind: str) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - (kind == "unbiased")))


def _kl(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    d = logp - ref
    return {"abs": d.abs(), "k1": d, "k2": d**2 / 2, "k3": (torch.exp(-d) + d - 1).clamp(max=10)}[estimator]


class Token(NamedTuple):
    """A trained token: its sequence, its row in the packed batch, and its advantage."""

    sequence: int
    row: int
    advantage: float


def _rewards(case: Case, batch: RolloutBatch) -> list[float]:
    overlong = case.config.overlong
    rewards = batch.rewards_B.double().tolist()
    if overlong.buffer_length == 0:
        return rewards
    over = [max(0, n - (RESPONSE_LENGTH - overlong.buffer_length)) for n in batch.response_lens_B.tolist()]
    return [r - overlong.penalty * x / overlong.buffer_length for r, x in zip(rewards, over, strict=True)]


def _outcome(case: Case, reward: float, peers: list[float]) -> float:
    others = (sum(peers) - reward) / (len(peers) - 1)
    advantage = reward - {"none": 0.0, "mean": sum(peers) / len(peers), "leave_one_out": others}[case.baseline]
    return advantage if case.group_std == "none" else advantage / (_std(peers, case.group_std) + case.eps)


def _tokens(case: Case, batch: RolloutBatch) -> list[Token]:
    config, rewards, groups = case.config, _rewards(case, batch), batch.group_id_B.tolist()
    rollout_R, ref_R = batch.rollout_logprobs_R.double(), batch.ref_logprobs_R.double()  # type: ignore[union-attr]
    tokens, start = [], 0
    for b, n in enumerate(batch.response_lens_B.tolist()):
        outcome = _outcome(case, rewards[b], [r for r, g in zip(rewards, groups, strict=True) if g == groups[b]])
        rows = [row for row in range(start, start + n) if batch.response_mask_R[row]]
        start += n
        if config.overlong.mask_truncated and batch.truncated_B[b]:  # type: ignore[index]
            continue
        for row in rows:
            later = [float(_kl(config.kl_estimator, rollout_R[u], ref_R[u])) for u in rows if u >= row]
            penalty = config.kl_coef * sum(later) if config.kl_in == "reward" else 0.0
            tokens.append(Token(b, row, outcome - penalty))
    if case.whiten:
        values = [token.advantage for token in tokens]
        mean, std = sum(values) / len(values), _std(values, "unbiased")
        tokens = [token._replace(advantage=(token.advantage - mean) / (std + case.eps)) for token in tokens]
    return tokens


def _token_loss(case: Case, advantage: float, logp_V: Tensor, target: int, old: list[Tensor], weight: float) -> Tensor:
    config, logp, (rollout, proximal, ref) = case.config, logp_V[target], old
    section = config.rollout_correction
    ratio = torch.exp(logp - (rollout if section.resolved.bypass_mode else proximal))
    clipped = min(max(ratio, torch.tensor(1 - case.low)), torch.tensor(1 + case.high))
    objective = min(ratio * advantage, clipped * advantage)
    if config.dual_clip and advantage < 0:
        objective = max(objective, torch.tensor(config.dual_clip * advantage))
    if section.loss_type == "reinforce":
        objective = logp * advantage
    loss = -objective * weight + config.entropy_coef * (logp_V.exp() * logp_V).sum()
    if config.kl_in != "loss":
        return loss
    return loss + config.kl_coef * _kl(config.kl_estimator, logp, ref) * (ratio if config.kl_unbiased else 1.0)


def _weight(section: RolloutCorrectionConfig, log_ratios: list[float], own: float) -> float:
    """Importance weight of a token of a response with these log-ratios."""
    if section.rollout_is is None:
        return 1.0
    raw = math.exp(own if section.rollout_is == "token" else sum(log_ratios))
    bounds = [float(part) for part in section.rollout_is_threshold.split("_")]  # type: ignore[union-attr]
    if len(bounds) == 1:
        return min(raw, bounds[0])
    return raw if bounds[0] <= raw <= bounds[1] else 0.0


def _reference(case: Case, batch: RolloutBatch, logits_RV: Tensor) -> Tensor:
    tokens, targets = _tokens(case, batch), torch.cat(_responses(batch)).tolist()
    logprobs_RV = logits_RV.log_softmax(-1)
    old = [t.double() for t in (batch.rollout_logprobs_R, batch.proximal_logprobs_R, batch.ref_logprobs_R)]  # type: ignore[union-attr]
    trained = {b: sum(token.sequence == b for token in tokens) for b, _, _ in tokens}
    section = case.config.rollout_correction
    actor = (
        logprobs_RV.gather(1, torch.tensor(targets)[:, None])[:, 0].detach() if section.resolved.bypass_mode else old[1]
    )
    drift = (actor - old[0]).tolist()
    kept = [not section.rollout_rs or -math.log(5) <= -drift[token.row] <= math.log(5) for token in tokens]
    count = sum(kept) if section.rollout_rs_denominator == "kept" else len(tokens)
    total = logits_RV.new_zeros(())
    for (b, row, advantage), stays in zip(tokens, kept, strict=True):
        divisor = {
            "token_mean": count,
            "seq_mean_token_mean": trained[b] * len(trained),
            "seq_mean_token_sum": len(trained),
            "seq_mean_token_sum_norm": RESPONSE_LENGTH * len(trained),
        }[case.aggregation]
        weight = _weight(section, [drift[token.row] for token in tokens if token.sequence == b], drift[row])
        columns = [column[row] for column in old]
        total = total + stays * _token_loss(case, advantage, logprobs_RV[row], targets[row], columns, weight) / divisor
    assert not section.rollout_rs or 0 < sum(kept) < len(kept)
    return total


def _responses(batch: RolloutBatch) -> list[Tensor]:
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    return [tokens[start:] for tokens, start in zip(sequences, batch.prompt_lens_B.tolist(), strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_match_a_float64_reference(name: str) -> None:
    case, batch = CASES[name], make_batch(seed=3)
    num_responses = batch.response_mask_R.numel()
    generator = torch.Generator().manual_seed(4)
    logits_RV = torch.randn(num_responses, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)
    want = _reference(case, batch, logits_RV)
    (want_RV,) = torch.autograd.grad(want, logits_RV)

    algorithm = build(case.config, RolloutConfig(n=3, response_length=RESPONSE_LENGTH))
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    algorithm.weigh(batch, alone)
    logprobs_RV = logits_RV.log_softmax(-1)
    logprobs_R = logprobs_RV.gather(1, torch.cat(_responses(batch))[:, None])[:, 0]
    entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    got, metrics = algorithm.loss(logprobs_R.float(), entropy_R.float(), batch)
    (got_RV,) = torch.autograd.grad(got, logits_RV)

    assert got.dtype == torch.float32
    assert want_RV.abs().max() > 0
    assert got.item() == pytest.approx(want.item(), rel=FP32, abs=FP32)
    assert metrics["actor/loss"].item() == got.item()
    torch.testing.assert_close(got_RV, want_RV, rtol=0, atol=FP32 * want_RV.abs().max().item())


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    batch = replace(make_batch(seed=3), ref_logprobs_R=None, proximal_logprobs_R=None)
    batch.rollout_logprobs_R = torch.zeros_like(batch.rollout_logprobs_R)
    logprobs_R = (-torch.rand(batch.response_mask_R.numel(), dtype=torch.float64)).requires_grad_()
    want = -logprobs_R[batch.response_mask_R].mean()
    (want_R,) = torch.autograd.grad(want, logprobs_R)
    algorithm = build(AlgorithmConfig(name="sft"), RolloutConfig(n=1))
    algorithm.weigh(batch, alone)
    got, _ = algorithm.loss(logprobs_R.float(), torch.zeros_like(logprobs_R), batch)
    (got_R,) = torch.autograd.grad(got, logprobs_R)
    assert got.item() == pytest.approx(want.item(), rel=FP32)
    torch.testing.assert_close(got_R, want_R, rtol=FP32, atol=0)


def test_every_clip_and_cap_binds_somewhere_in_these_batches() -> None:
    batch = make_batch(seed=3)
    config = _case("grpo", dual_clip=1.5, rollout_correction=_decoupled("token", "1.2"))
    algorithm = build(config, RolloutConfig(n=3, response_length=RESPONSE_LENGTH))
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    algorithm.weigh(batch, alone)
    logprobs_R = -(0.5 + 3.5 * torch.rand(batch.response_mask_R.numel(), generator=torch.Generator().manual_seed(5)))
    _, found = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    metrics = algorithm.finalize_metrics({name: value.item() for name, value in found.items()})
    for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "rollout_corr/rollout_is_ratio_fraction_high"):
        assert 0 < metrics[key] < 1, key
    assert metrics["actor/ratio_min"] < 1 < metrics["actor/ratio_max"]
