"""Rotary frequencies and attention factors are transformers'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from mrl.models._positions import for_run
from mrl.models.hf_config import arch_from_config
from mrl.models.kernels.rope_frequencies import inverse_frequencies, rotary_frequencies, scale_llama3
from mrl.models.kernels.rope_tables import rotary_tables, rotate
from mrl.models.presets import PRESETS
from tests.models.rope import both_spellings, of_phi_3

LLAMA = {key: value for key, value in PRESETS["llama_tiny"].items() if not key.startswith("rope_")}
PHI = {key: value for key, value in PRESETS["phi3_tiny"].items() if not key.startswith("rope_")}

numbers = st.floats(0.25, 64.0, allow_nan=False)
lengths = st.integers(2, 200_000)


def maybe(values):
    return st.none() | values


@st.composite
def ropes(draw):
    """(head_dim, max_position_embeddings, rope_parameters without absent settings)."""
    head_dim, longest = 2 * draw(st.integers(2, 40)), draw(lengths)
    rope = {"rope_type": draw(st.sampled_from(["linear", "dynamic", "yarn", "longrope", "llama3"]))}
    rope |= {"rope_theta": draw(st.sampled_from([1.5, 300.0, 1e4, 5e5, 1e6])), "factor": draw(numbers)}
    if rope["rope_type"] in ("yarn", "longrope", "llama3"):
        rope["original_max_position_embeddings"] = draw(lengths)
    if rope["rope_type"] in ("yarn", "longrope"):
        rope["attention_factor"] = draw(maybe(numbers))
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": draw(maybe(st.floats(8, 64))), "beta_slow": draw(maybe(st.floats(0.1, 7)))}
        rope |= {"mscale": draw(maybe(numbers)), "mscale_all_dim": draw(maybe(numbers))}
        rope["truncate"] = draw(maybe(st.booleans()))
    if rope["rope_type"] == "longrope":
        lists = st.lists(numbers, min_size=head_dim // 2, max_size=head_dim // 2)
        rope |= {"short_factor": draw(lists), "long_factor": draw(lists), "factor": None}
        if rope["attention_factor"] is not None:  # else versions of transformers differ
            rope["factor"] = draw(maybe(numbers))
    if rope["rope_type"] == "llama3":
        low = draw(st.floats(0.5, 4.0))
        rope |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8.0))}
    return head_dim, longest, {key: value for key, value in rope.items() if value is not None}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(drawn=ropes(), uses_long=st.booleans())
def test_frequencies_and_factors_are_those_of_transformers(drawn, uses_long):
    head_dim, longest, rope = drawn
    config = {**LLAMA, "head_dim": head_dim, "max_position_embeddings": longest, **both_spellings(rope)}
    original = rope.get("original_max_position_embeddings", longest)
    run_length = original + 1 if uses_long else original
    theirs = LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})
    if rope["rope_type"] == "dynamic":  # equal up to max_position_embeddings, where mrl ends
        run_length, head_dim = longest, max(head_dim, 4)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, "cpu", seq_len=run_length)
    found, own = rotary_frequencies(for_run(arch_from_config(config), run_length))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    if rope["rope_type"] != "dynamic":
        assert torch.equal(found, expected)
    assert own == pytest.approx(factor, rel=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(half=st.integers(1, 16), rest=st.integers(0, 6), longest=st.integers(3, 60))
def test_tables_of_a_partly_rotated_head_are_those_of_transformers(half, rest, longest):
    head_dim = 2 * (half + rest)
    rope = {"rope_type": "longrope", "short_factor": [1.5] * half, "long_factor": [2.5] * half, "rope_theta": 99.0}
    partial = {"partial_rotary_factor": (2 * half + 0.5) / head_dim if rest else 1.0}
    config = {**PHI, "hidden_size": 4 * head_dim, "original_max_position_embeddings": 20}
    config |= of_phi_3(both_spellings({**rope, **partial}))
    theirs = Phi3RotaryEmbedding(Phi3Config(**{key: value for key, value in config.items() if key != "model_type"}))
    heads = torch.randn(1, longest, 4, head_dim)
    cos, sin = theirs(heads, torch.arange(longest)[None])
    arch = for_run(arch_from_config(config), longest)
    own = rotary_tables(arch, longest, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(own[0], cos[0])
    signs = torch.cat([-torch.ones(half), torch.ones(half)])
    torch.testing.assert_close(own[1] * signs, sin[0])
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(heads, own[0][:, None], own[1][:, None]), expected)


def test_longrope_without_a_choice_has_no_frequencies():
    config = {**LLAMA, "head_dim": 4, "rope_theta": 10.0}
    config["rope_scaling"] = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    with pytest.raises(ValueError, match="for_run"):
        rotary_frequencies(arch_from_config(config))


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_unscaled_frequencies_equal_those_of_transformers(head_dim):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, **both_spellings(rope))
    assert torch.equal(inverse_frequencies(head_dim, 500000.0), LlamaRotaryEmbedding(config).inv_freq)


def test_llama3_keeps_divides_and_interpolates():
    unscaled = inverse_frequencies(64, 500000.0)
    scaled = scale_llama3(
        unscaled, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
    )
    assert (scaled == unscaled).any() and (scaled == unscaled / 8.0).any() and (scaled < unscaled).any()
