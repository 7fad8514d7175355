"""Phi 3 and 4: the plain decoder; its checkpoint fuses query, key and value, and gate and up, into one tensor each."""

from __future__ import annotations

from dataclasses import replace

from mrl.models._decoder import DECODER, decoder_family
from mrl.models._keys import TRAINING, config_keys
from mrl.models._rope import RopeRules
from mrl.models._windows import ALL_LAYERS
from mrl.models.base import ParamSpec, ShardKind

_FUSED = {
    ShardKind.QKV: "model.layers.{layer}.self_attn.qkv_proj.weight",
    ShardKind.GATE_UP: "model.layers.{layer}.mlp.gate_up_proj.weight",
}


def _fused(row: ParamSpec) -> ParamSpec:
    return replace(row, hf=(_FUSED[row.kind],)) if row.kind in _FUSED else row


FAMILY = decoder_family(
    "phi3",
    "Phi3ForCausalLM",
    params=tuple(_fused(row) for row in DECODER if row.hf[0].rsplit(".", 1)[1] != "bias"),
    keys=config_keys(
        without_effect={"embd_pdrop": "transformers does not implement this dropout", "resid_pdrop": TRAINING},
    ),
    defaults={
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    fixed=lambda arch: {"pad_token_id": None},
    windows=ALL_LAYERS,
    trtllm_architecture="LlamaForCausalLM",
    rope=RopeRules(("default", "longrope"), aliases={"su": "longrope", "yarn": "longrope"}, partial=True),
)
