"""config.json of a Hugging Face folder -> ArchSpec, and ArchSpec -> family.

Owns which files a model folder has beside its weights, the reading of its JSON files, and the choice of the family by
`model_type`. What the keys mean is the family's business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from mrl.config import registry
from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError, first_line, shown
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
"""Files of a model folder that belong to its tokenizer and its sampling; a copy of the model has them as they are."""


def families() -> dict[str, Family]:
    """Every family in this folder: file name -> Family."""
    return {name: cast(Family, registry.find("models", name, "FAMILY")) for name in registry.names("models")}


def family_of(arch: ArchSpec) -> Family:
    """The family that `arch` was read with."""
    return cast(Family, registry.find("models", arch.family, "FAMILY"))


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a folder, parsed.

    Raises:
        UserError: The folder or the file is missing, or it is not a JSON object.
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
            f"'{folder}' has no config.json. A Hugging Face folder holds config.json, *.safetensors and a tokenizer."
        )
    return read_json(path)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: It cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{file}' cannot be read as JSON: {first_line(error)}.") from error
    if not isinstance(content, dict):
        raise UserError(f"'{file}' holds a JSON {type(content).__name__}, expected an object.")
    return content


def arch_from_config(config: dict[str, Any]) -> ArchSpec:
    """A parsed config.json -> ArchSpec.

    Raises:
        UserError: Unknown `model_type`, or the family refuses the structure.
    """
    known = {family.hf_model_type: family for family in families().values()}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"config.json: model_type is {shown(model_type)}; mrl has {', '.join(sorted(known))}.")
    refuse_foreign_structure(config, known[model_type].keys)
    return known[model_type].arch_from_hf(config)


def arch_from_folder(folder: str | Path) -> ArchSpec:
    """The structure of the model in a Hugging Face folder.

    Raises:
        UserError: As `read_config` and `arch_from_config`; the message names the folder.
    """
    config = read_config(folder)
    try:
        return arch_from_config(config)
    except UserError as error:
        raise UserError(f"model folder '{folder}': {error}") from error
