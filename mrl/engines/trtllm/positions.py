"""Checks whether TensorRT-LLM computes a model's rotary positions as mrl does. Imports no torch.

The rules follow from TensorRT-LLM 1.x: `RopeParams` of the LLM API reads neither `attention_factor`
nor `truncate`, and its tables have `max_position_embeddings` rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.checkpoint.formats.trtllm_config import rotary_refusal, unread_yarn
from mrl.config.config import Config
from mrl.models.base import ArchSpec


def table_refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message if sequences can be longer than TensorRT-LLM's tables."""
    longest = config.rollout.max_sequence_length
    if longest > arch.max_position_embeddings:
        yield (
            f"rollout.name={config.rollout.name}: TensorRT-LLM has positions for max_position_embeddings="
            f"{arch.max_position_embeddings} tokens, and sequences can have {longest}. Set max_position_embeddings in "
            f"the model's config.json to at least {longest}, with original_max_position_embeddings in rope_scaling."
        )


def built_refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each reason why no engine can be built with the model's positions."""
    yield from table_refusals(config, arch)
    if (reason := rotary_refusal(arch)) is not None:
        yield f"rollout.name={config.rollout.name}: {reason}"


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each rotary setting that the LLM API does not read."""
    yield from table_refusals(config, arch)
    scaling = arch.rope_scaling
    ignored = () if scaling is None else unread_yarn(scaling)
    if scaling is not None and scaling.rope_type == "longrope":
        ignored = tuple(name for name in ("factor", "attention_factor") if getattr(scaling, name) is not None)
    if ignored:
        yield (
            f"rollout.name={config.rollout.name}: TensorRT-LLM does not read {', '.join(ignored)} of the model's "
            "rope_scaling, so that it would sample from another model. Use rollout.name=native or vllm."
        )
