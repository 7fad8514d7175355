"""Refuses models that are not there, of sizes beyond any, or that do not fit their tokenizer.

Owns the rules of `model`, of `reference.path`, and of what `model.dtype` asks of the layers. It imports no torch.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models import transformer_engine
from mrl.models.base import ArchSpec

MAX_LAYERS, MAX_EXPERTS = 4096, 65536
"""Of a model: each of its tensors is placed by itself."""


def model_rules(config: Config) -> Iterator[str]:
    """A message for each model that is not named once, or is no folder."""
    model = config.model
    if (model.path is None) == (model.preset is None):
        came = "neither" if model.path is None else "both"
        yield f"{came} of model.path and model.preset set: give one, a Hugging Face folder or the name of a preset."
    if model.path is not None and not os.path.isdir(model.path):
        yield f"model.path={model.path} is not a folder, nor a name as on the hub. Give a local Hugging Face folder."
    if model.path is None and model.tokenizer is None:
        yield 'a preset has no tokenizer: set model.tokenizer to a folder, or to "char:<characters>".'
    if config.reference.path is not None and not os.path.isdir(config.reference.path):
        yield f"reference.path={config.reference.path} is not a folder. Give a local Hugging Face folder."
    if config.actor.transformer_impl == "te" and model.dtype not in transformer_engine.DTYPES:
        yield (
            f"actor.transformer_impl=te is refused with model.dtype={model.dtype}: TransformerEngine's attention for "
            "packed sequences has no such type. Set model.dtype=bfloat16, or actor.transformer_impl=local."
        )


def check_size(arch: ArchSpec) -> None:
    """Refuses a model beyond any: what is computed of its tensors would take too long.

    Raises:
        UserError: With its layers and experts.
    """
    num_experts = arch.moe.num_experts if arch.moe else 0
    if arch.num_layers > MAX_LAYERS or num_experts > MAX_EXPERTS:
        raise UserError(
            f"the model has {arch.num_layers} layers and {num_experts} experts; mrl counts with at most {MAX_LAYERS} "
            f"layers and {MAX_EXPERTS} experts."
        )


def token_rules(arch: ArchSpec, tokenizer_vocab_size: int) -> Iterator[str]:
    """A message where the tokenizer gives ids that the model has no embedding for."""
    if tokenizer_vocab_size > arch.vocab_size:
        yield (
            f"the tokenizer gives ids up to {tokenizer_vocab_size - 1}, the model has embeddings for {arch.vocab_size} "
            "tokens. Set model.tokenizer to the model's own."
        )
