"""Rotary frequencies are transformers'."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mrl.models.kernels.rope_frequencies import inverse_frequencies, scale_llama3
from tests.models.rope import both_spellings


def theirs(head_dim, rope):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=8192,
        **both_spellings(rope),
    )
    return LlamaRotaryEmbedding(config).inv_freq


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_equal_those_of_transformers(head_dim):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert torch.equal(inverse_frequencies(head_dim, 500000.0), theirs(head_dim, rope))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_equals_that_of_transformers(head_dim):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    unscaled = inverse_frequencies(head_dim, 500000.0)
    scaled = scale_llama3(unscaled, **scaling)
    torch.testing.assert_close(scaled, theirs(head_dim, {"rope_type": "llama3", "rope_theta": 500000.0, **scaling}))
    assert (scaled == unscaled).any() and (scaled == unscaled / 8.0).any() and (scaled < unscaled).any()
