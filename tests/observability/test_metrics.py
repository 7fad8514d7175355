"""Metrics against values worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from mrl.models.base import ArchSpec, LinearAttentionSpec, MoeSpec
from mrl.models.hf_config import family_of
from mrl.models.presets import arch_from_preset
from mrl.observability import metrics
from mrl.types import Prompt, Rollout, SampleTable

COLUMNS = (*SampleTable.FACTS, "reward/exact_match")
EXACT = 1e-12  # fp64 arithmetic on a handful of numbers


def table():
    rows = [  # rank, uid, sample, prompt_len, response_len, reward, correct, failed, truncated, token_crc, part
        [0, 7, 1, 3, 4, 0.0, 0, 0, 1, 2.0**32 - 1, 0.0],
        [0, 7, 0, 3, 2, 1.0, 1, 0, 0, 3, 1.0],
        [1, 5, 0, 5, 6, 0.5, 0, 1, 0, 0, math.nan],
        [1, 5, 1, 5, 8, 0.5, 0, 0, 0, 0, 0.5],
    ]
    single = [1, 0, 0, -1, 1]  # num_turns, tool_calls, failed_calls, end, cached
    versions = [2, 2, 1]  # of the newest and the oldest token, and how many
    rows = [[*row[:10], row[4], *single, *versions, *row[10:]] for row in rows]
    return SampleTable(COLUMNS, torch.tensor(rows, dtype=torch.float64))


def test_outcome_metrics_by_hand():
    found = metrics.outcome_metrics(
        table(), rewards_N=torch.tensor([0.0, 0.0, 1.0, 2.0]), advantages_N=torch.tensor([-1.0, 0.0, 0.0, 1.0])
    )
    expected = {
        "critic/score/mean": 0.5, "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/mean": 0.75,
        "critic/advantages/min": -1.0, "prompt_length/mean": 4.0, "response_length/mean": 5.0,
        "response_length/clip_ratio": 0.25, "reward/exact_match/mean": 0.5,
        "rollout/token_checksum": 2.0,
        "group/zero_variance_frac": 0.5, "group/reward_std/mean": 0.25, "group/best/mean": 0.75,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=EXACT), name


def test_scoring_metrics_count_what_failed_and_what_has_no_score():
    assert metrics.scoring_metrics(table()) == {
        "reward/failed_frac": 0.25,
        "reward/num_missing": 0.0,
        "perf/reward/num_cached": 4.0,
    }
    assert metrics.scoring_metrics(without_score(0))["reward/num_missing"] == 1.0


def test_a_sample_without_a_score_is_in_no_held_out_mean():
    found = metrics.evaluation_metrics(without_score(0))  # of prompt 5, whose other sample has 0.5
    expected = {
        "val/accuracy": 1 / 3, "val/reward/mean": 0.5, "val/reward/min": 0.0, "val/num_prompts": 2.0,
        "val/num_missing": 1.0, "val/accuracy/mean@2": 0.25, "val/reward/best@2": 0.75,
        "val/response_length/mean": 14 / 3,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=EXACT), name


def without_score(row):
    """The table with no reward in that row of it."""
    changed = table()
    changed.rows_NC[row, COLUMNS.index("reward")] = math.nan
    return changed


def test_evaluation_metrics_by_hand():
    found = metrics.evaluation_metrics(table())
    expected = {
        "val/accuracy": 0.25, "val/reward/mean": 0.5, "val/num_prompts": 2.0, "val/accuracy/best@2": 0.5,
        "val/accuracy/mean@2": 0.25, "val/reward/best@2": 0.75, "val/response_length/clip_ratio": 0.25,
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=EXACT), name


def test_combine_takes_means_and_extremes():
    assert metrics.combine([{"a": 1.0, "b_max": 1.0, "c/min": 5.0}, {"a": 3.0, "b_max": 4.0, "c/min": 2.0}]) == {
        "a": 2.0,
        "b_max": 4.0,
        "c/min": 2.0,
    }


def rollout(**changes):
    return Rollout(Prompt(0, (1,), "p"), 0, [1], [0.0], "stop", 0, **changes)


def test_correct_is_what_the_first_function_says_of_a_sample_that_was_scored():
    assert metrics.is_correct(rollout(reward=-3.0, reward_parts={"exact": 1.0, "length": -4.0}))
    assert not metrics.is_correct(rollout(reward=2.0, reward_parts={"exact": 0.5, "length": 1.5}))
    assert not metrics.is_correct(rollout(reward_parts={"exact": 1.0}, reward_error="hangs"))


def test_wall_clock_names_are_told_from_deterministic_ones():
    assert all(map(metrics.is_wall_clock, ("timing_s/gen", "perf/throughput", "refit/copy_s")))
    assert not any(map(metrics.is_wall_clock, ("actor/pg_loss", "response_length/mean", "refit/bytes_moved")))


ARCH = ArchSpec(
    family="qwen2", num_layers=3, hidden_size=8, intermediate_size=16, num_heads=4, num_kv_heads=2, head_dim=4,
    vocab_size=50, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip


def counted_flops(length, arch=ARCH):
    """What torch itself counts for the same matrix products; attention as the lower triangle, row by row."""
    with FlopCounterMode(display=False) as counter:
        hidden = torch.zeros(length, ARCH.hidden_size)
        for _ in range(ARCH.num_layers):
            for rows in (16, 8, 8):
                hidden @ torch.zeros(ARCH.hidden_size, rows)
            for last in range(1, length + 1):
                for _ in range(ARCH.num_heads):
                    torch.zeros(1, last) @ torch.zeros(last, ARCH.head_dim)
                    torch.zeros(1, ARCH.head_dim) @ torch.zeros(ARCH.head_dim, last)
            torch.zeros(length, 16) @ torch.zeros(16, ARCH.hidden_size)
            for _ in range(2):
                hidden @ torch.zeros(ARCH.hidden_size, arch.intermediate_size)
            torch.zeros(length, arch.intermediate_size) @ torch.zeros(arch.intermediate_size, ARCH.hidden_size)
        hidden @ torch.zeros(ARCH.hidden_size, ARCH.vocab_size)
    return counter.get_total_flops()


def test_forward_flops_are_what_torch_counts():
    assert metrics.forward_flops(ARCH, [4]) == counted_flops(4)
    assert metrics.forward_flops(ARCH, [4, 2]) == counted_flops(4) + counted_flops(2)


def test_a_query_outside_the_window_costs_nothing():
    """All layers have a window of 3: 1 + 2 + 3 + 3 + 3 pairs of 5 tokens instead of 15."""
    windowed = replace(ARCH, sliding_window=3, windowed_layers=(0, 1, 2))
    pair = 4 * ARCH.num_heads * ARCH.head_dim * ARCH.num_layers
    assert metrics.forward_flops(ARCH, [5, 2]) - metrics.forward_flops(windowed, [5, 2]) == 3 * pair
    assert metrics.forward_flops(replace(windowed, windowed_layers=()), [5]) == metrics.forward_flops(ARCH, [5])


def test_a_layer_with_linear_attention_costs_its_projections_its_convolution_and_three_uses_of_its_state():
    linear = LinearAttentionSpec((0, 2), 2, 4, 3, 5, 4)
    rows = 2 * 6 + 20 + 20 + 2 * 4  # queries, keys, values, gates, rates and time steps
    each = 2 * (rows * 8 + 8 * 20 + 32 * 4) + 6 * 4 * 3 * 5
    whole, without = (
        metrics.forward_flops(replace(ARCH, num_layers=3, linear_attention=one), [4, 2]) for one in (linear, None)
    )
    softmax = without - metrics.forward_flops(replace(ARCH, num_layers=2), [4, 2])
    mlp = 2 * 3 * 8 * 16 * 6
    assert whole == without - 2 * (softmax - mlp) + 2 * 6 * each


def test_an_output_gate_costs_another_query():
    gated = replace(ARCH, output_gate=True)
    assert metrics.forward_flops(gated, [4]) - metrics.forward_flops(ARCH, [4]) == 2 * 4 * ARCH.num_layers * 8 * 16


def test_of_a_mixture_only_the_experts_that_a_token_goes_to_count():
    moe = MoeSpec(num_experts=8, top_k=2, intermediate_size=5, norm_topk_prob=True, shared_intermediate_size=7)
    dense = replace(ARCH, intermediate_size=2 * 5 + 7)
    router_and_gate = 2 * 4 * ARCH.num_layers * ARCH.hidden_size * (8 + 1)
    assert metrics.forward_flops(replace(ARCH, moe=moe), [4]) == counted_flops(4, dense) + router_and_gate


@pytest.mark.parametrize("preset", ["deepseek_v3_tiny", "deepseek_v2_tiny"])
def test_flops_of_latent_attention_are_what_torch_counts_in_transformers(preset):
    arch, length = arch_from_preset(preset, {}, None), 9
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None])
    hidden_pairs = arch.num_layers * arch.num_heads * length * (length - 1) // 2  # above the diagonal
    theirs = counter.get_total_flops() - 2 * hidden_pairs * (arch.mla.qk_head_dim + arch.mla.v_head_dim)
    assert metrics.forward_flops(arch, [length]) == theirs


def test_mfu_is_three_forwards_over_the_peak_and_unknown_devices_have_none():
    known = metrics.mfu_metrics(
        ARCH, [7], update_s=2.0, num_passes=4, world_size=8, device_name="NVIDIA H100 80GB HBM3"
    )
    expected = 3 * 4 * metrics.forward_flops(ARCH, [7]) / (2.0 * 8 * 989.4e12)
    assert known == {"perf/mfu/actor": pytest.approx(expected, rel=EXACT)}
    assert metrics.mfu_metrics(ARCH, [7], update_s=2.0, num_passes=4, world_size=8, device_name="cpu") == {}


def test_throughput_is_tokens_per_second_and_rank():
    timings = {"timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/update_actor": 1.0}
    assert metrics.throughput_metrics(timings, num_tokens=400, num_response_tokens=100, world_size=4) == {
        "perf/total_num_tokens": 400.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 50.0,
        "perf/gen_tokens_per_s": 200.0,
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 2.5,
    }
    assert metrics.throughput_metrics({}, num_tokens=4, num_response_tokens=1, world_size=1) == {
        "perf/total_num_tokens": 4.0
    }
