"""What an engine is built from, outside a run."""

from pathlib import Path

import torch

from mrl.engines.base import EngineSpec


def spec_of(config, arch, *, dtype=torch.float32, **others):
    """On a CPU; `others` replace fields of a rank alone."""
    fields = {
        "tp_group": None,
        "device": torch.device("cpu"),
        "decode": str,
        "write_model_folder": lambda _: Path(),
        "timeout_s": 60.0,
        "trains_on_logprobs": True,
    }
    return EngineSpec(config=config, arch=arch, dtype=dtype, **fields | others)
