"""Treatment of every key of a config.json: read, without effect on the numbers, or restricted to one value.

The lists cover the keys that transformers' config classes declare and those that transformers reads while it loads and
runs a model; tests/models/test_config_keys.py compares them with the installed transformers. An unlisted key is unknown
to transformers too and is ignored, unless a newer transformers declares it: then it must have its default value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._quantization import QUANTIZED, read_quantization
from mrl.models._rope import ROPE_KEYS
from mrl.models.base import ConfigKeys

DECODER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    *ROPE_KEYS,
)
"""Keys that determine the `ArchSpec` in every family."""

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Keys that determine which layers have sliding-window attention; `_windows.py` reads them."""

OF_TRANSFORMERS = "how transformers runs the model, not what it computes"
PREDICTION = "the layers for multi-token prediction are not loaded"
_CLASSIFIER = "for classification heads"
TRAINING = "only for training with transformers; mrl trains without dropout and noise, as the engine samples"
_ONE_MODEL = "models with several parts (encoder, vision) are not supported"
_SAMPLING = "for transformers' generate; mrl samples with the `rollout` section"
_OTHER_MODELS = "for encoder models, or for the tokenizer"
_OTHER_FRAMEWORKS = "for TensorFlow or TorchScript"

WITHOUT_EFFECT: Mapping[str, str] = {
    "architectures": "the family is chosen by model_type",
    "attention_dropout": TRAINING,
    "attn_implementation": OF_TRANSFORMERS,
    "auto_map": "mrl never runs code of a model folder",
    "bos_token_id": "read with the tokenizer",
    "chunk_size_feed_forward": OF_TRANSFORMERS,
    "dtype": "mrl computes in model.dtype",
    "eos_token_id": "read with the tokenizer",
    "experts_implementation": OF_TRANSFORMERS,
    "gradient_checkpointing": OF_TRANSFORMERS,
    "id2label": _CLASSIFIER,
    "initializer_range": "the weights are loaded, not initialized",
    "label2id": _CLASSIFIER,
    "model_type": "it chose the family",
    "name_or_path": "where the model came from",
    "num_heads": "transformers uses it only for other models",
    "num_labels": _CLASSIFIER,
    "output_attentions": OF_TRANSFORMERS,
    "output_hidden_states": OF_TRANSFORMERS,
    "pad_token_id": "read with the tokenizer",
    "problem_type": _CLASSIFIER,
    "return_dict": OF_TRANSFORMERS,
    "torch_dtype": "mrl computes in model.dtype",
    "transformers_version": "version of the library that wrote the file",
    "use_cache": OF_TRANSFORMERS,
    **dict.fromkeys(
        (
            "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
            "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
            "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
            "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
            "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
            "typical_p",
        ),
        _SAMPLING,
    ),
    **dict.fromkeys(
        (
            "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task", "is_decoder", "prefix",
            "sep_token_id", "task_specific_params", "tie_encoder_decoder", "tokenizer_class",
        ),
        _OTHER_MODELS,
    ),
    **dict.fromkeys(("tf_legacy_loss", "torchscript", "use_bfloat16"), _OTHER_FRAMEWORKS),
}  # fmt: skip
"""Key -> why log-probabilities do not depend on it."""

REQUIRED_VALUES: Mapping[str, tuple[Any, str]] = {
    "add_cross_attention": (False, _ONE_MODEL),
    "attention_chunk_size": (None, "all layers must attend to the full context"),
    "configuration_files": (None, "transformers would read another file instead of this one"),
    "decoder": (None, _ONE_MODEL),
    "fusion_config": (None, _ONE_MODEL),
    "generator": (None, _ONE_MODEL),
    "hidden_act": ("silu", "the activation must be silu"),
    "is_causal": (True, "a token must not attend to later ones"),
    "is_encoder_decoder": (False, _ONE_MODEL),
    "kv_sharing_modes": (None, "layers that share keys and values are not supported"),
    "mlp_layer_types": (
        None,
        "dense layers of MoE models are read from mlp_only_layers and similar keys",
    ),
    "mtp_layer_types": (None, "multi-token prediction is not supported"),
    "num_kv_shared_layers": (None, "layers that share keys and values are not supported"),
    "per_layer_config": (None, "all layers must be the same"),
    "pruned_heads": ({}, "pruned heads are not supported"),
    "text_config": (None, _ONE_MODEL),
    "transformers_weights": (None, "transformers would read the weights from that file"),
    "vision_aspect_ratio": (None, _ONE_MODEL),
    "vision_config": (None, _ONE_MODEL),
    "vision_feature_layer": (None, _ONE_MODEL),
    "vision_feature_select_strategy": (None, _ONE_MODEL),
}
"""Key -> (the only supported value, the reason)."""


def config_keys(
    *read: str,
    required_values: Mapping[str, tuple[Any, str]] | None = None,
    without_effect: Mapping[str, str] | None = None,
) -> ConfigKeys:
    """Returns the treatment of a family's keys: the shared lists and the family's own.

    Args:
        read: Additional keys that determine the `ArchSpec`.
        required_values: Additional entries of `REQUIRED_VALUES`.
        without_effect: Additional entries of `WITHOUT_EFFECT`.
    """
    return ConfigKeys(
        read=frozenset((*DECODER_KEYS, *WINDOW_KEYS, *QUANTIZED, *read)),
        required_values={**REQUIRED_VALUES, **(required_values or {})},
        without_effect={**WITHOUT_EFFECT, **(without_effect or {})},
    )


def refuse_foreign_structure(config: Mapping[str, Any], keys: ConfigKeys) -> None:
    """Raises UserError for a config.json that the family's parameter table would build wrongly."""
    family = config["model_type"]
    read_quantization(config)
    for key, (only, reason) in keys.required_values.items():
        value = config.get(key, only)
        if (type(value), value) != (type(only), only):
            raise UserError(
                f"config.json: {key} is {shown(value)}; {reason}. mrl supports only {shown(only)} for '{family}'."
            )
    unknown = {key: value for key, value in config.items() if key not in keys.all and value is not None}
    if not unknown:
        return
    if not is_known_to_transformers(family):
        raise UserError(
            f"config.json: {', '.join(sorted(unknown))}: neither mrl nor the installed transformers knows what "
            f"these keys mean for '{family}'. List them in `keys` of the family's file in mrl/models, or remove them."
        )
    for key, default in _declared(family).items():
        if key in unknown and unknown[key] != default:
            raise UserError(
                f"config.json: {key} is {shown(unknown[key])}. The installed transformers declares this key for "
                f"'{family}', mrl does not know it and supports only its default, {shown(default)}."
            )


def is_known_to_transformers(family: str) -> bool:
    """Returns whether the installed transformers has a model of this model_type."""
    from transformers import CONFIG_MAPPING

    return family in CONFIG_MAPPING


def _declared(family: str) -> dict[str, Any]:
    """Returns the keys that the installed transformers declares for a family, with their defaults."""
    from transformers import CONFIG_MAPPING

    settings = CONFIG_MAPPING[family]().to_dict()
    return {key: value for key, value in settings.items() if not key.startswith("_")}
