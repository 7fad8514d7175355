"""Qwen 3 (dense): the plain decoder with RMSNorm over each query and key head; head_dim is set independently."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys
from mrl.models._windows import LAST_LAYERS

FAMILY = decoder_family(
    "qwen3",
    "Qwen3ForCausalLM",
    trtllm_architecture="Qwen3ForCausalLM",
    keys=config_keys(required_values={"attention_bias": (False, "it adds a bias to the output projection")}),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    fixed=lambda arch: {"attention_bias": False},
    qk_norm=True,
    windows=LAST_LAYERS,
)
