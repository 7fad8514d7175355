"""Settings of low-rank adapters in a PEFT folder, for the config that names the folder.

`checkpoint/formats/peft.py` reads the adapters, and refuses what mrl does not support.
"""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

from mrl.config.json_file import read_json

ADAPTER_CONFIG = "adapter_config.json"
"""File of a PEFT folder, which has low-rank adapters instead of a model."""

ADAPTER_FOLDER = "adapter"
"""PEFT folder in a step's folder of mrl's own exports."""

_NAMES = {
    "rank": "r",
    "alpha": "lora_alpha",
    "use_rslora": "use_rslora",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
}
"""Field of `AdapterConfig` -> PEFT's name."""


def is_adapter_folder(folder: str | Path) -> bool:
    """Returns whether a folder has adapters instead of a model; False for a folder that does not exist."""
    return os.path.isfile(os.path.join(folder, ADAPTER_CONFIG))


def adapter_settings(folder: str | Path) -> dict[str, Any]:
    """Returns the fields of `AdapterConfig` that adapter_config.json has; modules only as a list, not as a pattern.

    Raises:
        UserError: The file cannot be read or is not a JSON object.
    """
    content = read_json(Path(folder) / ADAPTER_CONFIG)
    found = {field: content.get(name) for field, name in _NAMES.items()}
    return {field: value for field, value in found.items() if _fits(field, value)}


def _fits(field: str, value: Any) -> bool:
    """Returns whether a value has the field's type; the reader of the folder refuses others."""
    if field.endswith("_modules"):
        return isinstance(value, list) and all(isinstance(name, str) for name in value)
    kinds = {"rank": (int,), "alpha": (int, float), "use_rslora": (bool,)}
    return type(value) in kinds[field]
