"""Reads Hydra's command line and config files into dotted keys and values.

Implements `--config-path` and `--config-name`, the composition of `defaults` lists, and the grammar of overrides.
verl's own config files are not read: a translation starts from their defaults anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mrl.commands.from_verl.batch_job import BatchJob
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.verl_keys.trainer_programs import CONFIGS, GROUPS
from mrl.config.yaml_file import read_yaml
from mrl.distributed import launch
from mrl.errors import UserError

LONG = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir", "-p": "--package", "-c": "--cfg"}
NEEDLESS = ("--cfg", "--package", "--resolve", "--run", "-r", "--info", "-i", "--experimental-rerun")
"""Hydra options without effect on the training."""
WITH_VALUE = ("--config-path", "--config-name", "--config-dir", "--cfg", "--package")
MAX_DEPTH = 10

_KEY = re.compile(r"[\w/][\w./@:-]*")
_REFERENCE = re.compile(r"\$\{(?:oc\.(env|select):)?([\w.]+)(?:,([^${}]*))?\}")


class Settings(dict[str, Any]):
    """Dotted keys and values of a verl run.

    Attributes:
        notes: Config files and other runs of a script that could not be read and may change the training.
        asides: Further messages about arguments that set no key; nothing is lost.
        overridden: Keys that the command line sets, not a config file.
        sft: True for settings of verl's SFT trainer.
        batch_job: Options of sbatch if SLURM starts the run; None: it does not.
    """

    def __init__(self, values: Any = (), notes: Sequence[str] = (), *, sft: bool = False) -> None:
        super().__init__(values)
        self.notes, self.sft = list(notes), sft
        self.asides: list[str] = []
        self.overridden: set[str] = set()
        self.batch_job: BatchJob | None = None


@dataclass
class ConfigSearch:
    """Folders in which config files are searched.

    Attributes:
        script: Folder of the script that starts the run; None: no script.
        folders: Folders given by the user, searched first.
    """

    script: Path | None = None
    folders: list[Path] = field(default_factory=list)


def parse(words: Sequence[str], search: ConfigSearch, found: Settings | None = None) -> Settings:
    """Returns the settings of Hydra's arguments: the named config file, then the overrides in order.

    Args:
        words: Command-line arguments.
        search: Folders of config files.
        found: Settings to update; None: an empty set.

    Raises:
        UserError: An argument is not an override, or a config file other than verl's own is named and cannot be found.
    """
    options: dict[str, str] = {}
    overrides: list[str] = []
    found = Settings() if found is None else found
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = LONG.get(name, name)
        if word.strip(" \t\r\n\\") == "":
            found.asides.append(f"{word!r}: an empty argument, ignored")
        elif name in ("--multirun", "-m"):
            raise UserError(f"'{word}' requests several runs from Hydra. Give the settings of one of them.")
        elif name in WITH_VALUE:
            given = value if equals else next(rest, None)
            if given is None:
                raise UserError(f"'{word}' has no value, expected '{name}=...'.")
            options[name] = given
        elif name not in NEEDLESS:
            overrides.append(word)
    if "--config-dir" in options:
        search.folders.append(Path(options["--config-dir"]))
    if "--config-name" in options:
        found.update(_named(options["--config-name"], options.get("--config-path"), search, found.notes))
    for word in overrides:
        _override(word, found)
    return found


def config_file(file: Path, search: ConfigSearch) -> Settings:
    """Returns the settings of a config file, composed with those in its `defaults` list.

    Raises:
        UserError: The file or one in its list cannot be read.
    """
    if not file.is_file():
        raise UserError(f"'{file}' cannot be read: there is no such file.{did_you_mean_path(file)}")
    search.folders.append(file.parent)
    notes: list[str] = []
    return Settings(_composed(file, search, notes, [file.parent]), notes)


def with_references(given: Settings) -> Settings:
    """Resolves `${other.key}` and `${oc.env:NAME}` where possible, in place; returns the settings."""
    found = {key: _replaced(value, given) for key, value in given.items() if isinstance(value, str) and "${" in value}
    given.update(found)
    return given


def _replaced(text: str, given: Settings) -> Any:
    """Returns a value with its references resolved recursively."""
    for _ in range(MAX_DEPTH):
        if reference := _REFERENCE.fullmatch(text):
            value = _referred(reference, given)
            if value == text or not (isinstance(value, str) and "${" in value):
                return value
            text = value
            continue
        again = _REFERENCE.sub(lambda match: _inside(match, given), text)
        if again == text:
            break
        text = again
    return text


def _inside(match: re.Match[str], given: Settings) -> str:
    value = _referred(match, given)
    return match[0] if isinstance(value, (dict, list)) else str(value)


def _referred(match: re.Match[str], given: Settings) -> Any:
    """Returns the value of a reference, or the reference itself if nothing sets it."""
    resolver, name = match[1], match[2]
    if resolver == "env":
        default: str | None = match[3]
        text = launch.get_env(name).get(name, default)
        return match[0] if text is None else _value(text)
    if name in given and given[name] != match[0]:
        return given[name]
    return match[0]


def _named(name: str, path: str | None, search: ConfigSearch, notes: list[str]) -> dict[str, Any]:
    """Returns the settings of the file that `--config-name` names."""
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    own = stem in CONFIGS
    is_verls = path is None or re.fullmatch(r"(.*/)?(verl/trainer/|recipe/\w+/|\./|)configs?/?", path) is not None
    looked = list(dict.fromkeys(_folders(path, search)))
    file = None if own and is_verls and not search.folders else _find(stem, looked)
    if file is not None:
        return _composed(file, search, notes, [file.parent])
    if not own:
        raise UserError(
            f"--config-name={name}: '{stem}.yaml' is not in {_shown(looked)}. It contains settings of the run: give "
            "its folder with --config-dir=FOLDER, or its settings as overrides."
        )
    if not is_verls:
        notes.append(f"--config-path={path}: '{stem}.yaml' not found; verl's own file of that name is assumed")
    return _own(stem)


def _own(stem: str) -> dict[str, Any]:
    """Returns the settings by which one of verl's own files differs from the others."""
    return {"model_engine": "megatron"} if "megatron" in stem else {}


def _folders(path: str | None, search: ConfigSearch) -> Iterator[Path]:
    """Yields the folders in which a config file may be, in order of priority.

    Hydra resolves a relative path from the trainer's module. Scripts build absolute paths from their working directory,
    which may not be that of `from-verl`.
    """
    relative = Path(path or "config")
    for folder in search.folders:
        yield from (folder, folder / relative.name)
        if not relative.is_absolute():
            yield folder / relative
    if path is None:
        return
    yield relative
    if relative.is_absolute():
        if not relative.is_relative_to(Path.cwd()):
            return
        relative = relative.relative_to(Path.cwd())
    script = search.script
    for above in [] if script is None else [script, *script.parents]:
        yield above / "verl" / "trainer" / relative
        for first in range(len(relative.parts)):  # the script may expect another depth in its repository
            yield above.joinpath(*relative.parts[first:])


def _find(stem: str, folders: Sequence[Path]) -> Path | None:
    files = (folder / f"{stem}{suffix}" for folder in folders for suffix in (".yaml", ".yml"))
    return next((file for file in files if file.is_file()), None)


def _composed(file: Path, search: ConfigSearch, notes: list[str], roots: list[Path], depth: int = 0) -> dict[str, Any]:
    """Returns the flat settings of a file and of those in its `defaults` list, in order."""
    if depth > MAX_DEPTH:
        raise UserError(f"'{file}': its defaults lists are nested too deeply or form a cycle.")
    raw = read_yaml(file, "config file")
    if not isinstance(raw, dict):
        raise UserError(f"'{file}' has no sections, expected verl's trainer config.")
    listed = raw.pop("defaults", None) or []
    searched = (raw.pop("hydra", None) or {}).get("searchpath") or []
    roots = [*roots, *(folder for one in searched for folder in _searched(str(one), search))]
    itself = {key: value for key, value in _flat(raw) if not (isinstance(value, str) and value == "???")}
    entries = listed if "_self_" in listed else [*listed, "_self_"]
    found: dict[str, Any] = {}
    for entry in entries:
        found |= itself if entry == "_self_" else _entry(entry, file, search, notes, roots, depth)
    return found


def _searched(text: str, search: ConfigSearch) -> Iterator[Path]:
    """Yields the folders of an entry of `hydra.searchpath`."""
    if text.startswith("file://"):
        path = Path(text.removeprefix("file://"))
        yield from (
            [path]
            if path.is_absolute() or search.script is None
            else (above / path for above in (Path(), search.script, *search.script.parents))
        )


def _entry(
    entry: Any, file: Path, search: ConfigSearch, notes: list[str], roots: list[Path], depth: int
) -> dict[str, Any]:
    """Returns the settings of one entry of a `defaults` list: `name`, `group/name`, `group@package: name`."""
    pairs = list(entry.items()) if isinstance(entry, dict) else [("", entry)]
    found: dict[str, Any] = {}
    for option, names in pairs:
        words = str(option).split()
        if "override" in words[:-1] or names is None:
            continue  # entries for Hydra's own job settings
        group, _, package = (words[-1] if words else "").partition("@")
        for name in names if isinstance(names, list) else [names]:
            stem, _, of_name = str(name).partition("@")
            path = "/".join(part for part in (group.strip("/"), stem.strip("/").removesuffix(".yaml")) if part)
            target = (package or of_name or path.rpartition("/")[0].replace("/", ".")).removeprefix("_global_")
            looked = list(dict.fromkeys([file.parent, *roots, *search.folders]))
            there = _find(path, looked)
            is_own = path in CONFIGS or path.split("/")[0] in GROUPS
            if there is not None and not (is_own and path in CONFIGS):
                inner = _composed(there, search, notes, roots, depth + 1)
                found |= {f"{target}.{key}" if target else key: value for key, value in inner.items()}
            elif is_own:
                found |= _own(path)
            elif "optional" not in words[:-1]:
                raise UserError(
                    f"'{file}' has '{path}.yaml' in its defaults list, which is not in {_shown(looked)}. Give its "
                    "folder with --config-dir=FOLDER."
                )
    return found


def _shown(folders: Sequence[Path]) -> str:
    shown = [f"'{folder}'" for folder in folders[:4]]
    return ", ".join(shown) + (f" or {len(folders) - 4} more folders" if len(folders) > 4 else "") or "any known folder"


def _override(word: str, found: Settings) -> None:
    """Applies one override of Hydra's command line to the settings."""
    if word.startswith("hydra.") or word.lstrip("+").startswith("hydra/"):
        return
    if word.startswith("~"):
        key = word[1:].partition("=")[0]
        gone = [one for one in found if one == key or one.startswith(f"{key}.")]
        for one in gone:
            del found[one]
        if not gone:
            found.notes.append(f"{word}: removes a key of verl's own config; its default is used")
        return
    key, equals, text = word.lstrip("+").partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise UserError(f"'{word}' is not a setting of verl, such as data.train_batch_size=256.")
    if "/" in key or "@" in key:
        group = key.partition("@")[0]
        found |= {"model_engine": "megatron"} if "megatron" in text else {}
        if group.split("/")[0] not in GROUPS:
            found.notes.append(f"{word}: config files of that group are not read; give its settings as overrides")
        return
    values = dict(_flat({key: _value(text)}))
    found |= values
    found.overridden |= set(values)


def _value(text: str) -> Any:
    """Parses the value of an override."""
    if not text:
        return ""
    try:
        parsed: Any = OmegaConf.from_dotlist([f"value={text}"])
        value: Any = parsed._get_node("value")
        return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value._value()
    except (YAMLError, OmegaConfBaseException):
        return text  # Hydra's grammar is wider than YAML's


def _flat(raw: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys of nested mappings; an empty mapping is a value."""
    for name, value in raw.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
