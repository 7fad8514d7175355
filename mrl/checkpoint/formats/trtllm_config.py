"""config.json of a TensorRT-LLM 1.x checkpoint, read and written.

The keys are those of TensorRT-LLM's `PretrainedConfig`, `LLaMAConfig` and `QWenConfig`. They are translated into an
`ArchSpec` by way of Hugging Face's keys, so that each family validates its own. The result is written again and
compared with the file, so that no setting that mrl does not support goes unnoticed. Two keys are mrl's own:
`mrl.family`, for families that share an architecture, and `tie_word_embeddings` where TensorRT-LLM's class has no such
key; TensorRT-LLM stores unknown keys as attributes and warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.json_file import read_json
from mrl.errors import UserError
from mrl.models._rope import settings_of
from mrl.models.base import ArchSpec, MoeSpec, RopeScaling
from mrl.models.hf_config import arch_from_config, families, family_of
from mrl.resharding.trtllm import TrtllmMapping

CONFIG = "config.json"

DTYPES = ("float32", "float16", "bfloat16")

EXCLUDED = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate",
)
"""Modules that are not quantized: those that TensorRT-LLM's `quantization/quantize.py` excludes by default."""

_HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "tie_word_embeddings": "tie_word_embeddings",
    "attn_bias": "qkv_bias",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
"""TensorRT-LLM's key -> Hugging Face's."""

_SCALINGS = ("linear", "yarn", "llama3")
"""Rotary types that TensorRT-LLM's classes of mrl's families compute as transformers does."""

_RENORMALIZE = 1
"""`MoeConfig.ExpertScaleNormalizationMode.RENORMALIZE`; 0 is NONE."""

_FREE = (
    "logits_dtype",
    "rotary_scaling",
    "seq_length",
    "disable_weight_only_quant_plugin",
    "quantization",
    "mapping",
    "mrl",
)
"""Keys that may differ from what mrl would write: they do not affect the weights, or are checked separately."""


@dataclass(frozen=True)
class TrtllmConfig:
    """Content of config.json.

    Attributes:
        arch: The model.
        mapping: Parallel layout.
        dtype: Dtype of the weights that are neither quantized nor routers.
        fp8: True if linear layers are float8_e4m3fn with one scale per tensor (`quant_algo` FP8).
        gpus_per_node: Consecutive ranks that share a node; TensorRT-LLM selects its all-reduce by it.
    """

    arch: ArchSpec
    mapping: TrtllmMapping
    dtype: str
    fp8: bool = False
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        """Raises UserError if a value is invalid, TensorRT-LLM has no such model, or the sizes do not divide it."""
        if self.dtype not in DTYPES:
            raise UserError(f"dtype is {self.dtype!r}; a TensorRT-LLM checkpoint has one of {', '.join(DTYPES)}.")
        if type(self.gpus_per_node) is not int or self.gpus_per_node < 1:
            raise UserError(f"gpus_per_node is {self.gpus_per_node!r}; expected a positive integer.")
        if (reason := model_refusal(self.arch)) is not None:
            raise UserError(reason)
        self.mapping.check(self.arch)


def model_refusal(arch: ArchSpec) -> str | None:
    """Returns why a TensorRT-LLM checkpoint cannot have a model; None: it can."""
    if family_of(arch).trtllm_architecture is None:
        known = sorted(name for name, family in families().items() if family.trtllm_architecture)
        return f"mrl cannot write '{arch.family}' models for TensorRT-LLM; it can write {', '.join(known)}."
    if arch.moe is not None and arch.moe.dense_layers:
        return (
            f"{len(arch.moe.dense_layers)} of the model's {arch.num_layers} layers have a dense MLP instead of "
            "experts, for which a TensorRT-LLM checkpoint has no key."
        )
    if arch.sliding_window is not None:
        return (
            f"the model has a sliding window of {arch.sliding_window} tokens, for which a TensorRT-LLM checkpoint has "
            "no key: its engine would attend to all tokens."
        )
    return rotary_refusal(arch)


def rotary_refusal(arch: ArchSpec) -> str | None:
    """Returns why TensorRT-LLM's model class cannot compute the positions of a model; None: it can.

    The class of Llama, Mixtral and Qwen rotates entire heads; of scalings it has linear, yarn and llama3, and computes
    "dynamic" by the longest possible sequence.
    """
    scaling = arch.rope_scaling
    if arch.rotary_dim != arch.head_dim:
        return (
            f"TensorRT-LLM's model class rotates entire heads, and the model has "
            f"partial_rotary_factor={arch.partial_rotary_factor}. Use another format or engine."
        )
    if scaling is None:
        return None
    if scaling.rope_type not in _SCALINGS:
        return (
            f"TensorRT-LLM's model class does not compute rope_type {scaling.rope_type!r} as "
            f"transformers does; it has {', '.join(_SCALINGS)}. Use another format or engine."
        )
    if ignored := unread_yarn(scaling):
        return (
            f"TensorRT-LLM does not read {', '.join(ignored)} of the model's rope_scaling as transformers does. Use "
            "another format or engine."
        )
    return None


def unread_yarn(scaling: RopeScaling) -> tuple[str, ...]:
    """Returns the settings of yarn that TensorRT-LLM does not read as transformers does; () for other types."""
    if scaling.rope_type != "yarn":
        return ()
    found = ["attention_factor"] if scaling.attention_factor is not None else []
    found += ["truncate=false"] if scaling.truncate is False else []
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        found.append("mscale without mscale_all_dim" if scaling.mscale else "mscale_all_dim without mscale")
    return tuple(found)


def read_config(folder: str | Path) -> TrtllmConfig:
    """Reads config.json of a checkpoint folder.

    Raises:
        UserError: The file is missing, not a checkpoint's, or describes a model that mrl does not support; the message
            names it.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(
            f"'{folder}' has no {CONFIG}. A TensorRT-LLM checkpoint has one, and a rank{{N}}.safetensors for each rank."
        )
    config = read_json(path)
    if "pretrained_config" in config:
        raise UserError(f"'{path}' belongs to a built engine. Give the checkpoint folder that it was built from.")
    try:
        return from_json(config)
    except UserError as error:
        raise UserError(f"'{path}': {error}") from error


def from_json(config: Mapping[str, Any]) -> TrtllmConfig:
    """Converts the parsed file.

    Raises:
        UserError: A key is missing or invalid, or describes something that mrl does not support; the message names it.
    """
    ranks = _object(config, "mapping")
    for key, expected in (("cp_size", 1), ("moe_cluster_size", 1), ("attn_cp_size", 1), ("auto_parallel", False)):
        if ranks.get(key, expected) not in (expected, -1):
            raise UserError(f"mapping.{key} is {ranks[key]!r}; mrl supports {expected!r} only.")
    mapping = TrtllmMapping(
        tp_size=ranks.get("tp_size", 1),
        pp_size=ranks.get("pp_size", 1),
        moe_tp_size=_unset(ranks.get("moe_tp_size")),
        moe_ep_size=_unset(ranks.get("moe_ep_size")),
        use_parallel_embedding=config.get("use_parallel_embedding", False) is True,
        embedding_sharding_dim=config.get("embedding_sharding_dim", 0),
    )
    if ranks.get("world_size", mapping.world_size) != mapping.world_size:
        raise UserError(
            f"mapping.world_size is {ranks['world_size']!r}, but tp_size x pp_size is {mapping.world_size}."
        )
    found = TrtllmConfig(
        arch=_arch(config),
        mapping=mapping,
        dtype=_value(config, "dtype"),
        fp8=_is_fp8(_object(config, "quantization")),
        gpus_per_node=ranks.get("gpus_per_node", 8),
    )
    for key, value in to_json(found).items():
        given = config.get(key)
        if key.startswith("moe"):
            differs = found.arch.moe is not None and not _agrees(given, value)
        else:
            differs = key not in _FREE and not _agrees(given, value)
        if differs:
            raise UserError(f"{key} is {given!r}; mrl's '{found.arch.family}' supports {value!r} only.")
    return found


def to_json(config: TrtllmConfig) -> dict[str, Any]:
    """Returns the content of config.json."""
    arch, mapping = config.arch, config.mapping
    architecture = family_of(arch).trtllm_architecture
    qwen = str(architecture).startswith("Qwen")
    scaling = arch.rope_scaling
    return {
        "architecture": architecture,
        "dtype": config.dtype,
        "logits_dtype": "float32",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_size": arch.head_dim,
        "hidden_act": "swiglu" if arch.moe else "silu",
        "norm_epsilon": arch.rms_norm_eps,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": arch.max_position_embeddings,
        "rotary_embedding_dim": arch.rotary_dim,
        "rotary_base": arch.rope_theta,
        "rotary_scaling": None if scaling is None else {"type": scaling.rope_type, **settings_of(scaling)},
        "qk_layernorm": arch.qk_norm,
        "attn_bias": arch.qkv_bias,
        "mlp_bias": False,
        "use_parallel_embedding": mapping.use_parallel_embedding,
        "embedding_sharding_dim": mapping.embedding_sharding_dim,
        "disable_weight_only_quant_plugin": False,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "moe": _moe_keys(arch.moe, renormalizes=arch.moe.norm_topk_prob if arch.moe else not qwen),
        **(_qwen_keys(arch) if qwen else {"residual_mlp": False, "remove_duplicated_kv_heads": False}),
        "mapping": {
            "world_size": mapping.world_size,
            "gpus_per_node": config.gpus_per_node,
            "cp_size": 1,
            "tp_size": mapping.tp_size,
            "pp_size": mapping.pp_size,
            "moe_tp_size": mapping.moe_tp_size,
            "moe_ep_size": mapping.moe_ep_size,
        },
        "quantization": {
            "quant_algo": "FP8" if config.fp8 else None,
            "kv_cache_quant_algo": None,
            "group_size": 128,
            "smoothquant_val": 0.5,
            "clamp_val": None,
            "has_zero_point": False,
            "pre_quant_scale": False,
            "exclude_modules": list(EXCLUDED) if config.fp8 else None,
        },
        "mrl": {"family": arch.family},
    }


def _moe_keys(moe: MoeSpec | None, *, renormalizes: bool) -> dict[str, Any]:
    """Returns the keys of `moe`; dense models have them too."""
    return {
        "num_experts": moe.num_experts if moe else 0,
        "top_k": moe.top_k if moe else 0,
        "normalization_mode": _RENORMALIZE if renormalizes else 0,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
    }


def _qwen_keys(arch: ArchSpec) -> dict[str, Any]:
    return {
        "qwen_type": arch.family,
        "use_logn_attn": False,
        "num_labels": 1,
        "moe_intermediate_size": arch.moe.intermediate_size if arch.moe else 0,
        "moe_shared_expert_intermediate_size": arch.moe.shared_intermediate_size if arch.moe else 0,
        "seq_length": arch.max_position_embeddings,
    }


def _arch(config: Mapping[str, Any]) -> ArchSpec:
    """Builds the model from Hugging Face's keys, which the family validates."""
    architecture = _value(config, "architecture")
    known_to = {name: family for name, family in families().items() if family.trtllm_architecture is not None}
    fitting = {name: family for name, family in known_to.items() if family.trtllm_architecture == architecture}
    if not fitting:
        known = sorted({str(family.trtllm_architecture) for family in known_to.values()})
        raise UserError(f"architecture is {architecture!r}; mrl has {', '.join(known)}.")
    named = _object(config, "mrl").get("family")
    family = fitting.get(str(named)) or next(
        family for family in fitting.values() if family.hf_architecture == architecture
    )
    moe = {key: config.get(f"moe_{key}", 0) for key in ("num_experts", "top_k", "normalization_mode")}
    moe |= _object(config, "moe")
    hf: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None, "rms_norm_eps": 1e-5, "sliding_window": None}
    hf |= {hf_key: config[key] for key, hf_key in _HF_KEYS.items() if key in config}
    hf |= {
        "num_experts": moe["num_experts"],
        "num_local_experts": moe["num_experts"],
        "num_experts_per_tok": moe["top_k"],
        "norm_topk_prob": moe["normalization_mode"] == _RENORMALIZE,
    }
    read = {key: value for key, value in hf.items() if key in family.keys.all}  # unknown keys would need transformers
    return arch_from_config({**read, "model_type": family.hf_model_type})


def _is_fp8(quantization: Mapping[str, Any]) -> bool:
    algorithm = quantization.get("quant_algo")
    if algorithm not in (None, "FP8") or quantization.get("kv_cache_quant_algo") is not None:
        raise UserError(
            f"quantization.quant_algo is {algorithm!r} and kv_cache_quant_algo "
            f"{quantization.get('kv_cache_quant_algo')!r}; mrl reads checkpoints without quantization, and FP8 weights."
        )
    excluded = quantization.get("exclude_modules") or list(EXCLUDED)
    if algorithm and (not isinstance(excluded, list) or {*map(str, excluded)} - {"*fused_a"} != set(EXCLUDED)):
        raise UserError(
            f"quantization.exclude_modules is {excluded!r}; mrl reads FP8 checkpoints that exclude {list(EXCLUDED)}."
        )
    return algorithm == "FP8"


def _agrees(given: Any, value: Any) -> bool:
    """Returns whether a file's value equals the one that mrl would write, or is missing (TensorRT-LLM's default)."""
    if isinstance(given, dict) and isinstance(value, dict):
        return all(_agrees(given.get(key), each) for key, each in value.items())
    return given is None or bool(given == value)


def _unset(size: Any) -> Any:
    return 0 if size in (None, -1) else size


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{key} is {value!r}; expected an object.")
    return value


def _value(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise UserError(f"'{key}' is missing.")
    return config[key]
