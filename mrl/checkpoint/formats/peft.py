"""PEFT folders: adapter_config.json and adapter_model.safetensors, with low-rank adapters of a Hugging Face model.

Source, peft 0.21: `LoraConfig` (keys), `get_peft_model_state_dict` (names of the tensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.safetensors_file import SafetensorsFile
from mrl.config.config import LoraConfig
from mrl.errors import UserError, first_line, shown
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import check_tensors
from mrl.resharding.layout import Layout
from mrl.resharding.lora import adapted_modules, peft_layout
from mrl.resharding.regions import slices

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "layers_to_transform": None,
    "alora_invocation_tokens": None,
}
"""Keys that change what the adapters compute -> the only value that mrl supports."""


def is_adapter_folder(path: str | Path) -> bool:
    """Returns whether a folder has adapters instead of a model."""
    return (Path(path) / CONFIG).is_file()


def adapter_config(arch: ArchSpec, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    Args:
        arch: The model.
        lora: Config section; `rank` is above 0.
        base: Name or path of the model that the adapters belong to; None: unknown.
    """
    modules = adapted_modules(arch, lora)
    return {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.use_rslora,
        "target_modules": _shortest_names(arch, list(modules)),
        "exclude_modules": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read_adapters(
    folder: str | Path, arch: ArchSpec, lora: LoraConfig, layout: Layout, tensors: Mapping[str, Tensor]
) -> None:
    """Fills one rank's adapters from a PEFT folder. Not collective: each rank reads its own parts.

    Args:
        folder: PEFT folder.
        arch: The model.
        lora: Config section, which the folder must agree with.
        layout: Layout of this rank's adapters.
        tensors: Name -> tensor to fill in place; dtypes may differ from the file's.

    Raises:
        UserError: The folder is no PEFT folder, or its adapters have another rank, scale, kind or other modules.
    """
    _check_config(Path(folder), lora)
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise UserError(f"'{folder}' has no {WEIGHTS}. PEFT's save_pretrained writes it; other formats are not read.")
    file, expected = SafetensorsFile(path), peft_layout(arch, lora, "float32")
    missing = [name for name in expected if name not in file.headers]
    unknown = [name for name in file.headers if name not in expected]
    if missing or unknown:
        problem = (
            f"has {len(unknown)} tensors that this run has no adapters for, first {shown(unknown[0])}"
            if unknown
            else (f"lacks {len(missing)} tensors, first {shown(missing[0])}")
        )
        raise UserError(
            f"'{path}' {problem}. Set actor.lora.target_modules and exclude_modules to the modules of the folder's "
            f"{CONFIG}, and model.path to its model."
        )
    for name, stored in expected.items():
        if file.headers[name].shape != stored.shape:
            raise UserError(
                f"'{path}': '{name}' has shape {list(file.headers[name].shape)}, expected {list(stored.shape)}. The "
                "adapters belong to a model of other sizes, or have another rank than actor.lora.rank."
            )
    check_tensors(layout, tensors, dtypes=False)
    with torch.no_grad():
        for name, stored in layout.items():
            for region in stored.padding:
                tensors[name][slices(region)] = 0
            for piece in stored.pieces:
                tensors[name][slices(piece.dst)].copy_(file.tensor(piece.hf_name)[slices(piece.src)])


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Returns adapter_config.json.

    Raises:
        UserError: It is missing or not a JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"'{path}' is not a PEFT config: {first_line(error)}. Name a folder that PEFT wrote."
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"'{path}' is not a PEFT config: expected a JSON object.")
    return found


def _check_config(folder: Path, lora: LoraConfig) -> None:
    """Raises UserError where the folder's adapters compute something else than the config's."""
    found = read_adapter_config(folder)
    for key, value in _PLAIN.items():
        if found.get(key, value) not in (value, None, [], {}):
            raise UserError(f"'{folder / CONFIG}': {key}={shown(found[key])} is not supported, only {value}.")
    own = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora}
    keys = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "use_rslora"}
    for key, value in own.items():
        if found.get(key, False if key == "use_rslora" else None) != value:
            raise UserError(
                f"'{folder / CONFIG}' has {key}={shown(found.get(key))}, but actor.lora.{keys[key]}={value}. Set it to "
                "the folder's value."
            )


def _shortest_names(arch: ArchSpec, modules: list[str]) -> list[str]:
    """Returns the last names of the adapted modules, or their complete names if another module has such a name."""
    last = sorted({module.rpartition(".")[2] for module in modules})
    named = adapted_modules(arch, LoraConfig(rank=1, target_modules=last))
    return last if len(named) == len(modules) else modules
