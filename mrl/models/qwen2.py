"""Qwen 2 and 2.5: the plain decoder with a bias on query, key and value."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys, last_layers_use_window

FAMILY = decoder_family(
    "qwen2",
    "Qwen2ForCausalLM",
    trtllm_architecture="Qwen2ForCausalLM",
    keys=config_keys(),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    fixed=lambda arch: {"use_sliding_window": False},
    qkv_bias=True,
    uses_window=last_layers_use_window,
)
