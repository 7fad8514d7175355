"""Last stage of a rehearsal: converts its checkpoint to Hugging Face and TensorRT-LLM files and verifies them."""

from __future__ import annotations

from pathlib import Path

from mrl.checkpoint.formats.base import Source, Target
from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget
from mrl.checkpoint.formats.trtllm_config import model_refusal
from mrl.commands.convert.convert import convert
from mrl.commands.convert.verify import verify
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.trtllm import TrtllmMapping


def to_hugging_face(checkpoint: Path, folder: Path, arch: ArchSpec, dtype: str) -> str:
    """Converts a checkpoint to a Hugging Face folder and returns a summary.

    Raises:
        UserError: The checkpoint is damaged, or the conversion differs from it.
    """
    with MegatronSource(checkpoint, arch) as source:
        return _convert(source, HfTarget(arch, dtype), HfSource, folder)


def to_trtllm(hugging_face: Path, folder: Path, arch: ArchSpec, dtype: str, grid: ParallelLayout) -> str | None:
    """Converts a Hugging Face folder for a replica's ranks and returns a summary; None if `model_refusal` has a reason.

    Raises:
        UserError: The folder is damaged, or the conversion differs from it.
    """
    if model_refusal(arch) is not None:
        return None
    mapping = TrtllmMapping(tp_size=grid.rollout_tp, moe_ep_size=grid.rollout_ep if arch.moe else 0)
    with HfSource(hugging_face, arch) as source:
        return _convert(source, TrtllmTarget(arch, mapping, dtype), TrtllmSource, folder)


def _convert(source: Source, target: Target, reader: type[HfSource] | type[TrtllmSource], folder: Path) -> str:
    convert(source, target, folder)
    with reader(folder) as converted:
        found = verify(source, converted)
    if not found.same:
        raise UserError(f"'{folder}' differs from '{source.folder}'; the first different tensor is {found.first}.")
    return f"{found.num_tensors} tensors in {len(target.files)} file(s), bit for bit the same"
