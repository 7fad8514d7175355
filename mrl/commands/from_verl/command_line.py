"""Reads a verl run from its command line, a script, or its config file, into dotted keys and values.

`script.py` expands scripts, `hydra.py` reads Hydra's arguments and config files, and `translate.py` translates.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mrl.commands.from_verl.batch_job import job_of_words
from mrl.commands.from_verl.hydra import ConfigSearch, Settings, config_file, parse, with_references
from mrl.commands.from_verl.script import NOT_SET, Expansion, expand
from mrl.commands.from_verl.sft import is_sft
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.verl_keys.trainer_programs import is_verls, kind, program, why_not
from mrl.config.verl_keys.verl_async import RECIPES
from mrl.errors import UserError

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
SHELLS = ("bash", "sh", "zsh")
STDIN = "-"


def read_settings(words: Sequence[str]) -> Settings:
    """Returns the settings of a config file, a shell script or a command line, with overrides applied in order.

    Args:
        words: A YAML file or a shell script, followed by overrides; or a command line, complete or in part. `-` is a
            script on stdin. `--config-dir=FOLDER` is the folder of Hydra's config files.

    Raises:
        UserError: Nothing is given, a file cannot be read, an argument is not an override, or the program is not
            verl's.
    """
    words, search = _with_folders(words)
    while words and words[0] in SHELLS:
        words = [word for index, word in enumerate(words) if index and not (index == 1 and word.startswith("-"))]
    if not words:
        raise UserError("nothing to translate: give verl's config file, a script that starts it, or its command line.")
    first = Path(words[0])
    if first.suffix in (".yaml", ".yml"):
        found = parse(words[1:], search, config_file(first, search))
    elif any(character.isspace() for character in words[0]) and len(words) == 1:
        found = _script(words[0], "command line", (), search)
    elif first.suffix in SCRIPTS or words[0] == STDIN or (len(words) == 1 and "=" not in words[0]):
        found = _script(_text(words[0]), "stdin.sh" if words[0] == STDIN else words[0], words[1:], search)
    else:
        found = _command(list(words), search)
    found.sft = found.sft or is_sft(found)
    return with_references(found)


def _with_folders(words: Sequence[str]) -> tuple[list[str], ConfigSearch]:
    """Returns the arguments without `--config-dir`, and its folders."""
    search, rest = ConfigSearch(), []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name == "--config-dir":
            folder = value if equals else next(remaining, "")
            if not Path(folder).is_dir():
                raise UserError(
                    f"--config-dir={folder} is not a folder.{did_you_mean_path(folder)} Give the folder of Hydra's "
                    "config files."
                )
            search.folders.append(Path(folder))
        else:
            rest.append(word)
    return rest, search


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"'{name}' cannot be read: {error}.{did_you_mean_path(name)} Expected a script, a .yaml file or key=value."
        ) from error


def _script(text: str, name: str, arguments: Sequence[str], search: ConfigSearch) -> Settings:
    """Returns the settings of the first run that a script starts, overridden by the script's arguments `key=value`."""
    others = [word for word in arguments if "=" not in word]
    if others and not re.search(r"\$\{?[\d@*#]", text):
        raise UserError(f"'{others[0]}' is not a setting of verl, and '{name}' reads no arguments.")
    search.script = Path(name).resolve().parent
    expansion = expand(text, name, arguments)
    runs: list[list[str]] = []
    for words in expansion.trainers:
        if kind(_program(words)) and words not in runs:
            runs.append(words)
    if not runs:
        raise UserError(_why_none(name, expansion))
    try:
        found = _command([*runs[0], *(word for word in arguments if "=" in word)], search)
    except UserError as error:
        needed = [one for one in expansion.unset if _placeholder(one) in str(error)]
        raise UserError(f"{error}{''.join(f' {_remedy(one)}' for one in needed)}") from error
    found.batch_job = expansion.job or found.batch_job
    if len(runs) > 1:
        found.notes.append(f"'{name}' starts {len(runs)} different runs; the first is translated: {_brief(runs[0])}")
    for variable in expansion.unset:
        used = any(_placeholder(variable) in str(value) for value in found.values())
        (found.notes if used else found.asides).append(
            f"${variable}: '{name}' reads it, but it is not set. {_placeholder(variable)} is used instead. "
            f"{_remedy(variable)}"
        )
    for file in dict.fromkeys(expansion.lacks):
        found.notes.append(f"'{file}': '{name}' sources this script, which cannot be read; its settings are unknown")
    return found


def _placeholder(variable: str) -> str:
    """Returns the text that an expansion uses for an unset variable, or for an argument given by its position."""
    return f"ARGUMENT_{variable}{NOT_SET}" if variable.isdigit() else f"{variable}{NOT_SET}"


def _remedy(variable: str) -> str:
    if variable.isdigit():
        return f"Give argument {variable} of the script after it."
    return f"Set it with {variable}=... before mrl from-verl."


def _why_none(name: str, expansion: Expansion) -> str:
    """Returns the error message for a script that starts no run of verl."""
    if expansion.trainers:
        other = _program(expansion.trainers[0])
        return f"'{name}' starts {other}, which is not translated: {why_not(other)}."
    output = [line for line in expansion.said.splitlines() if line.strip()]
    why = f" It exits with status {expansion.status}" if expansion.status else ""
    why += f"{',' if why else ' It prints'} '{output[-1].strip()}'." if output else "." if why else ""
    if expansion.unset:
        why += f" These variables are not set: {', '.join(expansion.unset)}."
    started = [_brief(words) for words in expansion.commands if "python" in " ".join(words) or "torchrun" in words]
    if started:
        why += f" It starts '{started[0]}', which mrl does not know."
    return (
        f"'{name}' does not reach verl.trainer.main_ppo when bash expands it.{why} Set the variables that it needs, "
        "add its arguments, or give the command line instead."
    )


def _brief(words: Sequence[str]) -> str:
    text = " ".join(words)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _program(words: Sequence[str]) -> str:
    """Returns the module of verl that a command line starts, or ""."""
    return next((name for name in map(program, words) if name), "")


def _command(words: list[str], search: ConfigSearch) -> Settings:
    """Returns the settings of a command line."""
    starts = [index for index, word in enumerate(words) if program(word)]
    name = program(words[starts[0]]) if starts else ""
    if not starts and words[0] not in ("--",) and "-m" in words:
        name = words[words.index("-m") + 1] if words[-1] != "-m" else ""
        raise UserError(f"'{name}' is not a program of verl that mrl knows: {why_not(name)}.")
    if starts and not kind(name):
        raise UserError(f"{name} is not translated: {why_not(name)}.")
    found = parse(words[starts[0] + 1 if starts else 0 :], search)
    found.batch_job = job_of_words(words[: starts[0]]) if starts else None
    if starts and not is_verls(name):
        found.notes.append(f"{name}: another project's copy of verl's trainer; its changes to the code are unknown")
    found.sft = kind(name) == "sft"
    if found.sft:
        for key, size in _launched(words[: starts[0]]).items():
            found.setdefault(key, size)
    for recipe, defaults in RECIPES.items():
        if recipe in name:
            for key, value in defaults.items():
                found.setdefault(key, value)
    return found


def _launched(words: Sequence[str]) -> dict[str, int]:
    """Returns the number of hosts and of GPUs per host from torchrun's options."""
    text = " ".join(words)
    found = {}
    for key, option in (("trainer.nnodes", "nnodes"), ("trainer.n_gpus_per_node", "nproc[-_]per[-_]node")):
        if match := re.search(rf"--{option}[= ](\d+)(?!\S)", text):
            found[key] = int(match[1])
    return found
