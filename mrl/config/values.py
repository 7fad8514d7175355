"""Field values of a schema, set from files and overrides, type-checked, with one-line error messages.

`keys.py` knows which keys exist; `config.py` has the schema and its defaults; ranges and rules between fields are in
`trainer/validation/`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from mrl.config.keys import is_key, leaves, nested
from mrl.config.paths import IsPath, expand_path, path_keys
from mrl.config.peft_folder import adapter_settings, is_adapter_folder
from mrl.config.user_code import is_code_not_column, make_absolute
from mrl.config.verl_keys.foreign_names import value_hint
from mrl.config.yaml_file import MAX_DEPTH, UNREADABLE, check_events, reason
from mrl.errors import Mistakes, UserError

REFERENCE = re.compile(r"\$\{.*\}")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}

LARGEST_WHOLE = 1 << 64

MAX_SHOWN = 200
"""Characters of a value that a message quotes."""


class Values:
    """Values of every field of a schema of dataclasses, initially its defaults.

    Each method raises UserError for an unknown key (suggesting the nearest one) and for a value of the wrong type.
    """

    def __init__(self, schema: type) -> None:
        self._schema = schema
        self._node: Any = _at_defaults(schema)
        self._paths = path_keys(schema)
        self._given: set[str] = set()

    def update(self, raw: Any, where: str) -> None:
        """Sets the values in nested dicts and lists; `where` describes their origin in messages.

        One error lists all mistakes.
        """
        mistakes = Mistakes()
        with explain_yaml_errors(where):
            found = leaves(raw, self._schema, mistakes)
        for key, value, kind in found:
            with mistakes.collected():
                self._set(key, value, kind, where)
        mistakes.check()

    def override(self, item: str) -> None:
        """Applies an override: `key=value`, `+key=value` or `++key=value` sets, `~key` resets; see `config.load`."""
        key, equals, text = re.sub(r"^\+\+?(?=\w)", "", item).partition("=")
        where = f"in override '{_cut(item)}'"
        if item[:1] == "~" and len(item) > 1:
            if equals:
                raise UserError(f"override '{_cut(item)}' both resets and sets; write '{key}' or '{item[1:]}'.")
            self._take_back(key[1:], where)
            return
        if not (key and equals):
            raise UserError(f"override '{_cut(item)}' is not section.key=value, for example train.num_steps=10.")
        with explain_yaml_errors(where):
            _check_override(key, text, where)
            parsed: Any = OmegaConf.from_dotlist([f"value={text}"])
            value = OmegaConf.to_container(parsed, resolve=False)["value"]  # type: ignore[index, call-overload]
            found = leaves(nested(key, value), self._schema)
            # YAML reads the text `bytes:` as a mapping; a mapping in braces for a text stays an error.
            if isinstance(value, dict) and len(found) == 1 and _is_text(found[0][2]) and text.lstrip()[:1] != "{":
                value, found = text, [(found[0][0], text.strip(), found[0][2])]
        if not found:
            raise UserError(f"override '{_cut(item)}' sets nothing. Set its keys, or reset it with '~{key}'.")
        for leaf, inner, kind in found:
            if value == {} and _is_mapping(kind):
                self._set(key, value, kind, where, merge=False)
            else:
                self._set(leaf, inner, kind, where)

    def locate(self, keys: Sequence[str], folders: Sequence[Path], columns: Sequence[str] = ()) -> None:
        """Makes paths to user code absolute (`user_code.make_absolute`).

        Args:
            keys: Keys that may name user code; `[*]` means each entry of a list.
            folders: Folders to search.
            columns: Those of the keys that may also name a column of the data.
        """
        for key in keys:
            above, _, rest = key.partition("[*]")
            entries = range(len(OmegaConf.select(self._node, above))) if rest else ()
            for each in [f"{above}[{index}]{rest}" for index in entries] if rest else [key]:
                with explain_yaml_errors(f"of '{each}'"):
                    name = OmegaConf.select(self._node, each)
                if isinstance(name, str) and (each not in columns or is_code_not_column(name)):
                    OmegaConf.update(self._node, each, make_absolute(name, folders))

    def take_adapter_settings(self, section: str) -> None:
        """Sets fields of a section of adapters that were not set to those of the PEFT folder in its `adapter_path`.

        Args:
            section: Key of the section.

        Raises:
            UserError: The folder's adapter_config.json is not a JSON object.
        """
        with explain_yaml_errors(f"of '{section}.adapter_path'"):
            folder = OmegaConf.select(self._node, f"{section}.adapter_path")
        if isinstance(folder, str) and is_adapter_folder(folder):
            for name, value in adapter_settings(folder).items():
                key = f"{section}.{name}"
                if key not in self._given:
                    OmegaConf.update(self._node, key, value, merge=False)

    def made(self, where: str) -> Any:
        """Returns an instance of the schema with references between keys (`${run.seed}`) resolved."""
        with explain_yaml_errors(where):
            return OmegaConf.to_object(self._node)

    def _take_back(self, key: str, where: str) -> None:
        """Resets a field or section to its default; removes an entry of a mapping."""
        if is_key(key, self._schema):
            default = OmegaConf.select(_at_defaults(self._schema), key)
            OmegaConf.update(self._node, key, default, merge=False)
            self._given = {name for name in self._given if name != key and not name.startswith(f"{key}.")}
            self._open(key)
            return
        ((leaf, _, kind),) = leaves(nested(key, {}), self._schema) or [(key, None, None)]  # refuses an unknown key
        above, _, last = key.rpartition(".")
        if not _is_mapping(kind) or key == leaf or "[" in last:
            raise UserError(f"'{key}' {where} is part of a list. Set it, or set or reset the complete list.")
        mapping = OmegaConf.select(self._node, above)
        if not OmegaConf.is_dict(mapping) or last not in mapping:
            has = ", ".join(map(str, mapping)) if OmegaConf.is_dict(mapping) else ""
            raise UserError(f"there is no '{key}' to reset, {where}; '{above}' contains {has or 'nothing'}.")
        del mapping[last]

    def _set(self, key: str, value: Any, kind: Any, where: str, *, merge: bool = True) -> None:
        entry = re.match(r"(.*)\[(\d+)\]", key)
        if entry and int(entry[2]) >= (count := len(OmegaConf.select(self._node, entry[1]))):
            raise UserError(f"config key '{key}' {where}: '{entry[1]}' has {count} entries, counted from 0.")
        try:
            _check_texts(value)
            value = _with_paths(_meant(value, kind), self._paths.get(re.sub(r"\[\d+\]", "", key)))
            OmegaConf.update(self._node, key, value, merge=merge)
        except UserError as error:
            raise UserError(f"config key '{key}' {where}: {error}.") from error
        except UNREADABLE as error:
            got = "null" if value is None else _cut(repr(value))
            hint = value_hint(key, value)
            raise UserError(f"config key '{key}' {where}: got {got}, expected {expected(kind)}.{hint}") from error
        self._given.add(key)
        self._open(key)

    def _open(self, key: str) -> None:
        """Makes the nodes writable that setting this key created."""
        node = self._node
        for part in re.findall(r"[^.\[\]]+", key):
            node = node._get_node(int(part) if OmegaConf.is_list(node) else part)
            if not OmegaConf.is_config(node) or node._is_none():
                return
            if node._get_node_flag("readonly"):
                break
        _make_writable(node)


def _check_override(key: str, text: str, where: str) -> None:
    """Refuses the text of an override that YAML would misread; see `check_events`."""
    try:
        check_events(text)
    except UserError as error:
        raise UserError(f"config key '{key}' {where}: {error}.") from error


def expected(kind: Any) -> str:
    """Returns a description of the values that a type accepts, such as "a whole number, or null"."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Union:
        return f"{expected(inside[0])}, or null"
    if origin is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if _is_mapping(kind):
        return "a mapping such as {key: value}"
    if origin is list and is_dataclass(inside[0]):
        return f"a list of sections with keys {', '.join(item.name for item in fields(inside[0]))}"
    if origin is list:
        numbers = inside[0] in (int, float)
        return "a list of numbers such as [3, 1]" if numbers else "a list such as [a, b], or one string"
    return WORDS[kind]


@contextmanager
def explain_yaml_errors(where: str) -> Iterator[None]:
    """Converts exceptions of YAML and OmegaConf into a one-line UserError that names the key."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        key = getattr(error, "full_key", None)
        raise UserError(
            f"config key '{key}' {where}: {reason(error)}." if key else f"{reason(error)}, {where}."
        ) from error


def _cut(text: str) -> str:
    return f"{text[:MAX_SHOWN]}... ({len(text)} characters)" if len(text) > MAX_SHOWN else text


def _with_paths(value: Any, mark: IsPath | None) -> Any:
    """Returns a path value, or a list of them, expanded."""
    if mark is None:
        return value
    if isinstance(value, list):
        return [_with_paths(item, mark) for item in value]
    return expand_path(value, mark) if isinstance(value, str) else value


def _check_texts(value: Any, depth: int = 0) -> None:
    """Refuses values that cannot be written to the run folder's config: unencodable strings, and too deep nesting."""
    if depth > MAX_DEPTH:
        raise UserError(f"lists and mappings are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        bad = next((character for character in value if character == "\0" or "\ud800" <= character <= "\udfff"), None)
        if bad is not None:
            raise UserError(
                f"got {_cut(repr(value))}, with the character {bad!r}, which files and paths cannot contain"
            )
    if isinstance(value, int) and abs(value) >= LARGEST_WHOLE:
        raise UserError("got a whole number of more than 64 bits")
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    for inner in inside:
        _check_texts(inner, depth + 1)


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def _is_text(kind: Any) -> bool:
    """Returns whether a type is `str`, or `str | None`."""
    return kind is str or (get_origin(kind) is Union and set(get_args(kind)) == {str, type(None)})


def _meant(value: Any, kind: Any) -> Any:
    """Converts a value that YAML parsed differently than meant: one string for a list, `off` (false) for a choice."""
    if value is False and get_origin(kind) is Literal and "off" in get_args(kind):
        return "off"
    if kind != list[str] or (isinstance(value, str) and REFERENCE.fullmatch(value)):
        return value
    if isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        raise ValidationError("a list in a list of strings")  # OmegaConf would accept it
    return [value] if isinstance(value, str) else value


def _at_defaults(schema: type) -> Any:
    """Returns a writable OmegaConf node of a schema with its defaults."""
    return pickle.loads(_defaults(schema))


@cache
def _defaults(schema: type) -> bytes:
    """Returns the pickled node, because unpickling takes a fifth of the time of `deepcopy`."""
    node = OmegaConf.structured(schema)
    _make_writable(node)
    return pickle.dumps(node)


def _make_writable(node: Any) -> None:
    """Makes nodes of frozen dataclasses, which are read-only, writable."""
    OmegaConf.set_readonly(node, False)
    for key in range(len(node)) if OmegaConf.is_list(node) else node:
        child = node._get_node(key)
        if OmegaConf.is_config(child) and not child._is_none():
            _make_writable(child)
