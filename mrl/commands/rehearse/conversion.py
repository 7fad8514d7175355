"""The last stage of a rehearsal: its checkpoint as a Hugging Face folder and as TensorRT-LLM files, compared.

Owns the two conversions; how they are made and compared is in `commands/convert/convert.py` and
`commands/convert/verify.py`.
"""

from __future__ import annotations

from pathlib import Path

from mrl.checkpoint.formats.base import Source, Target
from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.checkpoint.formats.trtllm import TrtllmSource, TrtllmTarget
from mrl.commands.convert.convert import convert
from mrl.commands.convert.verify import verify
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.hf_config import family_of
from mrl.parallel_layout import Grid
from mrl.resharding.trtllm import TrtllmMapping


def to_hugging_face(checkpoint: Path, folder: Path, arch: ArchSpec, dtype: str) -> str:
    """Converts a commit of a run; what was found, in words.

    Args:
        checkpoint: A folder of the run's checkpoints.
        folder: To be made.
        arch: The model.
        dtype: Of the actor.

    Raises:
        UserError: The checkpoint is damaged, or the two differ.
    """
    with MegatronSource(checkpoint, arch) as source:
        return _convert(source, HfTarget(arch, dtype), HfSource, folder)


def to_trtllm(hugging_face: Path, folder: Path, arch: ArchSpec, dtype: str, grid: Grid) -> str | None:
    """Converts a Hugging Face folder for the ranks of a replica; None where TensorRT-LLM has no such model.

    Args:
        hugging_face: The folder.
        folder: To be made.
        arch: The model.
        dtype: Of the actor.
        grid: Its rollout replicas.

    Raises:
        UserError: The folder is damaged, or the two differ.
    """
    if family_of(arch).trtllm_architecture is None:
        return None
    mapping = TrtllmMapping(tp_size=grid.rollout_tp, moe_ep_size=grid.rollout_ep if arch.moe else 0)
    with HfSource(hugging_face, arch) as source:
        return _convert(source, TrtllmTarget(arch, mapping, dtype), TrtllmSource, folder)


def _convert(source: Source, target: Target, opened: type[HfSource] | type[TrtllmSource], folder: Path) -> str:
    convert(source, target, folder)
    with opened(folder) as made:
        found = verify(source, made)
    if not found.same:
        raise UserError(f"'{folder}' is not what '{source.folder}' holds; they differ first in {found.first}.")
    return f"{found.num_tensors} tensors in {len(target.files)} file(s), bit for bit the same"
