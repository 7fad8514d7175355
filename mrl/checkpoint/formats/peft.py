"""PEFT folders: adapter_config.json and adapter_model.safetensors, with low-rank adapters of a Hugging Face model.

Source, peft 0.21: `LoraConfig` (keys), `get_peft_model_state_dict` (names of the tensors).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors
from mrl.checkpoint.io.partial_folder import disk_errors
from mrl.config.config import LoraConfig
from mrl.config.json_file import read_json
from mrl.config.peft_folder import ADAPTER_CONFIG
from mrl.errors import UserError, shown
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import DTYPES, fill_tensors
from mrl.resharding.layout import Layout
from mrl.resharding.lora import adapted_modules, first_expert, peft_layout, peft_name, scale_of
from mrl.resharding.regions import slices

WEIGHTS = "adapter_model.safetensors"

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

_ABSENT = (
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
"""Further such keys, which not every version of peft knows; supported if absent, null or false."""

_DTYPES = ("float32", "bfloat16", "float16")


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
    folder: str | Path,
    arch: ArchSpec,
    lora: LoraConfig,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    *,
    key: str = "actor.lora",
) -> None:
    """Fills one rank's adapters from a PEFT folder. Not collective: each rank reads its own parts.

    Args:
        folder: PEFT folder.
        arch: The model.
        lora: Config section, which the folder must agree with.
        layout: Layout of this rank's adapters.
        tensors: Name -> tensor to fill in place; dtypes may differ from the file's.
        key: The config section, for messages.

    Raises:
        UserError: The folder is no PEFT folder, or its adapters have another rank, scale, kind or other modules, or
            differ between experts that are to share them.
    """
    file = open_adapters(folder, arch, lora, key)
    fill_tensors(layout, tensors, lambda hf_name, region: file.tensor(hf_name)[slices(region)])


def open_adapters(folder: str | Path, arch: ArchSpec, lora: LoraConfig, key: str) -> SafetensorsFile:
    """Returns the open file of a PEFT folder, after a check of the config and of all headers.

    Args:
        folder: PEFT folder.
        arch: The model.
        lora: Config section, which the folder must agree with.
        key: The config section, for messages.

    Raises:
        UserError: See `read_adapters`.
    """
    _check_config(Path(folder), lora, key)
    file = _open_weights(Path(folder))
    _check_weights(
        file,
        peft_layout(arch, lora, "float32"),
        f"Set {key}.target_modules and exclude_modules to the modules of the folder's {ADAPTER_CONFIG}, and model.path "
        "to its model.",
    )
    if lora.share_expert_adapters:
        _check_shared(file, key)
    return file


class PeftFolder:
    """The adapters of a PEFT folder, open for reading; rank, scale and modules are those of the folder.

    Attributes:
        lora: The folder's settings as a config section.
        files: Paths of the files that are read.
    """

    def __init__(self, folder: str | Path, arch: ArchSpec) -> None:
        """Checks the config and the headers.

        Args:
            folder: PEFT folder.
            arch: The model that the adapters belong to.

        Raises:
            UserError: The folder is no PEFT folder, has adapters of a kind that mrl does not support, or adapters of
                another model.
        """
        self.folder, self._arch = Path(folder), arch
        self.files: tuple[Path, ...] = (self.folder / ADAPTER_CONFIG, self.folder / WEIGHTS)
        config = read_json(self.folder / ADAPTER_CONFIG)
        _check_kind(self.folder, config)
        self._file = _open_weights(self.folder)
        self._base = config.get("base_model_name_or_path")
        remedy = f"Its {ADAPTER_CONFIG} names the model {shown(self._base)}: give the folder of that model as the base."
        self.lora = _settings(self.folder, config, arch, tuple(self._file.headers), remedy)
        _check_weights(self._file, peft_layout(arch, self.lora, "float32"), remedy)

    def __reduce__(self) -> tuple[type[PeftFolder], tuple[Path, ArchSpec]]:
        return PeftFolder, (self.folder, self._arch)  # maps cannot be sent to another process

    def tensor(self, name: str) -> Tensor:
        """Returns an adapter by its name in the file, as a view of the mapped file."""
        return self._file.tensor(name)

    def describe(self) -> dict[str, Any]:
        """Returns the settings for a manifest, and the model that adapter_config.json names."""
        return {
            "folder": str(self.folder),
            "base_model_name_or_path": self._base,
            "rank": self.lora.rank,
            "scale": scale_of(self.lora),
            "modules": len(adapted_modules(self._arch, self.lora)),
        }


def check_new(folder: str | Path) -> None:
    """Raises UserError if a folder that is to be written exists."""
    if Path(folder).exists():
        raise UserError(f"'{folder}' exists already. Choose a new folder, or remove this one.")


def write_peft_folder(
    folder: str | Path,
    arch: ArchSpec,
    lora: LoraConfig,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    dtype: str,
) -> None:
    """Writes adapters as a PEFT folder, which has another name until it is complete.

    Args:
        folder: Path of the new folder; must not exist.
        arch: The model.
        lora: Settings of the adapters.
        read: Returns an adapter by its name in PEFT's files.
        base: Name or path of the model; None: unknown.
        dtype: Dtype of the file.

    Raises:
        UserError: The folder exists, or cannot be written.
    """
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    check_new(target)
    layout = peft_layout(arch, lora, dtype)
    with disk_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted command
        partial.mkdir(parents=True)
        write_safetensors(
            partial / WEIGHTS,
            {name: (stored.shape, dtype) for name, stored in layout.items()},
            ((name, read(name).to(DTYPES[dtype])) for name in layout),
            {"format": "pt"},
        )
        (partial / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(arch, lora, base), indent=2) + "\n")
        os.replace(partial, target)


def _open_weights(folder: Path) -> SafetensorsFile:
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"'{folder}' has no {WEIGHTS}. PEFT's save_pretrained writes it; other formats are not read.")
    return SafetensorsFile(path)


def _check_weights(file: SafetensorsFile, expected: Layout, remedy: str) -> None:
    """Raises UserError, which ends with `remedy` if names differ, if a file has other adapters than expected."""
    missing = [name for name in expected if name not in file.headers]
    unknown = [name for name in file.headers if name not in expected]
    if missing or unknown:
        problem = (
            f"has {len(unknown)} unexpected tensors, first {shown(unknown[0])}"
            if unknown
            else f"lacks {len(missing)} tensors, first {shown(missing[0])}"
        )
        raise UserError(f"'{file.path}' {problem}. {remedy}")
    for name, stored in expected.items():
        header = file.headers[name]
        if header.shape != stored.shape:
            raise UserError(
                f"'{file.path}': '{name}' has shape {list(header.shape)}, expected {list(stored.shape)}. The adapters "
                f"belong to a model of other sizes, or have another rank than r of {ADAPTER_CONFIG}."
            )
        if header.dtype not in _DTYPES:
            raise UserError(
                f"'{file.path}': '{name}' is stored as {header.dtype}, expected one of {', '.join(_DTYPES)}."
            )


def _check_shared(file: SafetensorsFile, key: str) -> None:
    """Raises UserError unless the experts of a layer have equal adapters."""
    for name in file.headers:
        first = first_expert(name)
        if name != first and not torch.equal(file.tensor(name), file.tensor(first)):
            raise UserError(
                f"'{file.path}': '{name}' and '{first}' differ, but {key}.share_expert_adapters=true has one pair for "
                "all experts of a layer. Set it to false."
            )


def _settings(folder: Path, config: dict[str, Any], arch: ArchSpec, names: tuple[str, ...], remedy: str) -> LoraConfig:
    """Returns the config section of a PEFT folder; its modules are those that the file has tensors of."""
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), config.get("use_rslora", False)
    if type(rank) is not int or rank < 1:
        raise UserError(f"'{folder / ADAPTER_CONFIG}' has r={shown(rank)}, expected a whole number above 0.")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise UserError(f"'{folder / ADAPTER_CONFIG}' has lora_alpha={shown(alpha)}, expected a number.")
    if type(rslora) is not bool:
        raise UserError(f"'{folder / ADAPTER_CONFIG}' has use_rslora={shown(rslora)}, expected true or false.")
    given = set(names)
    known = adapted_modules(arch, LoraConfig(rank=rank))
    modules = [each for each in known if given & {peft_name(each, "lora_A"), peft_name(each, "lora_B")}]
    if not modules:
        first = f"first tensor {shown(names[0])}" if names else "no tensors"
        example = peft_name(next(iter(known)), "lora_A")
        raise UserError(
            f"'{folder / WEIGHTS}' has no adapters of a {arch.family} model's projections ({first}, expected names "
            f"such as '{example}'). {remedy}"
        )
    return LoraConfig(rank=rank, alpha=alpha, use_rslora=rslora, target_modules=_shortest_names(arch, modules))


def _check_kind(folder: Path, found: dict[str, Any]) -> None:
    """Raises UserError where the folder's adapters are of a kind that mrl does not support."""
    for key, value in _PLAIN.items():
        if found.get(key, value) not in (value, None, [], {}):
            raise UserError(f"'{folder / ADAPTER_CONFIG}': {key}={shown(found[key])} is not supported, only {value}.")
    for key in _ABSENT:
        if found.get(key):
            raise UserError(
                f"'{folder / ADAPTER_CONFIG}': {key}={shown(found[key])} is not supported. Use adapters without it."
            )


def _check_config(folder: Path, lora: LoraConfig, key: str) -> None:
    """Raises UserError where the folder's adapters compute something else than the config's."""
    found = read_json(folder / ADAPTER_CONFIG)
    _check_kind(folder, found)
    rank, alpha, scaled = found.get("r"), found.get("lora_alpha"), found.get("use_rslora", False)
    if rank != lora.rank:
        raise UserError(
            f"'{folder / ADAPTER_CONFIG}' has r={shown(rank)}, but {key}.rank={lora.rank}. Set it to {shown(rank)}."
        )
    theirs = None
    if isinstance(alpha, (int, float)) and not isinstance(alpha, bool):
        theirs = replace(lora, alpha=float(alpha), use_rslora=scaled is True)
    if theirs is None or not math.isclose(scale_of(theirs), scale_of(lora), rel_tol=1e-6):
        raise UserError(
            f"'{folder / ADAPTER_CONFIG}' has lora_alpha={shown(alpha)} and use_rslora={shown(scaled)}, but "
            f"{key}.alpha={lora.alpha:g} and use_rslora={lora.use_rslora}, which is another scale. Set them to the "
            "folder's values."
        )


def _shortest_names(arch: ArchSpec, modules: list[str]) -> list[str]:
    """Returns the last names of the adapted modules, or their complete names if another module has such a name."""
    last = sorted({module.rpartition(".")[2] for module in modules})
    named = adapted_modules(arch, LoraConfig(rank=1, target_modules=last))
    return last if len(named) == len(modules) else modules
