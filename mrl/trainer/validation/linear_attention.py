"""Rules of models with linear attention and output gates. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.config.megatron_fields.fp8 import fp8_training
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout


def linear_attention_rules(config: Config, arch: ArchSpec, grid: ParallelLayout) -> Iterator[str]:
    """Yields a message for each setting that mrl does not support with such a model."""
    if arch.linear_attention is None and not arch.output_gate:
        return
    what = f"this {arch.family} model has linear attention and output gates"
    if grid.cp > 1:
        yield (
            f"parallel.context_parallel_size={grid.cp}: {what}, whose state passes through all tokens of a sequence. "
            "Set it to 1, and raise parallel.tensor_model_parallel_size if memory is short."
        )
    if fp8_training(config.megatron.transformer) is not None:
        yield f"megatron.transformer.fp8: {what}, which mrl does not train in FP8. Remove it."
    if config.rollout.true_on_policy:
        yield (f"rollout.true_on_policy=true: {what}, and the batch-invariant kernels compute neither. Remove it.")
    if config.rollout.speculative.method is not None:
        yield (
            f"rollout.speculative.method={config.rollout.speculative.method}: {what}, whose state cannot be taken back "
            "when a draft is rejected. Remove it."
        )
    if config.rollout.quantization is not None:
        yield (f"rollout.quantization={config.rollout.quantization}: {what}, which mrl does not quantize. Remove it.")
