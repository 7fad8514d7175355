"""Sizes that FP8 blocks must divide, of models whose layers differ."""

from mrl.config.config import RolloutConfig
from mrl.engines._fp8_support import unaligned_sizes
from mrl.models.presets import arch_from_preset


def test_dense_layers_of_an_moe_model_count_too():
    """10944 / 8 columns of the first layer are no multiple of 128."""
    arch = arch_from_preset("glm4.5_air_106b_a12b", {}, None)
    alone = RolloutConfig(expert_parallel_size=8, tensor_model_parallel_size=8)
    found = unaligned_sizes(alone, arch).split("; ")
    assert any(size.startswith("intermediate_size") and size.endswith("= 1368") for size in found)
    assert not any(size.startswith("an expert's width") for size in found)
