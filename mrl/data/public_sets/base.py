"""Description of a public data set, and the recognition of its raw rows.

A data set is a file in this folder that defines `DATA_SET`. `mrl data` writes its rows to files; `data.train_files` and
`data.val_files` also take its name on the hub, or files with its raw rows. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mrl.config import registry
from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError

Row = dict[str, Any]

FOLDER = "data.public_sets"

PREPARED = ("prompt", "messages", "chosen")
"""Columns of rows that need no conversion."""


class UnusableRowError(ValueError):
    """Row that lacks something, such as tests; the message says what."""


class AmbiguousRowError(ValueError):
    """Row with the columns of several data sets.

    Attributes:
        names: Names of these data sets.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(" and ".join(names))
        self.names = names


@dataclass(frozen=True)
class HubFiles:
    """Files of a data set on the hub.

    Attributes:
        location: "hf://datasets/OWNER/NAME", or with a path pattern after it.
        data_source: Value of the column `data_source` for these rows; None: the value that the conversion sets.
    """

    location: str
    data_source: str | None = None

    @property
    def repo(self) -> str:
        """OWNER/NAME."""
        return "/".join(self.location.removeprefix("hf://datasets/").split("/")[:2])


@dataclass(frozen=True)
class PublicSet:
    """Public data set.

    Attributes:
        description: One line about it.
        train: Files with its training rows; empty for sets that are only evaluated on.
        val: Files with its held-out rows.
        recognizes: Returns whether a raw row without a prompt column belongs to this set.
        convert: Returns "prompt", "answer", "data_source" and further columns of a raw row; raises UnusableRowError.
        reward: Entry of `reward.functions`.
        prompt_length: Suggested `rollout.prompt_length`, tokens.
        response_length: Suggested `rollout.response_length`, tokens.
        num_val: Rows taken from the end of the training rows as held-out rows, where `val` is empty.
        settings: Further config lines that this set needs, by dotted key.
        refusal: Reason why mrl cannot train on the set; "" if it can.
        consumed: Raw columns that a converted row does not keep: they are in its prompt or answer, or are long texts
            that no reward of mrl reads.
    """

    description: str
    train: tuple[HubFiles, ...]
    val: tuple[HubFiles, ...]
    recognizes: Callable[[Row], bool]
    convert: Callable[[Row], Row]
    reward: Mapping[str, Any]
    prompt_length: int
    response_length: int
    num_val: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    consumed: tuple[str, ...] = ()

    def converted(self, row: Row) -> Row:
        """Returns the result of `convert` with the raw row's other columns, which rewards receive as `extra`.

        Raises:
            UnusableRowError: The row lacks something that the set needs.
        """
        own = self.convert(row)
        others = {name: value for name, value in row.items() if name not in own and name not in self.consumed}
        return {**own, **others}


def names() -> list[str]:
    """Returns the names of the data sets as the command line spells them."""
    return [name.replace("_", "-") for name in registry.names(FOLDER)]


def find(name: str) -> PublicSet:
    """Returns a data set by its name; "_" and "-" are the same.

    Raises:
        UserError: There is no such data set.
    """
    plain = name.lower().replace("_", "-")
    if plain not in names():
        raise UserError(
            f"There is no data set '{name}'.{did_you_mean(plain, names())} Known: {', '.join(names())}. Files of your "
            "own need no preparation: name them in data.train_files."
        )
    found: PublicSet = registry.find(FOLDER, plain.replace("-", "_"), "DATA_SET")
    return found


@cache
def all_sets() -> dict[str, PublicSet]:
    """Returns every data set by its name."""
    return {name: find(name) for name in names()}


def hub_files(repo: str, side: str) -> list[HubFiles] | None:
    """Returns the files of a repository that belong to a side; None for a repository that no data set names.

    Args:
        repo: OWNER/NAME, in any case.
        side: "train" or "val".
    """
    ours = [one for one in all_sets().values() for files in (one.train, one.val) for f in files if _same(f.repo, repo)]
    if not ours:
        return None
    return [file for file in (ours[0].train if side == "train" else ours[0].val) if _same(file.repo, repo)]


def _same(one: str, other: str) -> bool:
    return one.lower() == other.lower()


def recognize(row: Row) -> str | None:
    """Returns the name of the data set that a raw row belongs to; None for prepared and unknown rows.

    Raises:
        AmbiguousRowError: It has the columns of several sets, none of which is refused.
    """
    if any(name in row for name in PREPARED):
        return None
    found = [name for name, one in all_sets().items() if one.recognizes(row)]
    refused = [name for name in found if all_sets()[name].refusal]
    if len(found) > 1 and not refused:
        raise AmbiguousRowError(found)
    return next(iter((*refused, *found)), None)


def user(text: str) -> list[dict[str, str]]:
    """Returns a prompt of one user message."""
    return [{"role": "user", "content": text}]


def text_of(row: Row, *columns: str) -> str:
    """Returns the first of several columns that has a text or a number, as text without surrounding white space.

    Raises:
        UnusableRowError: None of them has one.
    """
    for column in columns:
        value = row.get(column)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    raise UnusableRowError(f"no text in column {' or '.join(columns)}")


def json_of(row: Row, column: str) -> Any:
    """Returns the value of a column that holds JSON text, or the value itself if it is no text.

    Raises:
        UnusableRowError: The column is missing or empty, or its text is not JSON.
    """
    value = row.get(column)
    if not isinstance(value, str):
        if value is None:
            raise UnusableRowError(f"no column {column}")
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"column {column} is not JSON") from error


def rest_of(row: Row, *columns: str) -> Row:
    """Returns some columns of a row, without those that it lacks or that are null."""
    return {column: row[column] for column in columns if row.get(column) is not None}
