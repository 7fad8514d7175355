"""Checks whether TensorRT-LLM computes a model's rotary positions as mrl does. Imports no torch.

The rules follow from TensorRT-LLM 1.x: `RopeParams` of the LLM API reads neither `attention_factor` nor `truncate`. The
tables of a built engine have `max_position_embeddings` rows; for the LLM API, `engine_rope` raises that number.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.checkpoint.formats.trtllm_config import rotary_refusal, unread_yarn
from mrl.config.config import Config
from mrl.models.base import ArchSpec


def built_refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each reason why no engine can be built with the positions of the run."""
    longest = config.rollout.max_sequence_length
    if longest > arch.max_position_embeddings:
        yield (
            f"rollout.name={config.rollout.name}: the tables of a built engine have max_position_embeddings="
            f"{arch.max_position_embeddings} positions, and sequences can have {longest}. Raise it in the model's "
            f"config.json to {longest}; with yarn, first write the original length into rope_scaling."
        )
    if (reason := rotary_refusal(arch)) is not None:
        yield f"rollout.name={config.rollout.name}: {reason}"


def refusals(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each rotary setting that the LLM API does not read."""
    scaling = arch.rope_scaling
    ignored = () if scaling is None else unread_yarn(scaling)
    if scaling is not None and scaling.rope_type == "longrope":
        ignored = tuple(name for name in ("factor", "attention_factor") if getattr(scaling, name) is not None)
    if ignored:
        yield (
            f"rollout.name={config.rollout.name}: TensorRT-LLM does not read {', '.join(ignored)} of the model's "
            "rope_scaling, so that it would sample from another model. Use rollout.name=native or vllm."
        )
