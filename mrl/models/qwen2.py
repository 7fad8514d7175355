"""Qwen 2 and 2.5: the plain decoder with a bias on query, key and value."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys
from mrl.models._windows import LAST_LAYERS

FAMILY = decoder_family(
    "qwen2",
    "Qwen2ForCausalLM",
    trtllm_architecture="Qwen2ForCausalLM",
    keys=config_keys(),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    fixed=lambda arch: {},
    qkv_bias=True,
    windows=LAST_LAYERS,
)
