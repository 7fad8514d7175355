from dataclasses import replace

import pytest
import torch
import transformers

from mrl.commands.plan.memory import num_parameters
from mrl.commands.rehearse.placeholders import matching_preset
from mrl.errors import UserError
from mrl.models.hf_config import family_of
from mrl.models.presets import PRESETS, arch_from_preset

PUBLISHED = {
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1.7b": 1_711_376_384,
    "deepseek_llm_7b": 6_910_365_696,
    "qwen1.5_moe_a2.7b": 14_315_784_192,
    "qwen2_0.5b": 494_032_768,
    "qwen2_1.5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_7b_128k": 7_615_616_512,
    "phi4_mini": 3_836_021_760,
    "qwen3_next_80b_a3b": 81_324_862_720,
    "glm4.5_air_106b_a12b": 110_468_824_832,
    "glm4.5_355b_a32b": 358_337_791_296,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen2.5_72b": 72_706_203_648,
    "qwen2.5_math_1.5b": 1_543_714_304,
    "qwen2.5_math_7b": 7_615_616_512,
    "deepseek_r1_distill_qwen_1.5b": 1_777_088_000,
    "deepseek_r1_distill_qwen_7b": 7_615_616_512,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "llama3.2_1b": 1_235_814_400,
    "llama3.2_3b": 3_212_749_824,
    "llama3.1_8b": 8_030_261_248,
    "llama3.1_70b": 70_553_706_496,
    "gemma3_1b": 999_885_952,
    "deepseek_v2_lite": 15_706_484_224,
    "moonlight_16b_a3b": 15_960_110_208,
    "deepseek_v3_671b_a37b": 684_489_845_504,
    "kimi_k2_1t_a32b": 1_026_408_232_448,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}
"""Preset -> parameters of the public model, as its page on the Hugging Face hub counts them, without FP8 scales."""
ONE_TOKEN_AT_A_TIME = {"moonlight_16b_a3b", "kimi_k2_1t_a32b"}
"""Presets of models that were published without the family's layer for multi-token prediction."""


TEXT_OF_OTHERS = [name for name in PRESETS if name.endswith("_text")]
"""Text models of public models with a vision tower, whose pages count both."""


@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.endswith("_tiny") and name in PUBLISHED])
def test_a_public_models_preset_has_its_number_of_parameters(preset):
    arch = arch_from_preset(preset, {}, None)
    extra = 0 if preset in ONE_TOKEN_AT_A_TIME else prediction_layer(arch)
    assert num_parameters(arch) + extra == PUBLISHED[preset]


def prediction_layer(arch):
    """Parameters of the layer for multi-token prediction, which mrl does not load: it repeats embedding and head."""
    if not family_of(arch).extra_layers:
        return 0
    layer = num_parameters(replace(arch, num_layers=arch.num_layers + 1)) - num_parameters(arch)
    if arch.linear_attention is not None:  # a layer with softmax attention, and neither embedding nor head
        return layer + 2 * arch.hidden_size**2 + 3 * arch.hidden_size
    return layer + 2 * arch.hidden_size**2 + 3 * arch.hidden_size + 2 * arch.vocab_size * arch.hidden_size


@pytest.mark.parametrize("preset", TEXT_OF_OTHERS)
def test_a_text_models_preset_has_the_parameters_of_transformers(preset):
    config = transformers.AutoConfig.for_model(PRESETS[preset]["model_type"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert num_parameters(arch_from_preset(preset, {}, None)) == sum(each.numel() for each in model.parameters())


def test_every_public_models_preset_is_counted():
    assert {name for name in PRESETS if not name.endswith("_tiny")} == {*PUBLISHED, *TEXT_OF_OTHERS}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2_135m"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen1.5_moe_a2.7b"),
        ("deepseek-ai/deepseek-llm-7b-chat", "deepseek_llm_7b"),
        ("Qwen/Qwen2-7B-Instruct", "qwen2_7b"),
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5_3b"),
        ("Qwen/Qwen2.5-32B", "qwen2.5_32b"),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5_math_7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek_r1_distill_qwen_1.5b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_4b"),
        ("Qwen/Qwen3-14B-Base", "qwen3_14b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3.2_1b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek_v2_lite"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight_16b_a3b"),
    ],
)
def test_a_hub_name_selects_the_preset_of_its_model(name, preset):
    assert matching_preset(name) == preset


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-11B-Vision", "Qwen/Qwen2.5-VL-3B", "Qwen/Qwen3-VL-8B"])
def test_another_model_selects_none(name):
    with pytest.raises(UserError):
        matching_preset(name)


def test_the_tokenizer_sets_the_vocabulary_and_an_override_wins():
    assert arch_from_preset("qwen2_tiny", {}, None).vocab_size == PRESETS["qwen2_tiny"]["vocab_size"]
    assert arch_from_preset("qwen2_tiny", {}, 17).vocab_size == 17
    assert arch_from_preset("qwen2_tiny", {"vocab_size": 20}, 17).vocab_size == 20


def test_overrides_replace_the_presets_values():
    arch = arch_from_preset("qwen2_tiny", {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 6}, None)
    assert (arch.num_layers, arch.hidden_size, arch.num_heads, arch.head_dim) == (2, 96, 6, 16)


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("qwen2_tiney", {}, "there is no 'qwen2_tiney'. Did you mean 'qwen2_tiny'?"),
        ("qwen2_tiny", {"num_layers": 2}, "unknown key 'num_layers'. Did you mean 'num_hidden_layers'?"),
        ("qwen2_tiny", {"hidden_size": -1}, "hidden_size is -1"),
        ("qwen2_tiny", {"initializer_range": 0}, "initializer_range is 0, expected a number above 0"),
        ("qwen2_tiny", {"initializer_range": "wide"}, "initializer_range is 'wide'"),
        ("qwen2_tiny", {"num_attention_heads": 3, "num_key_value_heads": 3}, "model.preset=qwen2_tiny"),
    ],
)
def test_mistakes_are_named(name, overrides, message):
    with pytest.raises(UserError) as refusal:
        arch_from_preset(name, overrides, None)
    assert message in str(refusal.value)
