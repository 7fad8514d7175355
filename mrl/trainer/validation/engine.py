"""Rules of `rollout.engine_dir`: built TensorRT-LLM engines must fit the run. Imports no torch, no TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.engines.trtllm.engine_dir import Wanted, mismatches, read_engine_folder
from mrl.errors import UserError
from mrl.models.base import ArchSpec


def wanted_engine(config: Config, arch: ArchSpec) -> Wanted:
    """Returns the properties that the built engines of a run must have."""
    rollout = config.rollout
    return Wanted(
        arch=arch,
        tp_size=rollout.tensor_model_parallel_size,
        pp_size=rollout.pipeline_model_parallel_size,
        moe_ep_size=rollout.expert_parallel_size,
        dtype=rollout.dtype or config.model.dtype,
        batch_size=rollout.max_num_seqs,
        input_len=rollout.prompt_length,
        seq_len=config.rollout.longest,
        num_tokens=rollout.max_num_batched_tokens,
    )


def engine_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each broken rule, with the command lines that build fitting engines."""
    rollout = config.rollout
    if rollout.name != "trtllm_engine":
        return
    wanted = wanted_engine(config, arch)
    if rollout.engine_dir is None:
        yield (
            "rollout.name=trtllm_engine needs rollout.engine_dir, a folder of engines built for this model and these "
            f"sizes. Build them with:\n{wanted.commands()}"
        )
        return
    try:
        broken = list(mismatches(read_engine_folder(rollout.engine_dir), wanted))
    except UserError as error:
        yield f"rollout.engine_dir: {error}"
        return
    if broken:
        yield (
            f"rollout.engine_dir={rollout.engine_dir} does not fit the run: {'; '.join(broken)}. Build engines that "
            f"fit with:\n{wanted.commands()}"
        )
