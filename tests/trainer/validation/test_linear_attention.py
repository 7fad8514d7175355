"""Settings that mrl does not support with linear attention and output gates are refused by name."""

import pytest

from mrl.errors import UserError
from mrl.megatron.linear_attention import check_linear_attention
from mrl.models.base import critic_of
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.validate import check
from tests.trainer.validation.runs import ROLLOUT_TP, TP, make, refusal

LINEAR = arch_from_preset("qwen3_5_text_tiny", {}, None)
"""4 layers, 4 heads, 2 key/value heads, 2 key heads of linear attention."""
SP, CP = "parallel.sequence_parallel=true", "parallel.context_parallel_size"

RULES = [
    # overrides, ranks, what the message says
    ([f"{CP}=2"], 2, f"{CP}=2"),
    ([f"{TP}=4", SP], 4, f"{TP}=4 does not divide the model's linear_num_key_heads (2)"),
    ([f"{ROLLOUT_TP}=4"], 4, "linear_num_key_heads (2)"),
    (["rollout.true_on_policy=true"], 1, "rollout.true_on_policy=true: this qwen3_5_text model"),
    (["rollout.quantization=fp8"], 1, "rollout.quantization=fp8: this qwen3_5_text model"),
    (["rollout.speculative.method=ngram"], 1, "rollout.speculative.method=ngram"),
    (["actor.lora.rank=8"], 1, "actor.lora.rank=8"),
    (["megatron.transformer={fp8: hybrid, fp8_recipe: tensorwise}"], 1, "megatron.transformer.fp8"),
    (["rollout.name=vllm"], 1, "rollout.name=vllm"),
    (["rollout.name=trtllm"], 1, "rollout.name=trtllm"),
]


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_setting_that_the_model_excludes_is_refused(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size, LINEAR)


@pytest.mark.parametrize(("overrides", "world_size"), [([], 1), ([f"{TP}=2", SP, f"{ROLLOUT_TP}=2"], 2)], ids=str)
def test_supported_settings_pass(overrides, world_size):
    check(make(*overrides), LINEAR, world_size, 13)


@pytest.mark.parametrize(
    ("overrides", "exact", "said"), [([f"{CP}=2"], False, CP), ([], True, "rollout.true_on_policy")], ids=str
)
def test_a_model_that_no_config_was_checked_for_is_refused_too(overrides, exact, said):
    """A critic or a teacher may have linear attention although the actor has none."""
    with pytest.raises(UserError, match=said):
        check_linear_attention(critic_of(LINEAR), make(*overrides).parallel, exact=exact)
    check_linear_attention(arch_from_preset("qwen2_tiny", {}, None), make(*overrides).parallel, exact=exact)
