"""`mrl completion`: scripts for bash, zsh and fish, and the words that they offer.

A script asks `mrl completion candidates WORD ...` at each press of the tab key, so it fits every version of mrl.
Imports no torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from mrl.config import packaged
from mrl.config.choices import choices
from mrl.config.config import Config
from mrl.config.keys import dotted_keys
from mrl.config.paths import path_keys

_BASH = """\
# source <(mrl completion bash), for example in ~/.bashrc
_mrl_complete() {
  local line=${COMP_LINE:0:COMP_POINT} word before words found
  word=${line##*[[:space:]]}
  read -ra words <<<"$line"
  [[ -n $word ]] || words+=("")
  mapfile -t found < <(command mrl completion candidates "${words[@]:1}" 2>/dev/null)
  before=${word%"${word##*[=:]}"} # readline replaces only what follows the last = or :
  COMPREPLY=("${found[@]#"$before"}")
  if [[ ${#found[@]} == 1 && ${found[0]} == *[=/] ]]; then compopt -o nospace; fi
}
complete -o bashdefault -o default -F _mrl_complete mrl
"""

_ZSH = """\
#compdef mrl
# source <(mrl completion zsh) after compinit, for example in ~/.zshrc
_mrl() {
  local -a found open
  found=("${(@f)$(command mrl completion candidates "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  open=(${(M)found:#*[=/]})
  found=(${found:#*[=/]})
  (( ${#found} + ${#open} )) || { _files; return }
  compadd -S '' -- $open
  compadd -- $found
}
compdef _mrl mrl
"""

_FISH = """\
# mrl completion fish > ~/.config/fish/completions/mrl.fish
complete -c mrl -k -a '(command mrl completion candidates (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Shell -> script that the shell sources."""


def _public_sets() -> list[str]:
    from mrl.data.public_sets.base import names

    return names()


def _pages() -> list[str]:
    from mrl.commands.packaged import page_names

    return page_names()


NAMES: dict[str, Callable[[], list[str]]] = {"configs": packaged.names, "data": _public_sets, "docs": _pages}
"""Command -> names that its positional word can have; imported only if asked for."""


def candidates(parsers: Mapping[str, argparse.ArgumentParser], words: Sequence[str]) -> list[str]:
    """Returns what the last word can become; [] if the shell should offer files.

    Args:
        parsers: Parser of each command.
        words: Words after `mrl`, the last one incomplete or empty.
    """
    *before, word = words or [""]
    if not before:
        return _starting(word, parsers)
    if before[0] not in parsers:
        return []
    parser, given = parsers[before[0]], before[1:]
    options = {flag: action for action in parser._actions for flag in action.option_strings}
    if given and _takes_value(options.get(given[-1])):
        return _starting(word, options[given[-1]].choices or [])
    if word.startswith("-"):
        return _starting(word, options)
    if before[0] in NAMES:
        return [] if _num_positionals(options, given) else _starting(word, NAMES[before[0]]())
    return _positional(parser, options, given, word)


def _positional(
    parser: argparse.ArgumentParser, options: Mapping[str, argparse.Action], given: Sequence[str], word: str
) -> list[str]:
    """Returns the candidates of a word that is neither an option nor its value."""
    positionals = [action for action in parser._actions if not action.option_strings]
    taken = _num_positionals(options, given)
    action = positionals[taken] if taken < len(positionals) else None
    overrides = any(each.dest == "overrides" for each in positionals)
    if action is not None and action.dest == "config" and "=" not in word:
        return [*_starting(word, packaged.names()), *_files(word, ".yaml")]
    if action is not None and action.choices:
        return _starting(word, action.choices)
    return _settings(word) if overrides and taken else []


def _num_positionals(options: Mapping[str, argparse.Action], given: Sequence[str]) -> int:
    """Returns the number of words that are neither an option, nor its value, nor KEY=VALUE."""
    return sum(
        not each.startswith("-") and "=" not in each and not _takes_value(options.get(last))
        for last, each in zip(["", *given], given, strict=False)
    )


def _settings(word: str) -> list[str]:
    """Returns the keys of the config that begin with `word`, or the values of its key; `~` resets a key."""
    keys = dotted_keys(Config)
    key, equals, value = word.partition("=")
    if word.startswith("~"):
        return _starting(word, [f"~{each}" for each in keys])
    if not equals:
        return _starting(word, [f"{each}=" for each in keys])
    if key not in keys:
        return []
    found = _starting(value, choices(keys[key], key))
    if key in path_keys(Config):
        found += _files(value, "")
    return [f"{key}={each}" for each in found]


def _files(word: str, suffix: str) -> list[str]:
    """Returns the files with this suffix and the folders, with a slash, whose path begins with `word`."""
    folder, name = os.path.split(word)
    try:
        entries = list(os.scandir(folder or "."))
    except OSError:
        return []
    return sorted(
        os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "")
        for entry in entries
        if entry.name.startswith(name)
        and (entry.name[0] != "." or name.startswith("."))
        and (entry.is_dir() or entry.name.endswith(suffix))
    )


def _takes_value(action: argparse.Action | None) -> bool:
    return action is not None and action.nargs != 0


def _starting(word: str, known: Iterable[str]) -> list[str]:
    return [each for each in known if each.startswith(word)]
