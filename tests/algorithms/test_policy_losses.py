"""Every policy loss: verl's own numbers, a float64 reference written from the papers, and what the config may say."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from mrl.algorithms._entropy_control import EntropyControl
from mrl.algorithms._policy_loss import LOSSES, READ
from mrl.algorithms.base import build, resolve
from mrl.config.config import (
    AlgorithmConfig,
    ClipCovConfig,
    DppoConfig,
    DroConfig,
    EntropyCtrlConfig,
    KlCovConfig,
    RolloutConfig,
    SapoConfig,
    VespoConfig,
)
from mrl.config.verl_keys.loss_names import VERL_LOSSES as OURS
from mrl.errors import UserError
from mrl.types import RolloutBatch
from tests.algorithms.functional import verl_losses
from tests.algorithms.functional.verl_losses import ENTRIES, LENS, SPREADS, Entry
from tests.algorithms.ragged import alone, make_batch

VERL = 1e-7  # absolute, of losses of order 1: weights of tokens are fp32, verl divides by a count + 1e-8
FP64 = 1e-6  # of the largest entry: log-probabilities and the reference are fp64, weights of tokens fp32
ROLLOUT = RolloutConfig(n=3, response_length=5)
GOLDEN = json.loads((Path(verl_losses.__file__).with_suffix(".json")).read_text(encoding="utf-8"))

DEFAULTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}
"""verl's."""


def _config(entry: Entry) -> AlgorithmConfig:
    """The same loss in mrl's words."""
    loss, verl = OURS[entry.mode], DEFAULTS | entry.actor
    reads, fields = LOSSES[loss].reads, {}
    for key, theirs in (
        ("clip_low", "clip_ratio_low"),
        ("clip_high", "clip_ratio_high"),
        ("dual_clip", "clip_ratio_c"),
    ):
        if key in reads and not (key == "dual_clip" and loss == "gspo"):  # verl's gspo has no dual clip
            fields[key] = verl[theirs]
    if loss == "sapo":
        fields["sapo"] = SapoConfig(verl["tau_pos"], verl["tau_neg"])
    if loss.startswith("dppo"):
        fields["dppo"] = DppoConfig(verl["clip_ratio_c"])
    if loss == "clip_cov":
        fields["clip_cov"] = ClipCovConfig(**entry.policy_loss)
    if loss == "kl_cov":
        fields["kl_cov"] = KlCovConfig(**entry.policy_loss)
    if loss == "dro":
        fields["dro"] = DroConfig(**entry.policy_loss)
    by_sequence = entry.mode in ("geo_mean", "sapo")  # verl: whatever `loss_agg_mode` says
    mode = "seq-mean-token-mean" if by_sequence else entry.aggregation
    mode = "token-mean" if mode == "token-sum" else mode
    return AlgorithmConfig(policy_loss=loss, loss_aggregation=mode.replace("-", "_"), **fields)  # type: ignore[arg-type]


def _batch(spread: str) -> tuple[RolloutBatch, Tensor]:
    """verl's padded rows as a ragged batch with advantages, and the current log-probabilities; all fp64."""
    rows = verl_losses.rows(spread)
    inside = torch.arange(5)[None] < torch.tensor(LENS)[:, None]
    num = int(inside.sum())
    batch = RolloutBatch(
        tokens_P=torch.zeros(num + 3, dtype=torch.int64),
        prompt_lens_B=torch.ones(3, dtype=torch.int64),
        response_lens_B=torch.tensor(LENS),
        response_mask_R=rows.mask[inside].bool(),
        rollout_logprobs_R=rows.old[inside],
        group_id_B=torch.zeros(3, dtype=torch.int64),
        rewards_B=torch.zeros(3),
        advantages_R=(rows.advantages * rows.mask)[inside],
        current_logprobs_R=rows.new[inside],
        sample_index_B=torch.arange(3),
    )
    return batch, rows.new[inside].requires_grad_()


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("spread", SPREADS)
def test_loss_gradient_and_metrics_are_those_of_verl(spread: str, name: str) -> None:
    entry, want = ENTRIES[name], GOLDEN[spread][name]
    batch, logprobs_R = _batch(spread)
    algorithm = build(_config(entry), ROLLOUT)
    algorithm.weigh(batch, alone)
    if entry.aggregation == "token-sum":  # not in mrl: it is not divided by anything
        batch.weights_R = batch.response_mask_R.double()
    loss, metrics = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    (grad_R,) = torch.autograd.grad(loss, logprobs_R)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(want["loss"], abs=VERL)
    inside = torch.arange(5)[None] < torch.tensor(LENS)[:, None]
    torch.testing.assert_close(grad_R, torch.tensor(want["grad"], dtype=torch.float64)[inside], rtol=0, atol=VERL)
    told = {} if entry.mode == "kl_cov" else want["metrics"]  # there verl's ppo_kl is the mean of |log r|
    for key, value in told.items():
        assert metrics[key].item() == pytest.approx(value, abs=VERL), key


def _responses(batch: RolloutBatch) -> list[slice]:
    ends = batch.response_lens_B.cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, batch.response_lens_B.tolist(), strict=True)]


def _gates(policy_loss: str, p: Tensor, q: Tensor, A: Tensor, chosen: Tensor) -> Tensor:
    """Loss of one sequence by the paper, summed over its tokens; p and q are probabilities of its trained tokens."""
    r, n = p / q, len(p)
    sequence, logp = torch.exp(torch.log(r).sum() / n), torch.log(p)
    if policy_loss in ("gspo", "luspo"):  # the sequence form, which has one advantage
        terms = torch.minimum(sequence * A[0], sequence.clamp(0.9, 1.15) * A[0]).expand(n)
    elif policy_loss == "cispo":
        terms = r.detach().clamp(0.2, 1.5) * A * logp
    elif policy_loss == "sapo":
        tau = torch.tensor([1.0 if a > 0 else 1.05 for a in A.tolist()], dtype=torch.float64)
        terms = 4 / tau / (1 + torch.exp(-tau * (r - 1))) * A
    elif policy_loss == "gmpo":  # PPO's pessimistic bound of each ratio, then the product's n-th root
        low, high = math.exp(-0.4), math.exp(0.3)
        bounded = torch.stack([x.clamp(max=high) if a > 0 else x.clamp(min=low) for x, a in zip(r, A, strict=True)])
        terms = (bounded.prod() ** (1 / n) * A[0]).expand(n)
    elif policy_loss == "vespo":
        w = r.detach().prod()
        k, decay = (2.0, 3.0) if A[0] >= 0 else (3.0, 2.0)
        terms = w**k * torch.exp(decay * (1 - w)) * A * logp
    elif policy_loss == "dppo_tv":
        near = torch.stack([x - y <= 0.1 if a > 0 else y - x <= 0.1 for x, y, a in zip(p, q, A, strict=True)])
        terms = near * r.detach().clamp(max=1.3) * A * logp
    elif policy_loss == "dppo_kl":
        kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
        moved = torch.stack([x > y if a > 0 else x < y for x, y, a in zip(p, q, A, strict=True)])
        terms = ~(moved & (kl > 0.02)) * r.detach().clamp(max=1.3) * A * logp
    elif policy_loss == "kl_cov":  # at the chosen: chosen is a mask over this sequence
        terms = r * A - 0.1 * chosen * torch.log(r).abs()
    elif policy_loss == "clip_cov":
        terms = ~chosen * torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    elif policy_loss == "dro":
        terms = A * logp - 0.25 * torch.log(r) ** 2
    elif policy_loss == "gpg":
        terms = A * logp
    else:
        terms = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    return -terms.sum()


REFERENCES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "luspo": {"clip_low": 0.1, "clip_high": 0.15},
    "cispo": {"clip_low": 0.8, "clip_high": 0.5},
    "sapo": {},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.3},
    "vespo": {},
    "dppo_tv": {"clip_low": 0.1, "clip_high": 0.1, "dppo": DppoConfig(1.3)},
    "dppo_kl": {"clip_low": 0.02, "clip_high": 0.02, "dppo": DppoConfig(1.3)},
    "gpg": {},
    "clip_cov": {"clip_cov": ClipCovConfig(0.2, -0.5, 0.5)},
    "kl_cov": {"kl_cov": KlCovConfig(0.2, 0.1)},
    "dro": {"dro": DroConfig(0.5)},
}


def _chosen(policy_loss: str, batch: RolloutBatch, logprobs_R: Tensor) -> Tensor:
    """The tokens that covary most, one by one from the definition; Clip-Cov's are drawn: its own are taken."""
    rows = torch.arange(batch.response_mask_R.numel())[batch.response_mask_R].tolist()
    a, x = ([tensor[row].item() for row in rows] for tensor in (batch.advantages_R, logprobs_R.detach()))  # type: ignore[index]
    mean_a, mean_x, k = sum(a) / len(a), sum(x) / len(x), int(0.2 * len(a))
    covariance = {row: (ai - mean_a) * (xi - mean_x) for row, ai, xi in zip(rows, a, x, strict=True)}
    chosen_R = torch.zeros_like(batch.response_mask_R)
    if policy_loss == "kl_cov":
        chosen_R[sorted(rows, key=covariance.__getitem__)[-k:]] = True
        assert torch.equal(chosen_R, batch.chosen_R)  # type: ignore[arg-type]
    elif policy_loss == "clip_cov":
        chosen_R = batch.chosen_R  # type: ignore[assignment]
        ratio = {row: math.exp(xi - batch.rollout_logprobs_R[row].item()) for row, xi in zip(rows, x, strict=True)}
        clipped = {row: r > 1.2 if ai > 0 else r < 0.8 for (row, r), ai in zip(ratio.items(), a, strict=True)}
        drawn = [row for row in rows if chosen_R[row]]
        assert len(drawn) == k
        assert all(-0.5 < covariance[row] < 0.5 and not clipped[row] for row in drawn)
    return chosen_R


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_loss_and_gradient_are_those_of_the_paper(policy_loss: str) -> None:
    """Sequence by sequence from the formulas, fp64; every bound binds for some sequence and not for another."""
    batch, generator = make_batch(seed=5), torch.Generator().manual_seed(6)
    batch.rollout_logprobs_R = -(0.3 + 1.5 * torch.rand(batch.response_mask_R.shape, generator=generator).double())
    sign_B = torch.tensor([1.0, -1.0, 0.7, -0.4]).repeat(3).double()
    batch.advantages_R = torch.where(batch.response_mask_R, sign_B[batch.sequence_R], 0.0)
    moved_R = 0.5 * torch.randn(batch.response_mask_R.shape, generator=generator).double()
    logprobs_R = (batch.rollout_logprobs_R + moved_R).clamp(max=-0.05).requires_grad_()

    config = resolve(AlgorithmConfig(policy_loss=policy_loss, **REFERENCES[policy_loss]))  # type: ignore[arg-type]
    algorithm = build(config, ROLLOUT)
    batch.current_logprobs_R = logprobs_R.detach()
    algorithm.weigh(batch, alone)
    chosen_R = _chosen(policy_loss, batch, logprobs_R)
    sums, lens = [], []
    for part in _responses(batch):
        rows = torch.arange(part.start, part.stop)[batch.response_mask_R[part]]
        if len(rows):
            p, q = logprobs_R[rows].exp(), batch.rollout_logprobs_R[rows].exp()
            sums.append(_gates(policy_loss, p, q, batch.advantages_R[rows], chosen_R[rows]))
            lens.append(len(rows))
    per_sequence = config.loss_aggregation == "seq_mean_token_mean"
    want = sum(value / (size if per_sequence else 1) for value, size in zip(sums, lens, strict=True)) / len(sums)
    (want_R,) = torch.autograd.grad(want, logprobs_R)  # type: ignore[arg-type]

    got, metrics = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    (got_R,) = torch.autograd.grad(got, logprobs_R)
    assert got.item() == pytest.approx(want.item(), rel=FP64)  # type: ignore[union-attr]
    torch.testing.assert_close(got_R, want_R, rtol=0, atol=FP64 * want_R.abs().max().item())
    if {"clip_low", "dppo.ratio_cap"} & set(LOSSES[policy_loss].reads):
        assert 0 < metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"] < 1
    if "dppo" in policy_loss:
        assert metrics["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_at_the_policy_that_sampled_the_gradient_is_the_policy_gradient(policy_loss: str) -> None:
    batch = make_batch(seed=2)
    batch.advantages_R = torch.where(batch.response_mask_R, torch.randn(batch.response_mask_R.shape), 0.0)
    batch.current_logprobs_R = batch.rollout_logprobs_R
    if policy_loss in ("gmpo", "vespo"):  # by definition of a whole sequence's advantage
        batch.advantages_R = torch.where(batch.response_mask_R, torch.randn(12)[batch.sequence_R], 0.0)
    algorithm = build(AlgorithmConfig(policy_loss=policy_loss, loss_aggregation="seq_mean_token_mean"), ROLLOUT)  # type: ignore[arg-type]
    algorithm.weigh(batch, alone)
    logprobs_R = batch.rollout_logprobs_R.clone().requires_grad_()
    loss, _ = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    (got_R,) = torch.autograd.grad(loss, logprobs_R)
    want_R = -batch.weights_R * batch.advantages_R
    if policy_loss == "clip_cov":
        want_R[batch.chosen_R] = 0.0
    torch.testing.assert_close(got_R, want_R)


@pytest.mark.parametrize("policy_loss", LOSSES)
def test_one_broken_token_gives_no_inf(policy_loss: str) -> None:
    batch = make_batch(seed=2)
    batch.response_mask_R[:] = True
    for sign in (1.0, -1.0):
        batch.advantages_R = torch.full_like(batch.rollout_logprobs_R, sign)
        algorithm = build(AlgorithmConfig(policy_loss=policy_loss), ROLLOUT)  # type: ignore[arg-type]
        for broken in (-1e4, 0.0):
            logprobs_R = batch.rollout_logprobs_R.clone()
            logprobs_R[0] = broken
            batch.rollout_logprobs_R[0] = -1e4 if broken == 0.0 else -1.0
            logprobs_R.requires_grad_()
            batch.current_logprobs_R = logprobs_R.detach()
            algorithm.weigh(batch, alone)
            loss, _ = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
            (grad_R,) = torch.autograd.grad(loss, logprobs_R)
            assert torch.isfinite(loss)
            assert torch.isfinite(grad_R).all()


def test_the_losses_are_those_of_the_config() -> None:
    (literal, _) = get_args(get_type_hints(AlgorithmConfig)["policy_loss"])
    assert list(get_args(literal)) == list(LOSSES)


def test_another_loss_than_the_algorithm_s_own_brings_its_clip_and_aggregation() -> None:
    config = resolve(AlgorithmConfig(name="dapo", policy_loss="gspo"))
    assert (config.clip_low, config.clip_high, config.loss_aggregation) == (3e-4, 4e-4, "seq_mean_token_mean")
    assert config.dynamic_sampling
    config = resolve(AlgorithmConfig(name="gspo", policy_loss="vanilla", clip_high=0.3))
    assert (config.clip_low, config.clip_high, config.dual_clip) == (0.2, 0.3, 0.0)
    config = resolve(AlgorithmConfig(name="dapo", policy_loss="vanilla"))
    assert (config.clip_low, config.clip_high) == (0.2, 0.28)
    for name in ("gspo", "luspo", "cispo", "sapo", "gmpo", "vespo", "dppo", "gpg", "clip_cov", "kl_cov", "dro"):
        config = resolve(AlgorithmConfig(name=name))
        assert config.policy_loss == {"dppo": "dppo_tv"}.get(name, name)
        assert resolve(AlgorithmConfig(policy_loss=config.policy_loss)).clip_high == config.clip_high


@pytest.mark.parametrize("key", sorted(READ))
def test_a_field_of_another_loss_is_refused(key: str) -> None:
    """Each field by one of the losses that do not read it, and by supervised learning."""
    value: dict[str, Any] = {
        "clip_low": {"clip_low": 0.1},
        "clip_high": {"clip_high": 0.1},
        "dual_clip": {"dual_clip": 2.0},
        "sapo": {"sapo": replace(SapoConfig(), **{key.rpartition(".")[2]: 3.0}) if "sapo" in key else None},
        "vespo": {"vespo": replace(VespoConfig(), **{key.rpartition(".")[2]: 5.0}) if "vespo" in key else None},
        "dppo": {"dppo": DppoConfig(3.0)},
        "dro": {"dro": DroConfig(3.0)},
        "clip_cov": {
            "clip_cov": replace(ClipCovConfig(), **{key.rpartition(".")[2]: 0.5 if "ratio" in key else 1.5})
            if "clip_cov" in key
            else None
        },
        "kl_cov": {"kl_cov": replace(KlCovConfig(), **{key.rpartition(".")[2]: 0.5}) if "kl_cov" in key else None},
    }[key.partition(".")[0]]
    other = next(name for name, loss in LOSSES.items() if key not in loss.keys)
    with pytest.raises(UserError, match=rf"{key}.* would have no effect because algorithm.policy_loss is '{other}'"):
        resolve(AlgorithmConfig(policy_loss=other, **value))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="would have no effect because algorithm.name is 'sft'"):
        resolve(AlgorithmConfig(name="sft", **value))


def test_positive_examples_add_their_mean_negative_log_likelihood() -> None:
    batch = make_batch(seed=4)
    batch.advantages_R = torch.zeros_like(batch.rollout_logprobs_R)
    algorithm = build(AlgorithmConfig(positive_example_nll_weight=0.3), ROLLOUT)
    algorithm.weigh(batch, alone)
    logprobs_R = batch.rollout_logprobs_R.double().requires_grad_()
    loss, metrics = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    right_R = batch.response_mask_R & batch.correct_B[batch.sequence_R]  # type: ignore[index]
    want = -logprobs_R[right_R].mean()
    assert loss.item() == pytest.approx(0.3 * want.item(), rel=FP64)
    assert metrics["actor/positive_nll_loss"].item() == pytest.approx(want.item(), rel=FP64)
    (got_R,), (want_R,) = (torch.autograd.grad(value, logprobs_R) for value in (loss, 0.3 * want))
    torch.testing.assert_close(got_R, want_R, rtol=FP64, atol=0)


def test_an_adaptive_entropy_coefficient_follows_its_target_as_in_trl() -> None:
    # TRL: no bonus before an entropy at most the target came; then the coefficient after each step's move
    control = EntropyControl(
        AlgorithmConfig(entropy_coef=0.1, entropy_ctrl=EntropyCtrlConfig("adaptive", 1.0, 0.05, 0.02, 0.18))
    )
    assert control.effective_coef == 0.0
    told = [
        control.update({"actor/entropy": entropy})["actor/entropy_coef"]
        for entropy in (0.9, 0.8, 0.7, 1.2, 1.3, 1.4, 1.5, 1.0)
    ]
    assert told == pytest.approx([0.0, 0.15, 0.18, 0.18, 0.0, 0.0, 0.0, 0.0])
    assert (control.coef, control.last) == (pytest.approx(0.07), 1.0)
    assert control.effective_coef == control.coef
    fixed = EntropyControl(AlgorithmConfig(entropy_coef=0.1))
    assert (fixed.update({"actor/entropy": 9.0}), fixed.effective_coef) == ({}, 0.1)


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    from mrl.algorithms.base import Outcomes

    algorithm = build(AlgorithmConfig(name="gpg"), RolloutConfig(n=2))
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    outcomes = Outcomes(rewards, torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6), torch.zeros(6, dtype=torch.bool))
    assert algorithm.outcome_advantages(outcomes).tolist() == [1.5, -1.5, 0, 0, 0, 0]
    none = replace(outcomes, rewards_N=torch.ones(6))
    assert algorithm.outcome_advantages(none).tolist() == [0] * 6
