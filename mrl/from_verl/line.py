"""What a user has of a verl run: its command line, a script with it, or its config file; as dotted keys and values.

Owns the reading only; `translate.py` translates. A shell script is expanded by bash in restricted mode with no programs
to find: its variables, arrays and branches give the command line, and nothing that it names is started or written.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mrl.errors import UserError
from mrl.peers.verl_async import RECIPES
from mrl.schema.values import explained

Settings = dict[str, Any]

SCRIPT_LIMIT_S = 20
TRAINER = re.compile(r"(^|.*[./])(main_ppo|fully_async_main)(\.py)?$")
"""The word of a command line after which Hydra's arguments stand."""

_TO_FILE = re.compile(r"""(?<=\s)(?:[12&])?>>?\s*(?:"[^"\n]*"|[^\s"&(;|\d=][^\s;|)]*)""")
"""A redirection into a file: restricted bash would refuse the command with it."""

_PRELUDE = """
PATH=/nonexistent; trap "" PIPE
command_not_found_handle() {{
  case " $* " in *main_ppo*|*fully_async_main*) printf '%s\\0' "$@" >&{fd};; *" -c "*) return 1;; esac
  return 0
}}
set -r
"""


def read(words: Sequence[str]) -> Settings:
    """The settings of a config file, a shell script or a command line, overrides in their order.

    Args:
        words: A YAML file or a shell script, overrides after it; or a command line, from any word of it on.

    Raises:
        UserError: Nothing is given, a file cannot be read, or a word is no override.
    """
    if not words:
        raise UserError("nothing to translate: give verl's config file, a script that starts it, or its command line.")
    first = Path(words[0])
    if first.suffix in (".yaml", ".yml"):
        return {**_config_file(first), **_overrides(words[1:])}
    if first.suffix == ".sh" or (len(words) == 1 and "=" not in words[0]):
        return _overrides([*_script(first), *words[1:]])
    return _overrides(words)


def _config_file(file: Path) -> Settings:
    with explained(f"in '{file}'"):
        try:
            raw = OmegaConf.load(file)
        except OSError as error:
            raise UserError(f"'{file}' cannot be read: {error.strerror}.") from error
        if not OmegaConf.is_dict(raw):
            raise UserError(f"'{file}' holds no sections, expected verl's trainer config.")
        return dict(_flat(OmegaConf.to_container(raw, resolve=False)))


def _script(file: Path) -> list[str]:
    """The words of the command line that a script starts."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' cannot be read: {error}. Expected a script, a .yaml file or key=value.") from error
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            ["bash", "-c", _PRELUDE.format(fd=writing) + _TO_FILE.sub("", text)],
            pass_fds=(writing,), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=SCRIPT_LIMIT_S, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"'{file}' cannot be expanded by bash: {error}. Give its command line instead.") from error
    finally:
        os.close(writing)
        with open(reading, "rb") as pipe:
            words = pipe.read().decode("utf-8", "replace").split("\0")[:-1]
    if not words:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("+")]
        why = f" ({said[-1]})" if said else ""
        raise UserError(
            f"'{file}' comes to no verl.trainer.main_ppo when bash expands it{why}. Set what it needs, or give "
            "the command line instead."
        )
    return words


def _overrides(words: Sequence[str]) -> Settings:
    starts = [index for index, word in enumerate(words) if TRAINER.match(word)]
    program = words[starts[-1]] if starts else ""
    settings: Settings = {}
    for name, defaults in RECIPES.items():
        settings |= defaults if name in program else {}
    for word in words[starts[-1] + 1 if starts else 0 :]:
        settings |= _override(word)
    return settings


def _override(word: str) -> Settings:
    """A word of Hydra's command line."""
    if word.startswith("--config-name"):
        return {"model_engine": "megatron"} if "megatron" in word else {}
    if word.startswith(("--config-path", "--config-dir", "hydra.")):
        return {}
    key, equals, text = word.lstrip("+").partition("=")
    if word.startswith("~") or not equals or not re.fullmatch(r"\w[\w.@-]*", key):
        raise UserError(f"'{word}' is no setting of verl's command line, such as data.train_batch_size=256.")
    try:
        parsed: Any = OmegaConf.from_dotlist([f"value={text}"])
        value: Any = parsed._get_node("value")
        value = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value._value()
    except (YAMLError, OmegaConfBaseException):
        value = text  # Hydra's grammar is wider than YAML's
    return dict(_flat({key: value}))


def _flat(raw: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings; an empty one is a value."""
    for name, value in raw.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
