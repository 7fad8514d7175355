import pytest

from mrl.errors import UserError
from mrl.models.presets import PRESETS, arch_from_preset


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
