"""Qwen 3 (dense): the plain decoder with RMSNorm over each head of queries and keys; head_dim is its own setting."""

from functools import partial

from mrl.models._decoder import DECODER, arch_from_config, config_from_arch
from mrl.models._keys import config_keys, last_layers_slide
from mrl.models.base import Family

FAMILY = Family(
    hf_model_type="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    params=DECODER,
    keys=config_keys(held={"attention_bias": (False, "it puts a bias on the output projection")}),
    arch_from_hf=partial(
        arch_from_config,
        family="qwen3",
        qk_norm=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
        },
        slides=last_layers_slide,
    ),
    arch_to_hf=partial(
        config_from_arch,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        fixed={"attention_bias": False, "use_sliding_window": False},
    ),
    trtllm_architecture="Qwen3ForCausalLM",
)
