"""DPO's losses, metrics and gradients are those of TRL's own code, in whatever order and parts the pairs come."""

import math
from collections import defaultdict
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from mrl.algorithms.base import Algorithm, build, resolve
from mrl.algorithms.dpo import pair_rows
from mrl.algorithms.functional.preferences import LOSSES
from mrl.config.config import AlgorithmConfig, DpoConfig, RolloutConfig
from mrl.errors import UserError
from mrl.types import RolloutBatch
from tests.algorithms.ragged import alone, make_batch, on_ranks

ROUNDING = 1e-6  # fp32 sums of up to seven log-probabilities of order 4, in another order
CONFIGS = [
    DpoConfig(),
    DpoConfig("sigmoid", beta=0.5, sft_loss_weight=0.3),
    DpoConfig("sigmoid_norm", beta=2.0),
    DpoConfig("ipo", beta=0.2),
    DpoConfig("hinge", beta=0.4),
    DpoConfig("robust", beta=0.3, label_smoothing=0.1),
    DpoConfig("apo_zero", beta=0.3, sft_loss_weight=1.0),
]
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
METRICS += ("logps/rejected", "entropy")


def make(config: DpoConfig) -> Algorithm:
    return build(AlgorithmConfig(name="dpo", dpo=config), RolloutConfig(response_length=7))


def pairs() -> RolloutBatch:
    return make_batch(num_groups=5, group_size=2)


def moved(batch: RolloutBatch) -> torch.Tensor:
    """Log-probabilities by a policy that is not the reference."""
    drawn = torch.randn(batch.rollout_logprobs_R.shape, generator=torch.Generator().manual_seed(8))
    return (batch.rollout_logprobs_R + 0.3 * drawn).requires_grad_()


def weighed(config: DpoConfig, batch: RolloutBatch) -> tuple[Algorithm, RolloutBatch]:
    algorithm = make(config)
    batch = replace(batch)
    algorithm.weigh(batch, alone)
    return algorithm, batch


def padded(values_R: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """Of the sequences, the better ones first, [B, 1 + longest]: as TRL has them behind a prompt of one token."""
    rows = values_R.split(batch.response_lens_B.tolist())
    both = torch.nn.utils.rnn.pad_sequence([*rows[0::2], *rows[1::2]], batch_first=True)
    return torch.nn.functional.pad(both, (1, 0))


def by_trl(config: DpoConfig, batch: RolloutBatch, logprobs_R: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics by the method of TRL's trainer, whose model gives these log-probabilities."""
    from trl.trainer.dpo_trainer import DPOTrainer

    mask = padded(batch.response_mask_R, batch)
    trained = torch.where(batch.response_mask_R, logprobs_R, 0.0)
    reference = torch.where(batch.response_mask_R, batch.ref_logprobs_R, 0.0)
    ref_B = padded(reference, batch).sum(1)
    num = batch.num_sequences // 2
    outputs = SimpleNamespace(
        log_probs=padded(trained, batch)[:, 1:],
        entropy=torch.ones_like(mask[:, 1:], dtype=torch.float32),
        mean_logits=torch.zeros_like(mask[:, 1:], dtype=torch.float32),
        is_top1=mask[:, 1:],
    )

    def model(**_):
        return outputs

    model.training = True
    kinds, weights = [config.loss_type], [1.0]
    if config.sft_loss_weight:
        kinds, weights = [*kinds, "sft"], [*weights, config.sft_loss_weight]
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda value: value, gather=lambda value: value
    )
    trainer = SimpleNamespace(
        model=model, accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=kinds, loss_weights=weights, beta=config.beta,
        label_smoothing=config.label_smoothing, use_weighting=False, _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {
        "input_ids": mask.long(), "attention_mask": torch.ones_like(mask), "completion_mask": mask.long(),
        "ref_chosen_logps": ref_B[:num], "ref_rejected_logps": ref_B[num:],
    }  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss, {name: sum(value) / len(value) for name, value in trainer._metrics["train"].items() if name in METRICS}


@pytest.mark.skipif(
    Version(metadata.version("trl")) < Version("1.16"), reason="TRL before 1.16, the last for Python 3.10, takes logits"
)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_loss_gradient_and_metrics_are_those_of_trl(config):
    algorithm, batch = weighed(config, pairs())
    ours_R, theirs_R = moved(batch), moved(batch)
    loss, metrics = algorithm.loss(ours_R, torch.ones_like(ours_R), batch)
    expected, told = by_trl(config, batch, theirs_R)
    assert loss.item() == pytest.approx(expected.item(), rel=ROUNDING)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours_R.grad, theirs_R.grad, rtol=1e-5, atol=ROUNDING)
    for name in METRICS:
        ours = metrics["actor/entropy" if name == "entropy" else name].item()
        assert ours == pytest.approx(told[name], rel=ROUNDING, abs=ROUNDING), name


def test_every_loss_is_compared():
    assert {config.loss_type for config in CONFIGS} == set(LOSSES)


def test_at_the_reference_the_loss_is_that_of_a_coin():
    algorithm, batch = weighed(DpoConfig(beta=0.7), pairs())
    loss, metrics = algorithm.loss(batch.ref_logprobs_R.clone().requires_grad_(), torch.ones(1), batch)
    assert loss.item() == pytest.approx(math.log(2))
    assert metrics["rewards/margins"] == metrics["rewards/chosen"] == 0


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "parts",
    [[[8, 9, 2, 3, 0, 1], [6, 7, 4, 5]], [[1, 0, 4, 2, 3, 9, 8, 7, 6, 5]], [[9, 8], [0, 4, 1, 5], [7, 6, 2, 3]]],
)
def test_parts_and_order_change_nothing(config, parts):
    """Microbatches of whole pairs; inside one the sequences stand in any order."""
    algorithm, whole = weighed(config, pairs())
    whole.values_R = torch.linspace(0.1, 2.0, whole.response_mask_R.numel())
    loss, metrics = algorithm.loss(moved(whole), whole.values_R, whole)
    whole.advantages_R = moved(whole).detach()  # goes with its sequence
    found, told = 0.0, defaultdict(float)
    for rows in parts:
        part = whole.select(rows)
        value, numbers = algorithm.loss(part.advantages_R, part.values_R, part)
        found += value.item()
        for name, number in numbers.items():
            told[name] += number.item()
    assert found == pytest.approx(loss.item(), rel=1e-5, abs=ROUNDING)
    assert dict(told) == pytest.approx({name: value.item() for name, value in metrics.items()}, rel=1e-5, abs=ROUNDING)


def test_data_parallel_ranks_weigh_as_one():
    """Shares of different size, and one of nothing."""
    _, whole = weighed(CONFIGS[1], pairs())
    shares = [pairs().select(rows) for rows in ([0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9])]

    def weigh(part, reduce, rank):
        make(CONFIGS[1]).weigh(part, reduce)

    on_ranks(shares, weigh)
    for name in ("weights_R", "nll_weights_R", "metric_weights_R"):
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in shares]), getattr(whole, name))


def test_a_pair_that_was_torn_apart_is_no_pair():
    with pytest.raises(RuntimeError, match="without the other"):
        pair_rows(pairs().select([0, 1, 2, 5]))
    with pytest.raises(RuntimeError, match="without the other"):
        pair_rows(pairs().select([0, 1, 3]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dpo": DpoConfig(beta=0.0)}, "algorithm.dpo.beta=0.0 is out of range, expected a number above 0"),
        (
            {"dpo": DpoConfig("robust", label_smoothing=0.5)},
            r"label_smoothing=0.5 is out of range, expected a number in",
        ),
        ({"dpo": DpoConfig(label_smoothing=0.1)}, "algorithm.dpo.loss_type is not 'robust'"),
        ({"dpo": DpoConfig(sft_loss_weight=-1)}, "sft_loss_weight=-1 is out of range"),
        ({"kl_in": "loss"}, "algorithm.kl_in=loss would have no effect because algorithm.name is 'dpo'"),
        ({"clip_low": 0.1}, "algorithm.clip_low=0.1 would have no effect because algorithm.name is 'dpo'"),
        ({"loss_aggregation": "token_mean"}, "would have no effect because algorithm.name is 'dpo'"),
    ],
    ids=str,
)
def test_what_it_cannot_use_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        resolve(AlgorithmConfig(name="dpo", **given))


def test_others_do_not_read_its_fields():
    with pytest.raises(
        UserError, match=r"algorithm.dpo.beta=0.3 would have no effect because algorithm.name is 'grpo'"
    ):
        resolve(AlgorithmConfig(dpo=DpoConfig(beta=0.3)))
