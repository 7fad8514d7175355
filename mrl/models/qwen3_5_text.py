"""Qwen3.5, the dense text model: three gated delta nets for each layer of gated softmax attention.

The layers for multi-token prediction in published checkpoints are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.models._decoder import DENSE_MLP, HEAD, decoder_family
from mrl.models._keys import config_keys
from mrl.models._linear_attention import (
    IN_PARTS,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    LINEAR_REQUIRED,
    LINEAR_WITHOUT_EFFECT,
    TEXT_ROPE,
    linear_keys,
    mixed_attention,
    with_linear_attention,
    without_layer_types,
)
from mrl.models.base import ArchSpec

_DEFAULTS: Mapping[str, Any] = {**LINEAR_DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288}

_TABLE = decoder_family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    params=(*mixed_attention(IN_PARTS), *DENSE_MLP, *HEAD),
    keys=config_keys(*LINEAR_KEYS, required_values=LINEAR_REQUIRED, without_effect=LINEAR_WITHOUT_EFFECT),
    defaults=_DEFAULTS,
    fixed=lambda arch: {
        **linear_keys(arch),
        **({"architectures": ["Qwen3_5TextForSequenceClassification"]} if arch.value_head else {}),
    },
    qk_norm=True,
    rope=TEXT_ROPE,
    extra_layers=True,
)


def _arch_from_hf(config: dict[str, Any]) -> ArchSpec:
    return with_linear_attention(_TABLE.arch_from_hf(without_layer_types(config)), config, _DEFAULTS)


FAMILY = replace(_TABLE, arch_from_hf=_arch_from_hf)
