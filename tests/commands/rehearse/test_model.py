"""A small model lies to its layout as the large one does to its own."""

from dataclasses import replace

import pytest

from mrl.commands.rehearse.engine import RehearsalEngine
from mrl.commands.rehearse.layout import compare, smallest_like
from mrl.commands.rehearse.model import shrunk_model
from mrl.commands.rehearse.settings import _sizes_of, small_teacher
from mrl.engines._capabilities import CpuRun
from mrl.models._positions import for_run
from mrl.models.hf_config import arch_from_config, family_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import chunk_layers, megatron_layout
from mrl.resharding.native import native_layout

TOKENS = 15
MAX_ELEMENTS = 300_000  # of the largest small model; a rank of it takes no time

CASES = {
    "qwen2.5_0.5b": ParallelLayout(1),
    "qwen2.5_7b": ParallelLayout(8, tp=4, rollout_tp=8),
    "qwen3_8b": ParallelLayout(8, tp=2, rollout_tp=2),
    "llama3.1_70b": ParallelLayout(64, tp=8, pp=4, vpp=5, rollout_tp=8),
    "qwen2.5_7b_128k": ParallelLayout(8, tp=4, rollout_tp=8),
    "phi3_tiny": ParallelLayout(4, tp=2, rollout_tp=4),
    "gemma3_1b": ParallelLayout(4, tp=2, pp=2, rollout_tp=2),
    "gpt_oss_20b": ParallelLayout(16, tp=2, pp=2, ep=4, etp=1, rollout_tp=2),
    "qwen3_next_80b_a3b": ParallelLayout(16, tp=2, pp=2, ep=4, etp=1, rollout_tp=2),
    "qwen3.5_9b_text": ParallelLayout(2, tp=2, rollout_tp=2),
    "glm4_moe_tiny": ParallelLayout(8, tp=2, pp=2, ep=4, etp=1, rollout_tp=4, rollout_ep=2),
    "deepseek_v3_671b_a37b": ParallelLayout(
        512, tp=8, pp=8, ep=64, etp=1, rollout_tp=32, rollout_ep=32, first_stage_layers=7, last_stage_layers=6
    ),
    "deepseek_v2_lite": ParallelLayout(16, tp=2, pp=3, ep=4, etp=1, rollout_tp=4, rollout_ep=2),
    "moonlight_16b_a3b": ParallelLayout(8, tp=2, ep=8, etp=1, rollout_tp=2),
    "mixtral_tiny": ParallelLayout(16, tp=2, ep=4, rollout_tp=4, rollout_ep=2),
    "qwen2_moe_tiny": ParallelLayout(8, tp=2, ep=4, etp=1, rollout_tp=2, rollout_ep=2),
    "qwen3_235b_a22b": ParallelLayout(
        256, tp=4, pp=8, ep=8, etp=1, rollout_tp=32, rollout_ep=32, first_stage_layers=11, last_stage_layers=11
    ),
}


def shrunk(preset, **changes):
    arch = replace(arch_from_preset(preset, {}, None), **changes)
    asked = CASES[preset]
    return arch, asked, *shrunk_model(arch, asked, smallest_like(asked, 8, experts=bool(arch.moe)), tokens=TOKENS)


@pytest.mark.parametrize("preset", CASES)
def test_structure_is_kept_and_every_rank_can_hold_its_part(preset):
    arch, _, small, used = shrunk(preset)
    kept = (
        "family",
        "tie_word_embeddings",
        "qkv_bias",
        "qk_norm",
        "output_bias",
        "attention_sinks",
        "rope_theta",
        "rope_scaling",
        "rms_norm_eps",
        "local_rope_theta",
        "post_norms",
        "zero_centered_norms",
        "scaled_embeddings",
        "activation",
        "output_gate",
    )
    assert {name: getattr(small, name) for name in kept} == {name: getattr(arch, name) for name in kept}
    layouts = [megatron_layout(small, used, rank, dtype="bfloat16", te=False) for rank in range(used.world_size)]
    for rank in range(used.rollout_tp):
        native_layout(small, used.rollout_tp, rank, "bfloat16", ep_size=used.rollout_ep)
    elements = sum(stored.shape[0] * (*stored.shape, 1)[1] for stored in layouts[0].values())
    assert elements < MAX_ELEMENTS


@pytest.mark.parametrize("preset", CASES)
def test_heads_lie_to_tensor_parallelism_as_before(preset):
    arch, asked, small, used = shrunk(preset)
    assert (small.num_heads > small.num_kv_heads) == (arch.num_heads > arch.num_kv_heads)
    for before, after in ((asked.tp, used.tp), (asked.rollout_tp, used.rollout_tp)):
        if (before > 1) == (after > 1):
            assert compare(small.num_kv_heads, after) == compare(arch.num_kv_heads, before), (small, used)


@pytest.mark.parametrize(
    "preset", ["deepseek_v3_671b_a37b", "deepseek_v2_lite", "moonlight_16b_a3b", "kimi_k2_1t_a32b"]
)
@pytest.mark.parametrize("head_dim", [16, 32])
def test_latent_attention_stays_and_survives_config_json(preset, head_dim):
    real = arch_from_preset(preset, {}, None)
    layout = ParallelLayout(8, tp=2, ep=4, etp=1, rollout_tp=2)
    engine = RehearsalEngine(sizes=CpuRun(head_dim=head_dim))
    arch, _ = shrunk_model(real, layout, smallest_like(layout, 8, experts=True), tokens=TOKENS, engine=engine)
    mla = arch.mla
    assert arch.head_dim == mla.qk_head_dim > mla.v_head_dim == head_dim and arch.num_heads == arch.num_kv_heads > 1
    assert 0 < arch.rotary_dim == mla.qk_rope_head_dim < mla.qk_nope_head_dim and mla.norm_eps == real.mla.norm_eps
    assert (mla.q_lora_rank is None) == (real.mla.q_lora_rank is None)
    if mla.q_lora_rank is not None:
        assert mla.q_lora_rank > mla.kv_lora_rank
    assert arch.moe.dense_layers == (0,) and (arch.moe.num_groups > 1) == (real.moe.num_groups > 1)
    assert (arch.moe.score_function, arch.moe.score_bias) == (real.moe.score_function, real.moe.score_bias)
    ratios = [(one.attention_scale or one.head_dim**-0.5) * one.head_dim**0.5 for one in (arch, real)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-12)
    assert arch_from_config(family_of(arch).arch_to_hf(arch)) == arch
    assert arch_from_preset(preset, _sizes_of(preset, arch), None) == arch


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (3,), (0, 2)], ids=str)
def test_some_layers_keep_a_window_that_hides_tokens(layers):
    _, _, small, _ = shrunk("phi3_tiny", sliding_window=100, windowed_layers=layers)
    assert small.sliding_window < 32
    assert small.windowed_layers and max(small.windowed_layers) < small.num_layers
    assert (len(small.windowed_layers) == small.num_layers) == (len(layers) == 4)


def test_experts_of_a_rank_stay_several_and_more_than_a_token_takes():
    _, _, small, used = shrunk("qwen3_235b_a22b")
    assert small.moe.num_experts == 8 and small.moe.num_experts // used.rollout_ep == 2 and small.moe.top_k == 2
    _, _, small, _ = shrunk("qwen2_moe_tiny")
    assert small.moe.shared_intermediate_size > 0 and not small.moe.norm_topk_prob


def test_stages_stay_uneven():
    arch, asked, small, used = shrunk("qwen3_235b_a22b")
    stages = [len(layers) for layers in chunk_layers(small, used).values()]
    assert (used.first_stage_layers, used.last_stage_layers) == (1, 2) and stages == [1, 2]
    three, used = shrunk_model(arch, asked, ParallelLayout(3, pp=3, ep=1), tokens=TOKENS)
    assert [len(layers) for layers in chunk_layers(three, used).values()] == [1, 2, 1]


def test_every_chunk_of_a_virtual_pipeline_has_a_layer():
    _, _, small, used = shrunk("llama3.1_70b")
    assert used.vpp == 2 and {len(layers) for layers in chunk_layers(small, used).values()} == {1}


@pytest.mark.parametrize("preset", ["qwen3_next_80b_a3b", "qwen3.5_9b_text"])
def test_some_layers_have_linear_attention_and_value_heads_share_key_heads(preset):
    _, _, small, _ = shrunk(preset)
    assert small.linear_layers and small.softmax_layers
    assert small.linear_attention.num_value_heads == 2 * small.linear_attention.num_key_heads
    assert arch_from_preset(preset, _sizes_of(preset, small), None) == small


@pytest.mark.parametrize(("vocab_size", "padded"), [(151936, False), (151937, True)])
def test_the_vocabulary_needs_padding_where_it_did(vocab_size, padded):
    _, _, small, used = shrunk("qwen3_8b", vocab_size=vocab_size)
    assert TOKENS <= small.vocab_size < 2 * TOKENS and (small.vocab_size % used.tp != 0) is padded


@pytest.mark.parametrize("longest", [4096, 4097])
def test_lists_of_rotary_factors_fit_the_smaller_heads_and_the_choice_stays(longest):
    arch = for_run(arch_from_preset("phi4_mini", {}, None), longest)
    small, _ = shrunk_model(arch, ParallelLayout(2, tp=2), ParallelLayout(2, tp=2), tokens=TOKENS)
    assert 0 < small.rotary_dim < small.head_dim and len(small.rope_scaling.long_factor) == small.rotary_dim // 2
    again = arch_from_preset("phi4_mini", _sizes_of("phi4_mini", small), None)
    assert for_run(again, 16) == small
    assert small.rope_scaling.uses_long_factor == (longest > 4096)


def test_rotary_factors_of_a_reduced_teacher_fit_its_heads():
    student = for_run(arch_from_preset("phi4_mini", {}, None), 8192)
    teacher = replace(student, num_layers=40)
    small, _ = shrunk_model(student, ParallelLayout(2, tp=2), ParallelLayout(2, tp=2), tokens=TOKENS)
    found = small_teacher(teacher, student, small)
    again = arch_from_config(family_of(found).arch_to_hf(found))
    assert for_run(again, 16) == found and found.rope_scaling.uses_long_factor
