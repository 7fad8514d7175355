"""Reads the config.json of a Hugging Face folder into an ArchSpec, and selects the family by `model_type`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from mrl.config import registry
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.json_file import read_json
from mrl.errors import UserError, shown
from mrl.models._keys import refuse_foreign_structure
from mrl.models.base import ArchSpec, Family

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a model folder for its tokenizer and its sampling; converters copy them unchanged."""


_TEXT_MODEL = (
    " Of a model with a vision tower mrl has the text model: load it with transformers' class for text, for example "
    "Qwen3_5ForCausalLM.from_pretrained(FOLDER), and save it with save_pretrained."
)


def families() -> dict[str, Family]:
    """Returns all families in this folder by file name."""
    return {name: cast(Family, registry.find("models", name, "FAMILY")) for name in registry.names("models")}


def family_of(arch: ArchSpec) -> Family:
    """Returns the family of a structure."""
    return cast(Family, registry.find("models", arch.family, "FAMILY"))


def read_config(folder: str | Path) -> dict[str, Any]:
    """Returns the parsed config.json of a folder.

    Raises:
        UserError: The folder or the file is missing, or the file is not a JSON object.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not folder.is_dir():
        raise UserError(
            f"model folder '{folder}' does not exist.{did_you_mean_path(folder)} Give a local Hugging Face folder "
            "with a config.json."
        )
    if not path.is_file():
        raise UserError(
            f"'{folder}' has no config.json. A Hugging Face folder contains config.json, *.safetensors and a tokenizer."
        )
    return read_json(path)


def arch_from_config(config: dict[str, Any]) -> ArchSpec:
    """Converts a parsed config.json into an ArchSpec.

    Raises:
        UserError: Unknown `model_type`, or a structure that mrl does not implement.
    """
    known = {name: family for family in families().values() for name in (family.hf_model_type, *family.aliases)}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        hint = _TEXT_MODEL if _has_parts(config) else ""
        raise UserError(
            f"config.json: model_type is {shown(model_type)}; mrl supports {', '.join(sorted(known))}.{hint}"
        )
    family = known[model_type]
    config = {**config, "model_type": family.hf_model_type}
    refuse_foreign_structure(config, family.keys)
    return family.arch_from_hf(config)


def _has_parts(config: dict[str, Any]) -> bool:
    return "text_config" in config or "vision_config" in config


def arch_from_folder(folder: str | Path) -> ArchSpec:
    """Reads the structure of the model in a Hugging Face folder.

    Raises:
        UserError: See `read_config` and `arch_from_config`; the message names the folder.
    """
    config = read_config(folder)
    try:
        return arch_from_config(config)
    except UserError as error:
        raise UserError(f"model folder '{folder}': {error}") from error
