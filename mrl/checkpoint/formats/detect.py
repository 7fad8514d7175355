"""Detection of a checkpoint's format from the names of its files."""

from __future__ import annotations

from pathlib import Path

from mrl.checkpoint.formats.base import Source
from mrl.checkpoint.formats.hf import INDEX, SINGLE, HfSource
from mrl.checkpoint.formats.megatron import CONFIG, MegatronSource
from mrl.checkpoint.formats.trtllm import RANK_FILES, TrtllmSource
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.peft_folder import is_adapter_folder
from mrl.errors import UserError
from mrl.models.base import ArchSpec


def open_source(folder: str | Path, arch: ArchSpec | None = None) -> Source:
    """Opens a checkpoint of any supported format.

    Args:
        folder: A Hugging Face folder, a TensorRT-LLM checkpoint, or a distributed checkpoint of Megatron, mrl or this
            package's converters.
        arch: The model, for a Megatron checkpoint without a config.json; None: the model described in the folder.

    Raises:
        UserError: The folder has no supported format, or is damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"checkpoint folder '{folder}' does not exist.{did_you_mean_path(path)}")
    if (path / SINGLE).is_file() or (path / INDEX).is_file() or is_adapter_folder(path):  # the last is refused
        return HfSource(path)
    if any(path.glob(RANK_FILES)):
        return TrtllmSource(path)
    try:
        return MegatronSource(path, arch)
    except UserError as error:
        if not (path / CONFIG).is_file() or any(path.glob("*.distcp")):
            raise
        raise UserError(
            f"'{folder}' has a {CONFIG}, but neither {SINGLE} nor {INDEX} (Hugging Face), nor {RANK_FILES} "
            f"(TensorRT-LLM). Reading it as a Megatron checkpoint failed: {error}"
        ) from error
