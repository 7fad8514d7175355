"""Rules of the section `model` and of `reference.path`: existing folders, sane sizes, matching tokenizer.

Imports no torch.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models import transformer_engine
from mrl.models.base import ArchSpec

MAX_LAYERS, MAX_EXPERTS = 4096, 65536
"""Largest model sizes; sharding plans have an entry for each tensor, so larger ones would take too long."""


def model_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule about the models' folders and data types."""
    model = config.model
    if (model.path is None) == (model.preset is None):
        came = "neither" if model.path is None else "both"
        yield (
            f"{came} of model.path and model.preset set, expected one. Set model.path to a Hugging Face folder, or "
            "model.preset to the name of a preset."
        )
    if model.path is not None and not os.path.isdir(model.path):
        yield f"model.path={model.path} is neither a folder nor a name on the hub. Set a local Hugging Face folder."
    if model.path is None and model.tokenizer is None:
        yield 'A preset has no tokenizer. Set model.tokenizer to a folder, or to "char:<characters>".'
    if config.reference.path is not None and not os.path.isdir(config.reference.path):
        yield f"reference.path={config.reference.path} is not a folder. Set a local Hugging Face folder."
    if config.actor.transformer_impl == "te" and model.dtype not in transformer_engine.DTYPES:
        yield (
            f"actor.transformer_impl=te is not supported with model.dtype={model.dtype}: TransformerEngine's attention "
            "for packed sequences lacks this type. Set model.dtype=bfloat16, or actor.transformer_impl=local."
        )


def check_size(arch: ArchSpec) -> None:
    """Checks the number of layers and experts against MAX_LAYERS and MAX_EXPERTS.

    Raises:
        UserError: The model is too large.
    """
    num_experts = arch.moe.num_experts if arch.moe else 0
    if arch.num_layers > MAX_LAYERS or num_experts > MAX_EXPERTS:
        raise UserError(
            f"The model has {arch.num_layers} layers and {num_experts} experts; mrl supports at most {MAX_LAYERS} "
            f"layers and {MAX_EXPERTS} experts. Check the model's config.json, or the preset's overrides."
        )


def token_rules(arch: ArchSpec, tokenizer_vocab_size: int) -> Iterator[str]:
    """Yields a message if the tokenizer has ids without an embedding in the model."""
    if tokenizer_vocab_size > arch.vocab_size:
        yield (
            f"The tokenizer has ids up to {tokenizer_vocab_size - 1}, but the model has embeddings for only "
            f"{arch.vocab_size} tokens. Set model.tokenizer to the model's own."
        )
