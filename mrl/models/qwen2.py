"""Qwen 2 and 2.5: the plain decoder with biases on query, key and value."""

from functools import partial

from mrl.models._decoder import DECODER, arch_from_config, config_from_arch
from mrl.models._keys import config_keys, last_layers_slide
from mrl.models.base import Family

FAMILY = Family(
    hf_model_type="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    params=DECODER,
    keys=config_keys(),
    arch_from_hf=partial(
        arch_from_config,
        family="qwen2",
        qkv_bias=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
        },
        slides=last_layers_slide,
    ),
    arch_to_hf=partial(
        config_from_arch,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        fixed={"use_sliding_window": False},
    ),
    trtllm_architecture="Qwen2ForCausalLM",
)
