"""Everything that imports Megatron-Core: actor, critic, optimizer, pipeline schedule, router replay, offloading.

This is the only folder that imports megatron.core. Importing it first patches megatron-core for this machine
(`megatron/cpu/import_patches.py`), which is impossible once megatron is imported.
"""

import logging
import warnings
from functools import partial

import torch

from mrl.megatron.cpu.import_patches import prepare


def quieten() -> None:
    """Silences Megatron's warnings about missing optional packages and names that torch has deprecated.

    Also silences its warning about overwriting a non-empty checkpoint folder, which it sees when faster ranks have
    started to write; mrl saves each checkpoint into a new folder. Version 0.19 loads each rank's common state through
    torch, and warns of doing so.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch\.distributed|megatron)\.")
    for message in ("The argument order of load", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", message=message, module=r"torch\.distributed\.checkpoint\.")
    for name, text in (
        ("serialization", "Overwriting old incomplete"),
        ("strategies.common", "load_common is deprecated"),
    ):
        logging.getLogger(f"megatron.core.dist_checkpointing.{name}").addFilter(partial(_lacks, text))


def _lacks(text: str, record: logging.LogRecord) -> bool:
    return text not in record.getMessage()


quieten()
prepare("cuda" if torch.cuda.is_available() else "cpu")
