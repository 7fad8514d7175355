"""Every algorithm honours the contract; every contradiction in the config ends in one clear message."""

import math
from dataclasses import fields, replace

import pytest
import torch

from mrl.algorithms._policy_loss import LOSSES, READ, PolicyLoss
from mrl.algorithms.base import Algorithm, Outcomes, build, required, resolve
from mrl.algorithms.functional.losses import Surrogate
from mrl.algorithms.grpo import Grpo
from mrl.config.config import AlgorithmConfig, KlCtrlConfig, OverlongConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.config.registry import names
from mrl.errors import UserError
from tests.algorithms.ragged import advantages_of, alone, make_batch

ROLLOUT = RolloutConfig(n=3, response_length=7)
ALGORITHMS = names("algorithms")
FP32 = 1e-5  # fp32 log-probabilities of up to 4 nats, whose differences are of order 0.1


class Squared(Grpo):
    """GRPO with a loss of its own."""

    own_loss = PolicyLoss(lambda logprobs_R, old_R, advantages_R: Surrogate(
        (logprobs_R - old_R) ** 2 - advantages_R * logprobs_R, logprobs_R - old_R, *[torch.zeros_like(old_R)] * 3
    ))  # fmt: skip


def test_a_loss_of_ones_own_replaces_that_of_the_table() -> None:
    resolved = resolve(AlgorithmConfig(name=f"{__name__}:Squared"))
    assert resolved.policy_loss is None and resolved.clip_low is None and resolved.loss_aggregation is not None
    with pytest.raises(UserError, match="algorithm.policy_loss=gspo would have no effect"):
        resolve(AlgorithmConfig(name=f"{__name__}:Squared", policy_loss="gspo"))
    algorithm, batch = build(resolved, ROLLOUT), make_batch()
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    algorithm.weigh(batch, alone)
    logprobs_R = batch.rollout_logprobs_R + 0.25
    loss, _ = algorithm.loss(logprobs_R, torch.zeros_like(logprobs_R), batch)
    expected_R = 0.25**2 - batch.advantages_R * logprobs_R
    assert loss.item() == pytest.approx((batch.weights_R * expected_R)[batch.response_mask_R].sum().item(), rel=1e-4)


def test_the_algorithms_are_the_promised_ones() -> None:
    clipped = ["dapo", "dr_grpo", "grpo", "reinforce_pp", "reinforce_pp_baseline", "rloo"]
    others = ["cispo", "clip_cov", "dppo", "gmpo", "gdpo", "gpg", "gspo", "kl_cov", "luspo", "maxrl", "ppo", "sapo"]
    others += ["dro", "grpo_passk", "opo", "vapo", "vespo"]
    assert {*clipped, *others, "dpo", "sft"} <= set(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resolving_is_idempotent_and_leaves_null_only_what_cannot_matter(name: str) -> None:
    resolved = resolve(AlgorithmConfig(name=name))
    assert resolve(resolved) == resolved
    kind = type(build(resolved, ROLLOUT))
    for item in fields(AlgorithmConfig):
        if getattr(resolved, item.name) is None:
            unread = item.name in READ and item.name not in LOSSES[resolved.policy_loss or "vanilla"].keys
            idle = item.name in kind.unused or item.name in ("loss_norm_length", "advantage_eps", "value_lam") or unread
            idle |= item.name in ("gamma", "lam_length_alpha") and not kind.needs_values
            idle |= item.name == "lam" and not (kind.needs_values and resolved.lam_length_alpha == 0)
            assert idle, f"{name} leaves {item.name} open"


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "dpo"])  # of pairs: test_dpo.py
def test_contract(name: str) -> None:
    algorithm = build(AlgorithmConfig(name=name), ROLLOUT)
    assert isinstance(algorithm, Algorithm)
    assert not algorithm.needs_reference
    assert not algorithm.needs_proximal
    batch = replace(make_batch(), ref_logprobs_R=None, proximal_logprobs_R=None)
    outcome_N = advantages_of(algorithm, batch)
    assert outcome_N.dtype == torch.float64
    assert outcome_N.shape == (12,)
    algorithm.advantages(batch, outcome_N, alone)
    batch.current_logprobs_R = batch.rollout_logprobs_R
    algorithm.weigh(batch, alone)
    for value_R in (batch.advantages_R, batch.weights_R, batch.metric_weights_R):
        assert value_R is not None
        assert value_R.dtype == torch.float32
        assert value_R.shape == batch.response_mask_R.shape
        assert (value_R[~batch.response_mask_R] == 0).all()
    logprobs_R = (batch.rollout_logprobs_R * 0.9).requires_grad_()
    loss, metrics = algorithm.loss(logprobs_R, torch.ones_like(logprobs_R), batch)
    assert loss.shape == ()
    assert loss.requires_grad
    for key, value in metrics.items():
        assert value.shape == (), key
        assert not value.requires_grad, key
        assert torch.isfinite(value), key
    assert {"actor/loss", "actor/entropy"} <= metrics.keys()
    assert metrics["actor/entropy"].item() == pytest.approx(1.0)


def test_metrics_by_hand() -> None:
    # every trained token is 0.1 nats less likely than when it was sampled: KL(old || pi) is 0.1, every ratio e^-0.1
    algorithm = build(AlgorithmConfig(), ROLLOUT)
    batch = make_batch()
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    algorithm.weigh(batch, alone)
    _, metrics = algorithm.loss(batch.rollout_logprobs_R - 0.1, torch.full_like(batch.rollout_logprobs_R, 2.0), batch)
    ratios = [f"actor/ratio_{kind}" for kind in ("mean", "min", "max")]
    assert [metrics[key].item() for key in ratios] == pytest.approx([math.exp(-0.1)] * 3, rel=FP32)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(0.1, rel=FP32)
    assert metrics["actor/entropy"].item() == pytest.approx(2.0)
    assert metrics["actor/pg_clipfrac"].item() == 0
    _, metrics = algorithm.loss(batch.rollout_logprobs_R + 0.1, torch.zeros_like(batch.rollout_logprobs_R), batch)
    assert [metrics[key].item() for key in ratios] == pytest.approx([math.exp(0.1)] * 3, rel=FP32)


def test_loss_norm_length_is_the_response_length_unless_given() -> None:
    batch = make_batch()
    sums = []
    for length in (None, 14):
        build(AlgorithmConfig(name="dr_grpo", loss_norm_length=length), ROLLOUT).weigh(batch, alone)
        sums.append(batch.weights_R.sum().item())  # type: ignore[union-attr]
    trained = batch.response_mask_R.sum().item()
    num_sequences = batch.sequence_R[batch.response_mask_R].unique().numel()
    assert sums == pytest.approx([trained / num_sequences / 7, trained / num_sequences / 14])


def test_the_parts_of_the_loss_add_up_to_it() -> None:
    config = AlgorithmConfig(name="grpo", kl_in="loss", kl_coef=0.3, entropy_coef=0.2)
    algorithm = build(config, ROLLOUT)
    batch = make_batch()
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    algorithm.weigh(batch, alone)
    logprobs_R = batch.rollout_logprobs_R * 0.9
    _, metrics = algorithm.loss(logprobs_R, torch.rand_like(logprobs_R), batch)
    total = metrics["actor/pg_loss"] + 0.3 * metrics["actor/kl_loss"] - 0.2 * metrics["actor/entropy_loss"]
    assert metrics["actor/loss"].item() == pytest.approx(total.item(), rel=FP32)


def test_what_each_learns_from() -> None:
    built = {name: build(AlgorithmConfig(name=name), ROLLOUT) for name in ALGORITHMS}
    assert {name: one.learns_from for name, one in built.items() if one.supervised} == {
        "dpo": "pairs",
        "sft": "responses",
    }
    assert [built[name].num_samples for name in ("grpo", "sft", "dpo")] == [3, 1, 2]


def test_needs_follow_the_config() -> None:
    assert build(AlgorithmConfig(kl_in="loss"), ROLLOUT).needs_reference
    assert build(AlgorithmConfig(name="reinforce_pp", kl_in="reward"), ROLLOUT).needs_reference
    assert build(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(bypass_mode=False)), ROLLOUT).needs_proximal


def test_kl_in_the_reward_is_reported_as_a_token_mean() -> None:
    config = AlgorithmConfig(name="reinforce_pp", kl_in="reward", kl_estimator="k1")
    algorithm = build(config, ROLLOUT)
    batch = make_batch()
    algorithm.weigh(batch, alone)
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    _, metrics = algorithm.loss(batch.rollout_logprobs_R, torch.zeros_like(batch.rollout_logprobs_R), batch)
    want = (batch.rollout_logprobs_R - batch.ref_logprobs_R)[batch.response_mask_R].mean()  # type: ignore[operator]
    assert metrics["actor/reward_kl_penalty"].item() == pytest.approx(want.item(), rel=FP32)


def test_overlong_penalty_shapes_the_reward_and_masking_narrows_the_mask() -> None:
    overlong = OverlongConfig(buffer_length=4, penalty=2.0, mask_truncated=True)
    algorithm = build(AlgorithmConfig(overlong=overlong), ROLLOUT)
    outcomes = Outcomes(
        torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.tensor([3, 5, 7]), torch.tensor([False, False, True])
    )
    assert algorithm.shape_rewards(outcomes).tolist() == [1.0, 0.0, -1.0]
    batch = make_batch(seed=1)
    before_R, cut_R = batch.response_mask_R.clone(), batch.truncated_B[batch.sequence_R]  # type: ignore[index]
    algorithm.advantages(batch, advantages_of(algorithm, batch), alone)
    assert cut_R.any()
    assert torch.equal(batch.response_mask_R, before_R & ~cut_R)
    batch.truncated_B = None
    with pytest.raises(RuntimeError, match="truncated_B is not set"):
        algorithm.advantages(batch, torch.zeros(12), alone)


def test_gdpo_keeps_a_group_whose_total_is_equal_and_normalises_each_reward() -> None:
    algorithm = build(AlgorithmConfig(name="gdpo", dynamic_sampling=True), ROLLOUT)
    parts = {"a": torch.tensor([1.0, 0.0, 1.0, 1.0]), "b": torch.tensor([0.0, 1.0, 1.0, 1.0])}
    outcomes = Outcomes(
        torch.tensor([1.0, 1.0, 2.0, 2.0]),
        torch.tensor([1, 1, 2, 2]),
        torch.tensor([1, 7, 1, 1]),
        torch.zeros(4, dtype=torch.bool),
        parts,
        {"a": 1.0, "b": 1.0},
    )
    assert algorithm.informative_groups(outcomes).tolist() == [True, True, False, False]
    assert algorithm.outcome_advantages(outcomes).tolist() == [0] * 4  # +1 -1 and -1 +1
    weighed = replace(outcomes, part_weights={"a": 3.0, "b": 1.0})
    assert algorithm.outcome_advantages(weighed).sign().tolist() == [1, -1, 0, 0]
    assert algorithm.outcome_advantages(replace(weighed, part_weights={"a": 0.0, "b": 1.0})).sign()[0] == -1
    config = AlgorithmConfig(name="gdpo", overlong=OverlongConfig(buffer_length=3))
    long = build(config, ROLLOUT)  # the penalty of the second sample is a reward of its own
    assert long.outcome_advantages(outcomes).sign().tolist() == [1, -1, 0, 0]


def test_dynamic_sampling_keeps_groups_whose_rewards_differ() -> None:
    algorithm = build(AlgorithmConfig(name="dapo"), ROLLOUT)
    assert algorithm.config.dynamic_sampling
    outcomes = Outcomes(
        torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([1, 1, 2, 2]), torch.ones(4), torch.zeros(4, dtype=torch.bool)
    )
    assert algorithm.informative_groups(outcomes).tolist() == [False, False, True, True]


def test_a_phase_that_did_not_run_is_named() -> None:
    algorithm = build(AlgorithmConfig(), ROLLOUT)
    with pytest.raises(RuntimeError, match="weights_R is not set"):
        algorithm.loss(torch.zeros(1), torch.zeros(1), make_batch())
    assert required(0, "zero") == 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"name": "gropo"}, "Did you mean 'grpo'"),
        ({"name": "torch:Tensor"}, "expected a subclass"),
        ({"clip_low": 0.0}, "clip_low=0.0 is out of range"),
        ({"clip_low": 1.1}, "clip_low=1.1 is out of range"),
        ({"clip_high": -0.1}, "clip_high=-0.1 is out of range"),
        ({"clip_high": float("nan")}, "clip_high=nan is out of range"),
        ({"clip_high": float("inf")}, "clip_high=inf is out of range"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 is out of range"),
        ({"advantage_eps": 0.0}, "advantage_eps=0.0 is out of range"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1 is out of range"),
        ({"kl_in": "loss", "kl_coef": -1.0}, "kl_coef=-1.0 is out of range"),
        ({"dynamic_sampling": True, "max_sampling_rounds": 0}, "max_sampling_rounds=0 is out of range"),
        ({"name": "dr_grpo", "loss_norm_length": 0}, "loss_norm_length=0 is out of range"),
        ({"overlong": OverlongConfig(buffer_length=-1)}, "overlong.buffer_length=-1 is out of range"),
        ({"overlong": OverlongConfig(buffer_length=3, penalty=0.0)}, "overlong.penalty=0.0 is out of range"),
        ({"overlong": OverlongConfig(buffer_length=8)}, "longer than rollout.response_length=7"),
        ({"kl_in": "reward"}, "kl_in='reward' does not work with algorithm.name='grpo'"),
        ({"name": "opo", "advantage_std": "none"}, "advantage_std=none would have no effect"),
        ({"name": "maxrl", "advantage_std": "none"}, "advantage_std=none would have no effect"),
        ({"name": "dr_grpo", "advantage_std_over": "batch"}, "advantage_std_over=batch would have no effect"),
        ({"name": "reinforce_pp", "advantage_std_over": "batch"}, "advantage_std_over=batch would have no effect"),
        ({"kl_unbiased": True}, "kl_unbiased=True would have no effect because algorithm.kl_in is 'none'"),
        (
            {"name": "reinforce_pp", "kl_in": "reward", "kl_estimator": "k3+"},
            "Set algorithm.kl_estimator=k3, which has the same value",
        ),
        ({"kl_coef": 0.1}, "kl_coef=0.1 would have no effect because algorithm.kl_in is 'none'"),
        ({"kl_estimator": "k1"}, "kl_estimator=k1 would have no effect"),
        (
            {"name": "reinforce_pp", "kl_in": "reward", "kl_coef": 0.0, "kl_ctrl": KlCtrlConfig(type="adaptive")},
            "kl_ctrl.type=adaptive would have no effect because algorithm.kl_coef is 0",
        ),
        ({"max_sampling_rounds": 3}, "max_sampling_rounds=3 would have no effect"),
        ({"loss_norm_length": 7}, "loss_norm_length=7 would have no effect"),
        ({"name": "dr_grpo", "advantage_eps": 1e-4}, "advantage_eps=0.0001 would have no effect"),
        ({"overlong": OverlongConfig(penalty=2.0)}, "overlong.penalty=2.0 would have no effect"),
        ({"name": "reinforce_pp", "singleton_group": "zero"}, "singleton_group=zero would have no effect"),
        ({"name": "sft", "kl_in": "loss"}, "kl_in=loss would have no effect because algorithm.name is 'sft'"),
        ({"name": "sft", "clip_low": 0.1}, "clip_low=0.1 would have no effect"),
        ({"name": "sft", "overlong": OverlongConfig(mask_truncated=True)}, "algorithm.overlong would have no effect"),
    ],
    ids=str,
)
def test_contradictions_are_refused(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        build(AlgorithmConfig(**knobs), ROLLOUT)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_one_sample_per_prompt_needs_a_policy() -> None:
    single = RolloutConfig(n=1)
    with pytest.raises(UserError, match="groups of one sample"):
        build(AlgorithmConfig(), single)
    build(AlgorithmConfig(singleton_group="reward"), single)
    build(AlgorithmConfig(name="reinforce_pp"), single)
    with pytest.raises(UserError, match="that is every group"):
        build(AlgorithmConfig(name="dapo", singleton_group="zero"), single)


class Open(Algorithm):
    """An algorithm from outside that names one default."""

    defaults = {"loss_aggregation": "token_mean"}  # noqa: RUF012
    shape_rewards = outcome_advantages = advantages = loss = lambda self, *given: None


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "maxrl", "gdpo", "opo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("singleton", ["error", "zero", "reward"])
def test_the_only_sample_of_a_group_that_has_a_score_teaches_nothing(name: str, singleton: str) -> None:
    built = build(AlgorithmConfig(name=name, singleton_group=singleton), RolloutConfig(n=3, response_length=8))
    rewards_N, lens_N = torch.tensor([0.0, 1.0, 0.5, 7.0]).double(), torch.ones(4).long()
    parts = {"r": rewards_N}
    group_id_N = torch.tensor([0, 0, 0, 1])
    advantages_N = built.outcome_advantages(
        Outcomes(rewards_N, group_id_N, lens_N, torch.zeros(4).bool(), parts, {"r": 1.0})
    )
    others_N = built.outcome_advantages(
        Outcomes(rewards_N[:3], group_id_N[:3], lens_N[:3], torch.zeros(3).bool(), {"r": rewards_N[:3]}, {"r": 1.0})
    )
    assert advantages_N[3] == pytest.approx(0.0, abs=1e-12)
    assert advantages_N[:3].sign().tolist() == others_N.sign().tolist() == [-1.0, 1.0, 0.0]


def test_an_algorithm_from_a_dotted_path_needs_no_defaults_and_null_is_what_it_does_not_read() -> None:
    filled = resolve(AlgorithmConfig(name=f"{__name__}:Open"))
    assert (filled.loss_aggregation, filled.dynamic_sampling) == ("token_mean", False)
    assert (filled.advantage_std, filled.policy_loss, filled.clip_low) == (None, None, None)
    assert resolve(filled) == filled
