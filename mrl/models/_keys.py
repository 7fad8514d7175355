"""What becomes of every key of a config.json: read, without effect on the numbers, or held to one value.

Owns these three lists, and the refusals that follow from them. A key is what transformers' config class declares, or
what transformers looks for while it loads and runs a model; tests/models/test_config_keys.py holds the lists against
the installed transformers, key by key. A key in none of them is one that transformers does not know either, unless the
installed version is newer than the lists: then it must have its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._rope import ROPE_KEYS
from mrl.models._values import flag, value_of
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
"""The keys that shape the `ArchSpec` of every family."""

WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""The keys that say which layers attend to a part of the context only: none must."""

OF_TRANSFORMERS = "how transformers runs the model, not what it computes"
_CLASSIFIER = "of a classifier's head"
TRAINING = "acts while transformers trains; mrl trains on the probabilities that the engine samples from"
_ONE_MODEL = "it describes a model of several parts"
_SAMPLING = "of transformers' generate; the `rollout` section says how tokens are sampled"
_OTHER_MODELS = "of models with an encoder, or of the tokenizer"
_OTHER_FRAMEWORKS = "of TensorFlow or TorchScript"

WITHOUT_EFFECT: Mapping[str, str] = {
    "architectures": "the family is chosen by model_type",
    "attention_dropout": TRAINING,
    "attn_implementation": OF_TRANSFORMERS,
    "auto_map": "code of a model folder is never run",
    "bos_token_id": "the tokenizer's business",
    "chunk_size_feed_forward": OF_TRANSFORMERS,
    "dtype": "the config says which dtype mrl computes in",
    "eos_token_id": "read with the tokenizer",
    "experts_implementation": OF_TRANSFORMERS,
    "gradient_checkpointing": OF_TRANSFORMERS,
    "id2label": _CLASSIFIER,
    "initializer_range": "of weights that are not loaded",
    "label2id": _CLASSIFIER,
    "model_type": "it chose the family",
    "name_or_path": "where the model came from",
    "num_heads": "transformers only compares it with other models' keys",
    "num_labels": _CLASSIFIER,
    "output_attentions": OF_TRANSFORMERS,
    "output_hidden_states": OF_TRANSFORMERS,
    "pad_token_id": "the tokenizer's business",
    "problem_type": _CLASSIFIER,
    "return_dict": OF_TRANSFORMERS,
    "torch_dtype": "the config says which dtype mrl computes in",
    "transformers_version": "who wrote the file",
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

HELD: Mapping[str, tuple[Any, str]] = {
    "add_cross_attention": (False, _ONE_MODEL),
    "attention_chunk_size": (None, "all layers must attend to the whole context"),
    "configuration_files": (None, "transformers would read another file in place of this one"),
    "decoder": (None, _ONE_MODEL),
    "fusion_config": (None, _ONE_MODEL),
    "generator": (None, _ONE_MODEL),
    "hidden_act": ("silu", "the activation must be silu"),
    "is_causal": (True, "a token must not attend to later ones"),
    "is_encoder_decoder": (False, _ONE_MODEL),
    "kv_sharing_modes": (None, "every layer must have its own keys and values"),
    "mlp_layer_types": (None, "all layers must have the same MLP"),
    "mtp_layer_types": (None, "layers that predict several tokens are not built"),
    "num_kv_shared_layers": (None, "every layer must have its own keys and values"),
    "per_layer_config": (None, "all layers must be the same"),
    "pruned_heads": ({}, "all heads are built"),
    "text_config": (None, _ONE_MODEL),
    "transformers_weights": (None, "transformers would read the weights from that file"),
    "vision_aspect_ratio": (None, _ONE_MODEL),
    "vision_feature_layer": (None, _ONE_MODEL),
    "vision_feature_select_strategy": (None, _ONE_MODEL),
}
"""Key -> the value that it must have where it is set, and why."""

QUANTIZED = ("quantization_config", "compression_config")


def config_keys(
    *read: str, held: Mapping[str, tuple[Any, str]] | None = None, without_effect: Mapping[str, str] | None = None
) -> ConfigKeys:
    """The keys of a family: those of every decoder, and its own.

    Args:
        read: Its own keys that shape the `ArchSpec`.
        held: As in `HELD`.
        without_effect: As in `WITHOUT_EFFECT`.
    """
    return ConfigKeys(
        read=frozenset((*DECODER_KEYS, *WINDOW_KEYS, *QUANTIZED, *read)),
        held={**HELD, **(held or {})},
        without_effect={**WITHOUT_EFFECT, **(without_effect or {})},
    )


def refuse_foreign_structure(config: Mapping[str, Any], keys: ConfigKeys) -> None:
    """Raises UserError for keys under which the family's table would be the wrong model."""
    family = config["model_type"]
    if any(config.get(key) is not None for key in QUANTIZED):
        raise UserError(
            "config.json: the checkpoint is quantized (quantization_config). Training needs float weights: use the "
            "bfloat16 or float32 release of this model."
        )
    for key, (only, reason) in keys.held.items():
        value = config.get(key, only)
        if (type(value), value) != (type(only), only):
            raise UserError(
                f"config.json: {key} is {shown(value)}; {reason}. mrl's '{family}' builds {shown(only)} only."
            )
    unknown = {key: value for key, value in config.items() if key not in keys.all and value is not None}
    if not unknown:
        return
    for key, default in _declared(family).items():
        if key in unknown and unknown[key] != default:
            raise UserError(
                f"config.json: {key} is {shown(unknown[key])}. The installed transformers knows this key of '{family}' "
                f"models, mrl does not: only its default, {shown(default)}, is sure to be what mrl builds."
            )


def last_layers_slide(config: Mapping[str, Any], layers: int) -> bool:
    """Qwen 2's and 3's rule: the layers from `max_window_layers` on, unless `layer_types` names each one's kind."""
    first = value_of(config, "max_window_layers", {"max_window_layers": 28})
    return (
        flag(config, "use_sliding_window", {"use_sliding_window": False})
        and config.get("layer_types") is None
        and not (type(first) is int and first >= layers)
    )


def any_layer_slides(config: Mapping[str, Any], layers: int) -> bool:
    """The rule of qwen's mixtures: versions of transformers chose other layers, so that none may slide."""
    return flag(config, "use_sliding_window", {"use_sliding_window": False})


def refuse_windows(config: Mapping[str, Any], defaults: Mapping[str, Any], layers: int, *, slides: bool) -> None:
    """Raises UserError where a layer attends to less than the whole context.

    Args:
        config: The parsed file.
        defaults: What transformers assumes for keys that the file may leave out.
        layers: Of the model.
        slides: Whether some layer would attend to the last `sliding_window` tokens only.
    """
    kinds = config.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        raise UserError(f"config.json: layer_types is {shown(kinds)}; all {layers} layers must be 'full_attention'.")
    window = value_of(config, "sliding_window", defaults)
    if not slides or window is None:
        return
    longest = value_of(config, "max_position_embeddings", defaults)
    if not isinstance(window, int) or window < longest:
        raise UserError(
            f"config.json: sliding_window is {shown(window)}, below max_position_embeddings={shown(longest)}, and some "
            "layers use it (use_sliding_window, max_window_layers); all layers must attend to the whole context."
        )


def _declared(family: str) -> dict[str, Any]:
    """The keys that the installed transformers declares for a family -> their defaults."""
    from transformers import CONFIG_MAPPING

    settings = CONFIG_MAPPING[family]().to_dict()
    return {key: value for key, value in settings.items() if not key.startswith("_")}
