"""Predicted seconds are operations and bytes over rates, by hand."""

import math
from dataclasses import replace

import pytest

from mrl.commands.plan.durations import predict_durations
from mrl.commands.plan.memory import num_parameters, stage_memory
from mrl.commands.plan.published import DECODE, PREFILL, SYNCS, at_peak, at_published, training
from mrl.commands.plan.weight_sync_cost import predict_refit
from mrl.config.config import load
from mrl.observability.hardware import HARDWARE
from mrl.observability.metrics import forward_flops
from mrl.resharding.lora import num_parameters as num_adapters
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

H100 = HARDWARE["h100"]
DENSE = ROOT / "configs" / "grpo_qwen3-8b_1x8_tp2.yaml"
MIXTURE = ROOT / "configs" / "dapo_qwen3-30b-a3b_4x8_tp2ep8.yaml"
STAGED = ROOT / "configs" / "grpo_llama3.1-70b_8x8_tp8pp4.yaml"


def test_an_update_is_its_operations_over_the_rate_that_is_reached():
    found = resolve(load(DENSE), 8)
    times = predict_durations(found, H100, 54)
    # three answers of 4096 tokens fit a microbatch with their prompt of 1024, which is computed once for them
    prompt, whole = (forward_flops(found.arch, [length]) for length in (1024, 5120))
    rate = 8 * H100.bf16_flops * H100.train_flops_frac
    forward = (1024 * (whole - prompt) + math.ceil(1024 / 3) * prompt) / rate
    assert math.isclose(times.update, 4 * forward)  # forward, backward of twice that, and once more recomputed
    assert math.isclose(times.score, forward)  # the reference
    assert times.bubble_frac == 0
    assert math.isclose(
        predict_durations(resolve(load(DENSE, ["actor.recompute=none"]), 8), H100, 54).update, 3 * forward
    )
    alone = predict_durations(resolve(load(DENSE, ["actor.use_prefix_grouper=false"]), 8), H100, 54)
    assert math.isclose(alone.score, 1024 * whole / rate)


def test_frozen_weights_have_one_product_less_and_engines_get_all_weights():
    full, adapted = (
        resolve(load(DENSE, ["actor.recompute=none", "actor.use_prefix_grouper=false", f"actor.lora.rank={rank}"]), 8)
        for rank in (0, 32)
    )
    more, less = (predict_durations(plan, H100, 54) for plan in (full, adapted))
    tokens = 1024 * 5120
    rate = 8 * H100.bf16_flops * H100.train_flops_frac
    weights = num_parameters(full.arch) - full.arch.vocab_size * full.arch.hidden_size  # the embedding is a look-up
    assert math.isclose(more.update - less.update, 2 * weights * tokens / rate, rel_tol=1e-3)
    assert (more.score, more.decode) == (less.score, less.decode)
    costs = [predict_refit(plan.config, plan.arch, plan.grid, H100).seconds for plan in (full, adapted)]
    assert costs[0] == costs[1]


def test_a_sync_of_adapters_alone_sends_what_engines_store_of_them():
    """Each replica of two ranks has all of q's lora_A twice, and its lora_B once; layers may be named one by one."""
    named = [f"layers.{layer}.self_attn.q_proj" for layer in range(36)]
    shape = 36 * 32 * (2 * 4096 + 4096)
    for modules in (["q_proj"], named):
        settings = ["actor.lora.rank=32", "actor.lora.merge=false", f"actor.lora.target_modules={modules}"]
        plan = resolve(load(DENSE, ["rollout.name=native", "rollout.tensor_model_parallel_size=2", *settings]), 8)
        found = predict_refit(plan.config, plan.arch, plan.grid, H100)
        total = found.traffic.total
        assert total.local + total.intra_node + total.inter_node == 2 * 4 * shape
        assert num_adapters(plan.arch, plan.config.actor.lora) == 36 * 32 * (4096 + 4096)


def test_stages_wait_for_each_other():
    found = resolve(load(STAGED), 64)
    times = predict_durations(found, H100, 100)
    # 128 prompts x 8 samples over 2, one sequence of 5120 tokens in a microbatch of 8192: 512 of them, 3 idle
    assert math.isclose(times.bubble_frac, 3 / 515)


def test_few_sequences_wait_for_weights_and_many_for_the_cache():
    found = resolve(load(DENSE, ["rollout.tensor_model_parallel_size=2"]), 8)
    few, many = (predict_durations(found, H100, rows) for rows in (1, 128))
    assert (few.bound_by, many.bound_by) == ("weights", "KV cache")
    assert (few.decode_steps, many.decode_steps) == (256 * 4096, 2 * 4096)
    weights = stage_memory(found.config, found.arch, found.grid)[0].engine - 151936 * 4096 // 2 * 2  # no embedding
    least = weights / (H100.memory_bytes_per_s * H100.decode_frac)
    assert least < few.decode / few.decode_steps < 1.2 * least


def test_one_token_reads_its_own_experts_only():
    found = resolve(load(MIXTURE), 32)
    one, many = (predict_durations(found, H100, rows) for rows in (1, 64))
    assert one.decode / one.decode_steps < many.decode / many.decode_steps / 3


def test_better_hardware_is_faster_and_assumptions_count():
    found = resolve(load(DENSE), 8)
    times = [predict_durations(found, HARDWARE[name], 54) for name in ("a100", "h100", "h200")]
    assert times[0].decode > times[1].decode > times[2].decode and times[0].update > times[1].update
    half = predict_durations(found, replace(H100, train_flops_frac=H100.train_flops_frac / 2), 54)
    assert math.isclose(half.update, 2 * times[1].update)


@pytest.mark.parametrize("path", [DENSE, MIXTURE])
def test_the_time_at_an_efficiency_is_the_time_at_the_peak_divided_by_it(path):
    found = resolve(load(path, ["rollout.tensor_model_parallel_size=1", "rollout.expert_parallel_size=1"]), 32)
    moe = found.arch.moe is not None
    peak, reached = (predict_durations(found, each, 54) for each in (at_peak(H100), at_published(H100, moe=moe)))
    assert math.isclose(reached.update, peak.update / training(moe=moe).efficiency)
    assert math.isclose(reached.score, peak.score / training(moe=moe).efficiency)
    assert math.isclose(reached.prefill, peak.prefill / PREFILL.efficiency)
    assert math.isclose(reached.decode, peak.decode / DECODE.efficiency)


def test_every_published_figure_is_a_fraction_or_a_rate_with_a_source():
    for one in (PREFILL, DECODE, training(moe=False), training(moe=True)):
        assert 0 < one.efficiency <= 1
    for one in (PREFILL, DECODE, training(moe=False), training(moe=True), *SYNCS):
        assert one.measured and one.source.title and one.source.url.startswith("https://")
        assert 2020 < one.source.year < 2030
    assert math.isclose(PREFILL.efficiency, 0.68, abs_tol=0.01) and math.isclose(DECODE.efficiency, 0.73, abs_tol=0.01)


def test_supervised_steps_sample_nothing():
    found = resolve(load(DENSE, ["algorithm.name=sft", "algorithm.kl_in=none", "~train.minibatch_size"]), 8)
    times = predict_durations(found, H100, 0)
    assert (times.prefill, times.decode, times.score) == (0, 0, 0) and times.update > 0
