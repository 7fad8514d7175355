"""What is passed on reaches Megatron, which does with it what it says; a refusal of Megatron's own names the keys."""

import pytest
import torch

from mrl.config.megatron_fields.installed import CLASSES, fields_of
from mrl.config.megatron_fields.table import FREE, MRL_DEFAULTS
from mrl.errors import UserError
from mrl.megatron.checkpoint import load, save
from mrl.megatron.config_passthrough import explain_errors, megatron_values
from mrl.megatron.model import TransformerConfig
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, CONSTANT, MIXTURES, adam_steps, full_weights, make_policy, train
from tests.megatron.trainings import assert_same, run
from tests.ranks import run_ranks

FREELY = {
    section: {name: not fields_of(section)[name].default for name in FREE[section].split()}
    for section in CLASSES
}  # fmt: skip
"""Every free field turned round; without decay, decoupled or not is the same."""


def test_free_fields_and_finer_recompute_change_no_number():
    plain = run(ARCHS["qwen3"], ParallelLayout(2), actor={"overlap_grad_reduce": True})
    transformer = {
        **FREELY["transformer"],
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "mlp"],
    }
    ddp = {**FREELY["ddp"], "bucket_size": 5000, "pad_buckets_for_high_nccl_busbw": True}
    passed = {"transformer": transformer, "ddp": ddp, "optimizer": FREELY["optimizer"]}
    assert sum(map(len, FREELY.values())) > 5
    assert_same(run(ARCHS["qwen3"], ParallelLayout(2), actor={"overlap_grad_reduce": True}, megatron=passed), plain)


@pytest.mark.skipif("mlp_chunks_for_training" not in fields_of("transformer"), reason="needs megatron-core 0.18")
@pytest.mark.parametrize("grid", [ParallelLayout(1), ParallelLayout(2, tp=2)], ids=str)
def test_an_mlp_in_chunks_changes_no_number(grid):
    plain = run(ARCHS["qwen3"], grid)
    assert_same(run(ARCHS["qwen3"], grid, megatron={"transformer": {"mlp_chunks_for_training": 3}}), plain)


def _skips(folder, threshold):
    """Weights before and after two updates above a threshold, their metrics, and Adam's steps after a resume."""
    optimizer = {"grad_norm_skip_threshold": threshold}
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1), megatron={"optimizer": optimizer})
    policy.start_optimizer(CONSTANT)
    before = full_weights(policy)
    metrics = train(policy, 2)
    save(folder, policy)
    again = make_policy(ARCHS["qwen2"], ParallelLayout(1), seed=None, megatron={"optimizer": optimizer})
    again.start_optimizer(CONSTANT)
    load(folder, again)
    changed = any(not torch.equal(tensor, before[name]) for name, tensor in full_weights(policy).items())
    return changed, [each["actor/update_skipped"] for each in metrics], {float(step) for step in adam_steps(again)}


@pytest.mark.skipif("grad_norm_skip_threshold" not in fields_of("optimizer"), reason="needs megatron-core 0.18")
def test_an_update_above_the_threshold_is_skipped_and_reported(tmp_path):
    assert run_ranks(1, _skips, tmp_path / "a", 1e-9) == [(False, [1.0, 1.0], {0.0})]
    assert run_ranks(1, _skips, tmp_path / "b", 1e9) == [(True, [0.0, 0.0], {2.0})]


@pytest.mark.slow
def test_experts_are_recomputed_as_they_were():
    modules = {"recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}
    grid = ParallelLayout(2, ep=2)
    plain = run(MIXTURES["qwen3_moe"], grid)
    assert_same(run(MIXTURES["qwen3_moe"], grid, megatron={"transformer": modules}), plain)


def _told(megatron):
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1), megatron=megatron)
    told = policy.chunks[0].config, policy._data_parallel.chunks[0].ddp_config
    policy.start_optimizer(CONSTANT)
    return told[0].bias_dropout_fusion, told[1].grad_reduce_in_fp32, policy.optimizer.config.decoupled_weight_decay


def test_each_section_reaches_its_class():
    passed = {
        "transformer": {"bias_dropout_fusion": True},
        "ddp": {"grad_reduce_in_fp32": False},
        "optimizer": {"decoupled_weight_decay": False},
    }
    assert run_ranks(1, _told, {}) == [(False, True, True)]
    assert run_ranks(1, _told, passed) == [(True, False, False)]


def _without():
    """mrl's own values, as Megatron has them where nothing is passed on."""
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1))
    policy.start_optimizer(CONSTANT)
    wrapped = policy._data_parallel.chunks[0]
    told = {"transformer": wrapped.config, "ddp": wrapped.ddp_config, "optimizer": policy.optimizer.config}
    return {(section, name): getattr(told[section], name) for section, name in MRL_DEFAULTS}


def test_own_values_are_those_that_megatron_has_without_any():
    assert run_ranks(1, _without) == [MRL_DEFAULTS]


def _refused(megatron):
    with pytest.raises(UserError) as caught:
        make_policy(ARCHS["qwen2"], ParallelLayout(1), megatron=megatron)
    assert caught.value.on_all_ranks
    return str(caught.value)


@pytest.mark.parametrize(
    ("megatron", "said"),
    [
        (
            {"transformer": {"recompute_granularity": "selective", "recompute_modules": ["mpl"]}},
            ("Invalid choices for recompute_modules", "megatron.transformer.recompute_modules"),
        ),
        (
            {"transformer": {"recompute_granularity": "full"}},
            ("recompute_method must be", "The config sets megatron.transformer.recompute_granularity: change or"),
        ),
        (
            {"transformer": {"apply_rope_fusion": True}},
            ("megatron.transformer.apply_rope_fusion needs TransformerEngine",),
        ),
        ({"ddp": {"nccl_ub": True}}, ("megatron.ddp.nccl_ub needs TransformerEngine",)),
    ],
)
def test_a_refusal_of_megatrons_own_names_the_keys(megatron, said):
    (told,) = run_ranks(1, _refused, megatron)
    assert all(words in told for words in said), told


def test_what_megatron_did_not_raise_is_left_alone():
    with pytest.raises(ValueError, match="mine"), explain_errors("transformer", ["fp8"]):
        raise ValueError("mine")
    with pytest.raises(ValueError, match="recompute_method"), explain_errors("transformer", []):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, recompute_granularity="full")


def test_names_become_megatrons_objects():
    made = megatron_values(
        "transformer", {"attention_backend": "flash", "autocast_dtype": "bf16", "window_size": [4, 0]}
    )
    assert made["attention_backend"].name == "flash" and made["autocast_dtype"] is torch.bfloat16
    assert made["window_size"] == (4, 0)
    assert megatron_values("optimizer", {"exp_avg_dtype": "fp8"}) == {"exp_avg_dtype": torch.uint8}
