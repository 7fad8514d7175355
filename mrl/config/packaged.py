"""The configs that come with mrl: found by name from any folder, in a clone and in an installed wheel."""

from __future__ import annotations

import os.path
import re
from pathlib import Path

from mrl.config.did_you_mean import did_you_mean, did_you_mean_path

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = next((path for path in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if path.is_dir()), Path("configs"))
"""Folder of the configs: inside the package in a wheel, next to the package in a clone."""

RUN_CONFIG = "config.yaml"
"""File in a run folder with the run's config."""


def names() -> list[str]:
    """Returns the names of the packaged configs, sorted, with a folder's name before a slash; without `.yaml`."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def config_path(name: str) -> Path:
    """Returns the file of the packaged config with this name, which must be one of `names()`."""
    return FOLDER / f"{name}.yaml"


def find_config(path: str) -> str:
    """Returns the path itself, or the file of the packaged config with this name if no such file or folder exists."""
    return path if os.path.lexists(path) or path not in names() else str(config_path(path))


def did_you_mean_config(path: str | Path) -> str:
    """Returns the end of an error message about a missing config file: the config that may be meant, or "".

    It is a run folder's, a packaged one, or a file with a similar path.
    """
    given = Path(path)
    if (given / RUN_CONFIG).is_file():
        return f" Did you mean '{given / RUN_CONFIG}'?"
    if given.with_suffix("").as_posix().removeprefix("configs/") in names():
        return f" Did you mean '{given.stem}', which comes with mrl?"
    return did_you_mean_path(path) or (did_you_mean(str(path), names()) if given.suffix == "" else "")


def title(name: str) -> str:
    """Returns the first sentence of the comment at the top of a packaged config; "" without one."""
    lines = config_path(name).read_text(encoding="utf-8").splitlines()
    words = []
    for line in lines:
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        words.append(text)
    return re.split(r"(?<=[.!?])\s", " ".join(words), maxsplit=1)[0]
