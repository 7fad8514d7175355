"""The rollout correction against what verl 0.9.1's own code gave, and its rules.

`rollout_correction_verl-0.9.1.json` holds, for each config, what `compute_rollout_correction_and_rejection_mask`,
`compute_policy_loss_vanilla` and `compute_policy_loss_bypass_mode` return in float64 on the three sequences below, and
the fields of `RolloutCorrectionConfig`'s presets.
"""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from mrl.algorithms._rollout_correction import Correction
from mrl.algorithms.base import build, resolve
from mrl.algorithms.dapo import Dapo
from mrl.algorithms.functional.rollout_correction import Rejection, binary_kl, passes, statistic
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.algorithms.functional.train_infer_mismatch import (
    mismatch_metrics,
    mismatch_sums,
    off_policy_metrics,
    off_policy_sums,
)
from mrl.config.config import AlgorithmConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.config.verl_keys.verl_presets import PRESETS
from mrl.errors import UserError
from mrl.types import RolloutBatch
from tests.algorithms.ragged import alone
from tests.source import ROOT

VERL = json.loads((ROOT / "tests" / "algorithms" / "rollout_correction_verl-0.9.1.json").read_text())
SAME = 1e-7  # of numbers near 1: weights of the mean are fp32, verl adds 1e-8 to divisors
OF_EQUALS = 1e-5  # deviation of values that are all equal: the root of what verl's 1e-8 in the mean leaves
LENS = (5, 3, 4)
ROLLOUT = RolloutConfig(n=3, response_length=7)


def _golden() -> tuple[RolloutBatch, Tensor]:
    """The batch of the golden values, and the log-probabilities of the policy in training."""
    columns = []
    for i, length in enumerate(LENS):
        t = torch.arange(length, dtype=torch.float64)
        old = -(1.0 + 0.3 * torch.sin(1.0 + 2 * i + 3 * t))
        new = old + 0.4 * torch.cos(2.0 + 3 * i + t)
        columns.append(torch.stack([old, new, old - 0.3 * torch.sin(0.5 + i + 2.0 * t)]))
    old_R, new_R, rollout_R = torch.cat(columns, 1)
    response_lens_B = torch.tensor(LENS)
    batch = RolloutBatch(
        tokens_P=torch.zeros(sum(LENS) + 3, dtype=torch.int64),
        prompt_lens_B=torch.ones(3, dtype=torch.int64),
        response_lens_B=response_lens_B,
        response_mask_R=torch.ones(sum(LENS), dtype=torch.bool),
        rollout_logprobs_R=rollout_R,
        group_id_B=torch.zeros(3, dtype=torch.int64),
        rewards_B=torch.zeros(3),
        proximal_logprobs_R=old_R,
        advantages_R=torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64).repeat_interleave(response_lens_B),
    )
    return batch, new_R


def _section(config: dict[str, object], **more: object) -> RolloutCorrectionConfig:
    texts = {name: str(value) if "threshold" in name else value for name, value in config.items()}
    return RolloutCorrectionConfig(**(texts | more))  # type: ignore[arg-type]


def _run(section: RolloutCorrectionConfig, **algorithm: object) -> tuple[float, dict[str, float], Tensor]:
    """Loss, metrics and gradient of the golden batch."""
    clips = {} if section.loss_type == "reinforce" else {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    config = AlgorithmConfig(name="dapo", rollout_correction=section, **(clips | algorithm))  # type: ignore[arg-type]
    made = build(config, ROLLOUT)
    batch, new_R = _golden()
    if made.needs_proximal:
        made.correction.measure(batch, alone)  # type: ignore[attr-defined]
    if made.needs_current:
        batch.current_logprobs_R = new_R
    made.weigh(batch, alone)
    logprobs_R = new_R.clone().requires_grad_()
    loss, metrics = made.loss(logprobs_R, torch.zeros_like(new_R), batch)
    (grad_R,) = torch.autograd.grad(loss, logprobs_R)
    return loss.item(), made.finalize_metrics({name: value.item() for name, value in metrics.items()}), grad_R


def _flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


def _finite(value: float) -> float:
    """verl divides 0 by 0 where nothing is kept; mrl's loss is 0 then."""
    return 0.0 if math.isnan(value) else value


@pytest.mark.parametrize("name", VERL["decoupled"])
def test_decoupled_weights_and_masks_equal_verls(name: str) -> None:
    want = VERL["decoupled"][name]
    batch, _ = _golden()
    correction = Correction(_section(want["config"], bypass_mode=False))
    correction.measure(batch, alone)
    got = correction.for_microbatch(batch, torch.zeros(sum(LENS)))
    if want["weights"] is None:
        assert got.weights_R is None
    else:
        torch.testing.assert_close(got.weights_R, _flat(want["weights"]), rtol=SAME, atol=SAME)
    assert (got.kept_R is None) == (want["keep"] is None)
    if got.kept_R is not None:
        assert got.kept_R.tolist() == _flat(want["keep"]).bool().tolist()


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode in ("decoupled", "bypass") for name in VERL[mode]])
def test_loss_gradient_and_metrics_equal_verls(mode: str, name: str, denominator: str) -> None:
    want = VERL[mode][name]
    has_tests = "rollout_rs" in want["config"]
    if denominator == "kept" and not has_tests:
        assert want["kept"] == want["all"]
        return
    more = {"bypass_mode": mode == "bypass"} | ({"rollout_rs_denominator": denominator} if has_tests else {})
    loss, metrics, grad_R = _run(_section(want["config"], **more))
    want_loss, want_grads = want[denominator]
    assert loss == pytest.approx(_finite(want_loss), abs=SAME)
    torch.testing.assert_close(grad_R, _flat(want_grads).nan_to_num(), rtol=SAME, atol=SAME)
    for key, value in want["metrics"].items():
        bound = OF_EQUALS if key.endswith("_std") and value < OF_EQUALS else SAME
        assert metrics[key] == pytest.approx(value, rel=SAME, abs=bound), key
    assert not [key for key in metrics if key.startswith("tally/")]


def test_off_policy_metrics_equal_verls_and_add_up() -> None:
    batch, _ = _golden()
    actor_R = batch.proximal_logprobs_R
    sums, largest = mismatch_sums(batch.rollout_logprobs_R, actor_R, batch.response_mask_R)
    parts = []
    for rows in ([2], [0, 1], []):
        part = batch.select(rows)
        sequences = Sequences(part.response_mask_R, part.sequence_R, len(rows))
        parts.append(off_policy_sums(part.rollout_logprobs_R, part.proximal_logprobs_R, sequences))
    more, extremes = sum(part[0] for part in parts), torch.stack([part[1] for part in parts]).amax(0)
    got = mismatch_metrics(sums, largest) | off_policy_metrics(more, extremes, float(sums[0]))
    for key, value in VERL["off_policy"].items():
        assert got[key] == pytest.approx(value, rel=SAME, abs=SAME), key


def test_presets_set_what_verls_class_methods_set() -> None:
    for name, want in VERL["presets"].items():
        acting = RolloutCorrectionConfig(preset=name).resolved
        got = {key: getattr(acting, key) for key in want}
        if want["rollout_is"] is None:
            got["rollout_is_threshold"] = want["rollout_is_threshold"]
        assert {key: str(value) for key, value in got.items()} == {key: str(value) for key, value in want.items()}
    assert set(VERL["presets"]) == set(PRESETS)


KEPT = {
    ("token_k1", "0.9_1.2"): [[0, 0, 0, 1, 0], [0, 1, 0], [0, 0, 1, 0]],
    ("seq_mean_k1", "0.95_1.05"): [[0] * 5, [1] * 3, [1] * 4],
    ("seq_sum_k1", "0.5_2.0"): [[1] * 5, [1] * 3, [1] * 4],
    ("seq_mean_k3", "0.02"): [[0] * 5, [0] * 3, [0] * 4],
    ("seq_max_k3", "0.04"): [[1] * 5, [0] * 3, [1] * 4],
    ("token_k3", "0.02"): [[1, 1, 0, 1, 0], [0, 1, 0], [1, 0, 1, 0]],
}
"""Test and bounds -> what verl 0.9.1's `compute_rollout_rejection_mask` keeps of the golden batch."""


@pytest.mark.parametrize(("test", "bounds"), KEPT)
def test_each_golden_rejection_keeps_what_verl_keeps(test: str, bounds: str) -> None:
    batch, _ = _golden()
    correction = Correction(_section({"rollout_rs": test, "rollout_rs_threshold": bounds}, bypass_mode=False))
    kept_R = correction.for_microbatch(batch, torch.zeros(sum(LENS))).kept_R
    assert kept_R is not None
    assert kept_R.tolist() == _flat(KEPT[test, bounds]).bool().tolist()


def test_k1_bounds_the_samplers_probability_over_the_actors() -> None:
    """0.1_1.2 keeps a token that the actor finds 1.5 times as likely, and rejects one half as likely."""
    correction = Correction(RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.1_1.2"))
    (test,) = correction.spec.rejections
    ratios_R = torch.tensor([1.5, 0.5], dtype=torch.float64).log()
    sequences = Sequences(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    assert passes(test, statistic(test, ratios_R, torch.zeros(2), sequences)).tolist() == [True, False]


def test_binary_kl_is_the_larger_of_both_directions() -> None:
    p, q = 0.9, 0.2
    forward = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    reverse = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    got = binary_kl(torch.tensor([p, q, 1.0]).double().log(), torch.tensor([q, p, 1.0]).double().log())
    torch.testing.assert_close(got, torch.tensor([max(forward, reverse)] * 2 + [0.0], dtype=torch.float64))
    test = Rejection("binary_kl", "token", "binary_kl", 1.2)
    assert forward < 1.2 < reverse or reverse < 1.2 < forward
    assert passes(test, got).tolist() == [False, False, True]


@pytest.mark.parametrize("threshold", [0.0, 0.03, 10.0])
def test_the_off_policy_mask_drops_the_policy_loss_of_bad_responses_that_drifted(threshold: float) -> None:
    """As `get_off_policy_mask` of TRL 1.16's GRPOTrainer, which multiplies the policy's loss alone."""
    batch, new_R = _golden()
    keep = []
    for logs, sampled, advantage in zip(
        new_R.split(LENS), batch.rollout_logprobs_R.split(LENS), (1.0, -0.5, 0.25), strict=True
    ):
        keep += [float(advantage >= 0 or (sampled - logs).mean() <= threshold)] * len(logs)
    plain, _, plain_R = _run(RolloutCorrectionConfig(), entropy_coef=0.0)
    got, _, got_R = _run(RolloutCorrectionConfig(off_policy_mask_threshold=threshold))
    torch.testing.assert_close(got_R, plain_R * torch.tensor(keep))
    assert (got == plain) == (min(keep) == 1)


def test_rejected_tokens_weigh_in_the_mean_unless_only_kept_ones_count() -> None:
    section = {"bypass_mode": False, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.2"}
    counted, _, counted_R = _run(_section(section))
    alone_, metrics, alone_R = _run(_section(section, rollout_rs_denominator="kept"))
    kept = sum(sum(row) for row in VERL["decoupled"]["token_k1"]["keep"])
    assert counted * 12 == pytest.approx(alone_ * kept, rel=SAME)
    torch.testing.assert_close(counted_R * 12, alone_R * kept, rtol=SAME, atol=SAME)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - kept / 12)


def test_a_resolved_config_resolves_to_itself() -> None:
    for preset in ("decoupled_seq_is_rs", "bypass_pg_geo_rs_token_tis", "disabled", None):
        once = resolve(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(preset=preset)))
        assert resolve(once) == once
        assert once.rollout_correction.resolved == replace(once.rollout_correction.resolved)
    section = RolloutCorrectionConfig(preset="decoupled_seq_is_rs", rollout_is_threshold="3", rollout_rs_threshold="4")
    assert asdict(section.resolved) | {"bypass_mode": False} == asdict(section.resolved)
    assert section.resolved.rollout_is_threshold == "3" and section.resolved.rollout_rs == "seq_sum_k1"


IS = {"bypass_mode": False, "rollout_is": "token"}
RS = {"rollout_rs": "token_k1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "decoupled_geo"}, "preset='decoupled_geo' is unknown. Did you mean 'decoupled_geo_rs'"),
        ({"preset": "bypass_pg_is", "bypass_mode": False}, "bypass_mode=False contradicts .*which sets it to True"),
        ({"preset": "decoupled_geo_rs", "rollout_is": "token"}, "rollout_is=token contradicts .*leaves it null"),
        ({"preset": "decoupled_k3_rs", "rollout_is_threshold": "2"}, "rollout_is_threshold=2 would have no effect"),
        ({"rollout_is": "token"}, "rollout_is=token would have no effect because .*loss's ratio is the weight"),
        ({"rollout_is_threshold": "3"}, "rollout_is_threshold=3 would have no effect because .*rollout_is is null"),
        ({"rollout_is_batch_normalize": True}, "would have no effect because .*rollout_is is null"),
        ({"rollout_rs_threshold": "3"}, "rollout_rs_threshold=3 would have no effect because .*rollout_rs is null"),
        ({"rollout_rs_denominator": "kept"}, "would have no effect because .*rollout_rs is null"),
        ({"bypass_mode": False, "loss_type": "reinforce"}, "loss_type=reinforce would have no effect"),
        ({**IS, "rollout_is_threshold": "0"}, "rollout_is_threshold='0' is invalid, expected one number above 0"),
        ({**IS, "rollout_is_threshold": "True"}, "rollout_is_threshold='True' is invalid"),
        ({**IS, "rollout_is_threshold": "5_0.5"}, "rollout_is_threshold='5_0.5' is invalid"),
        ({**IS, "rollout_is_threshold": "-1_2"}, "rollout_is_threshold='-1_2' is invalid"),
        ({**IS, "rollout_is_threshold": "nan"}, "rollout_is_threshold='nan' is invalid"),
        (RS, "rollout_rs=token_k1 needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs": " , ", "rollout_rs_threshold": "1"}, "names no test"),
        (
            {"rollout_rs": "token_k4", "rollout_rs_threshold": "1"},
            "has unknown test 'token_k4', expected .*Did you mean 'token_k",
        ),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "1"}, "has unknown test 'seq_max_k1', expected"),
        ({**RS, "rollout_rs_threshold": "1,2"}, "has 2 bounds for 1 tests"),
        ({**RS, "rollout_rs_threshold": "0.5"}, "means the empty range 2 to 0.5"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "for token_k3 has two bounds"),
        ({"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold=-0.1 is out of range"),
    ],
)
def test_bad_sections_are_refused_with_what_was_expected(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**fields)))  # type: ignore[arg-type]


def test_a_loss_without_a_ratio_has_nothing_to_clip() -> None:
    section = RolloutCorrectionConfig(loss_type="reinforce")
    with pytest.raises(UserError, match=r"clip_low=0.1 would have no effect because algorithm.policy_loss is 'gpg'"):
        resolve(AlgorithmConfig(clip_low=0.1, rollout_correction=section))
    assert resolve(AlgorithmConfig(rollout_correction=section)).clip_low is None
    with pytest.raises(UserError, match="policy_loss=gspo conflicts with .*loss_type=reinforce, which sets the loss"):
        resolve(AlgorithmConfig(policy_loss="gspo", rollout_correction=section))
    assert isinstance(build(AlgorithmConfig(name="dapo", rollout_correction=section), ROLLOUT), Dapo)
    with pytest.raises(UserError, match="rollout_correction would have no effect because algorithm.name is 'sft'"):
        resolve(AlgorithmConfig(name="sft", rollout_correction=section))
