"""Models that a TensorRT-LLM checkpoint cannot have are left out of the last stage."""

import pytest

from mrl.checkpoint.formats.trtllm_config import model_refusal
from mrl.commands.rehearse.conversion import to_trtllm
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout

MODELS = {
    "windows": ("mistral_tiny", {"sliding_window": 16}),
    "dense layers": ("qwen3_moe_tiny", {"mlp_only_layers": [0]}),
    "another family": ("glm4_moe_tiny", {}),
    "latent attention": ("deepseek_v2_tiny", {}),
    "positions": ("qwen2_tiny", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
}


@pytest.mark.parametrize(("preset", "overrides"), MODELS.values(), ids=MODELS)
def test_no_conversion_is_tried(preset, overrides, tmp_path):
    arch = arch_from_preset(preset, overrides, 101)
    assert model_refusal(arch)
    assert to_trtllm(tmp_path / "none", tmp_path / "out", arch, "float32", ParallelLayout(1)) is None
