"""`mrl data NAME`: writes the training and held-out rows of a public data set as JSONL, and the config lines for them.

Raw files come from the hub or from disk. Rows with equal prompts are written once, and no held-out prompt is among the
training rows. Files are written in one pass and replaced atomically. Imports no torch.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mrl.checkpoint.io.atomic_files import sync_folder
from mrl.config.paths import expand_path
from mrl.data.hub_files import folder_files, is_hub_location, local_files, set_files
from mrl.data.public_sets.base import PublicSet, Row, UnusableRowError, all_sets, find
from mrl.data.row_sources import RowSource, open_files
from mrl.errors import UserError, disk_errors

SIDES = ("train", "val")


@dataclass(frozen=True)
class DataOptions:
    """Options of the command line.

    Attributes:
        name: Name of the data set.
        output: Folder to write to; None: `data/` and the name.
        train: Raw training files, paths or hub locations; empty: those of the data set on the hub.
        val: Raw held-out files, likewise.
        max_train: Training rows that are written at most; None: all.
        max_val: Held-out rows that are written at most; None: all.
        force: Replace files with other content.
        folder: Folder with the files of the data set, instead of those on the hub; None: none.
        split: Split of `folder` that is held out; None: the data set's own.
    """

    name: str
    output: str | None = None
    train: Sequence[str] = ()
    val: Sequence[str] = ()
    max_train: int | None = None
    max_val: int | None = None
    force: bool = False
    folder: str | None = None
    split: str | None = None


@dataclass
class Written:
    """One written file.

    Attributes:
        path: Path of the file.
        num_rows: Rows in it.
        dropped: Reason -> number of raw rows that were left out.
        read: Raw files.
    """

    path: Path
    num_rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    read: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Formats files and counts as one line."""
        files = f"{self.read[0]} and {len(self.read) - 1} more" if len(self.read) > 1 else "".join(self.read)
        without = "".join(f"; {count} left out: {reason}" for reason, count in sorted(self.dropped.items()))
        return f"{self.path}: {self.num_rows} rows from {files}{without}"


def prepare(options: DataOptions) -> tuple[dict[str, Written], str]:
    """Writes the files of a data set.

    Returns:
        Side ("train" or "val") -> its file, and the lines to add to a config (YAML).

    Raises:
        UserError: There is no such data set, mrl cannot train on it, files are missing or unreadable, or no row of a
            side is usable.
    """
    found = find(options.name)
    if found.refusal:
        raise UserError(f"mrl data {options.name}: {found.refusal}.")
    sides = _open_sides(found, options)
    folder = Path(options.output or Path("data") / options.name.lower().replace("_", "-"))
    held_out: set[bytes] = set()
    written: dict[str, Written] = {}
    with disk_errors():
        folder.mkdir(parents=True, exist_ok=True)
        for side, most in (("val", options.max_val), ("train", options.max_train)):
            if side in sides:
                done = Written(folder / f"{side}.jsonl", read=list(dict.fromkeys(part.path for part in sides[side])))
                rows = _converted(found, sides[side], done.dropped, held_out, keeps=side == "val")
                done.num_rows = _write(done.path, islice(rows, most), force=options.force)
                _check_rows(done, options.name, sides[side][0].rows)
                written[side] = done
        sync_folder(folder)
    return {side: written[side] for side in SIDES if side in written}, config_lines(found, written)


def describe_sets() -> str:
    """Returns a table of the data sets: name, reward and description."""
    rows = [(name, str(one.reward["name"]), one.description) for name, one in all_sets().items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {reward:{widths[1]}}  {text}" for name, reward, text in rows)


def config_lines(found: PublicSet, written: dict[str, Written]) -> str:
    """Returns the config of a data set as YAML: files, lengths, reward, and what else it needs."""
    config: dict[str, Any] = {
        "data": {f"{side}_files": str(written[side].path) for side in SIDES if side in written},
        "rollout": {"prompt_length": found.prompt_length, "response_length": found.response_length},
        "reward": {"functions": [dict(found.reward)]},
    }
    for key, value in found.settings.items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=100))


def _check_rows(done: Written, name: str, rows: RowSource) -> None:
    """Raises UserError where no raw row of a side is usable."""
    if not done.num_rows:
        why = "; ".join(f"{count} rows: {reason}" for reason, count in done.dropped.most_common(3))
        raise UserError(
            f"mrl data {name}: {rows.source(0).rpartition(':')[0]} has no usable row ({why}). Its columns are "
            f"{', '.join(rows.row(0))}. Check that the file belongs to this data set."
        )


@dataclass(frozen=True)
class _RawRows:
    """Raw rows first .. last-1 of a file, and the value of their column `data_source`; None: as converted."""

    path: str
    rows: RowSource
    first: int
    last: int
    data_source: str | None


def _open_sides(found: PublicSet, options: DataOptions) -> dict[str, list[_RawRows]]:
    """Opens the raw files of each side that has some.

    Files of the command line replace all files of the hub. A data set without held-out files gives its last training
    rows to that side.
    """
    if options.folder is not None and (options.train or options.val):
        raise UserError("mrl data: --from and --train or --val are both given. Remove one of them.")
    if options.split is not None and options.folder is None:
        raise UserError("mrl data: --split chooses among the files of a folder. Add --from FOLDER, or use --val FILE.")
    sides: dict[str, list[_RawRows]] = {"train": [], "val": []}
    for side in SIDES:
        for path, source in _raw_files(found, options, side):
            rows = open_files([path], f"mrl data: --{side}", lambda row, source: None)
            sides[side].append(_RawRows(path, rows, 0, len(rows), source))
    if found.num_val and not sides["val"]:
        sides["train"], sides["val"] = _split(sides["train"], found.num_val)
    return {side: parts for side, parts in sides.items() if parts}


def _raw_files(found: PublicSet, options: DataOptions, side: str) -> list[tuple[str, str | None]]:
    """Returns path, and value of the column `data_source` (None: as converted), of each raw file of a side."""
    option, files = f"mrl data: --{side}", found.train if side == "train" else found.val
    if options.folder is not None:
        split = options.split if side == "val" else None
        return folder_files(options.folder, files, side, split) if files or split else []
    if options.train or options.val:
        given = options.train if side == "train" else options.val
        paths = [
            local_files(option, text, side, download=True) if is_hub_location(text) else [expand_path(text)]
            for text in given
        ]
        return [(path, None) for each in paths for path in each]
    return [(path, file.data_source) for file in files for path in set_files(option, file, side, download=True)]


def _split(parts: list[_RawRows], num_val: int) -> tuple[list[_RawRows], list[_RawRows]]:
    """Splits off the last `num_val` rows of the last file, at most a tenth of it."""
    last = parts[-1]
    at = last.last - min(num_val, (last.last - last.first) // 10)
    val = [] if at == last.last else [replace(last, first=at)]
    return [*parts[:-1], replace(last, last=at)], val


def _converted(
    found: PublicSet, parts: Sequence[_RawRows], dropped: Counter[str], held_out: set[bytes], *, keeps: bool
) -> Iterator[Row]:
    """Yields the converted rows with distinct prompts.

    Args:
        found: Data set.
        parts: Raw rows.
        dropped: Receives the number of rows left out, by reason.
        held_out: Hashes of held-out prompts, which are left out.
        keeps: True to add the prompts to `held_out` once they are yielded.
    """
    seen: set[bytes] = set()
    for part in parts:
        for index in range(part.first, part.last):
            try:
                row = found.converted(part.rows.row(index))
            except UnusableRowError as error:
                dropped[str(error)] += 1
                continue
            prompt = blake2b(_question(row).encode(), digest_size=16).digest()
            if prompt in seen:
                dropped["equal to an earlier prompt"] += 1
            elif not keeps and prompt in held_out:
                dropped["a held-out prompt"] += 1
            else:
                seen.add(prompt)
                if keeps:
                    held_out.add(prompt)
                yield row if part.data_source is None else {**row, "data_source": part.data_source}


def _question(row: Row) -> str:
    """Returns the text of a prompt without differences in white space; messages of the system do not count."""
    texts = [message["content"] for message in row["prompt"] if message.get("role") != "system"]
    return " ".join(" ".join(texts).split())


def _write(path: Path, rows: Iterator[Row], *, force: bool) -> int:
    """Writes rows as JSONL, replaces the file at the end, and returns their number.

    Raises:
        UserError: The file exists with other content, and `force` is False.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.writing")
    count = 0
    try:
        with fresh.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        if count and path.exists() and not force and not filecmp.cmp(fresh, path, shallow=False):
            raise UserError(
                f"'{path}' exists with other content, on which a run may have trained. Choose another folder with "
                "--out, or add --force to replace it."
            )
        if count:
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return count
