"""Data files on the Hugging Face hub, as `data.train_files` and `data.val_files` name them.

Three forms: `openai/gsm8k`, the training or held-out files of a data set; `hf://datasets/openai/gsm8k`, the same; and
`hf://datasets/openai/gsm8k@main/main/train-*.parquet`, a pattern of files, with or without a revision. No torch here.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from mrl.config.config import DataConfig
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.hub_cache import MissingSnapshotError, cache_folder, find_snapshot, is_hub_name
from mrl.data.public_sets.base import HubFiles, all_sets, hub_files
from mrl.errors import UserError

PREFIX = "hf://"
SUFFIXES = (".jsonl", ".json", ".parquet")
"""Suffixes of files that can be read."""

SPLITS = {"train": ("train",), "val": ("validation", "val", "dev", "test")}
"""Side -> names of its split in a repository, in order of preference."""

_LOCATION = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<pattern>.+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\b")


@dataclass(frozen=True)
class HubLocation:
    """Place of data files on the hub.

    Attributes:
        repo: OWNER/NAME.
        revision: Branch, tag or commit; None for the newest.
        pattern: Shell pattern of the paths in the repository; None for the files of a side.
    """

    repo: str
    revision: str | None = None
    pattern: str | None = None


def is_hub_location(text: str) -> bool:
    """Returns whether a data file is named as on the hub: "hf://...", or OWNER/NAME where no such file exists."""
    return text.startswith(PREFIX) or (is_hub_name(text) and not text.endswith(SUFFIXES))


def fetch_data_files(data: DataConfig, *, download: bool = False) -> None:
    """Checks that the files of all hub locations in `train_files` and `val_files` are in the hub's cache.

    Args:
        data: Names of the files.
        download: Download what the cache lacks; False: refuse it.

    Raises:
        UserError: The cache lacks files, and `download` is False or the download failed; or there are no such files.
    """
    for side in SPLITS:
        for text in getattr(data, f"{side}_files"):
            paths_of(text, side, download=download)


def paths_of(text: str, side: str, *, download: bool = False) -> list[str]:
    """Returns the paths of an entry of `train_files` or `val_files`: itself, or the files of a hub location.

    Args:
        text: Path or hub location.
        side: "train" or "val".
        download: Download what the cache lacks; False: refuse it.

    Raises:
        UserError: As `fetch_data_files`.
    """
    return local_files(f"data.{side}_files", text, side, download=download) if is_hub_location(text) else [text]


def with_paths(data: DataConfig) -> DataConfig:
    """Returns the settings with all hub locations replaced by paths in the cache.

    Raises:
        UserError: As `fetch_data_files`.
    """
    paths = {
        side: [path for text in getattr(data, f"{side}_files") for path in paths_of(text, side)] for side in SPLITS
    }
    return replace(data, train_files=paths["train"], val_files=paths["val"])


def is_local(key: str, text: str) -> bool:
    """Returns whether a data file exists here: as a file, or in the hub's cache.

    Args:
        key: "data.train_files" or "data.val_files".
        text: Path or hub location.
    """
    if not is_hub_location(text):
        return os.path.isfile(text)
    try:
        paths_of(text, key.removeprefix("data.").removesuffix("_files"))
    except UserError:
        return False
    return True


def local_files(key: str, text: str, side: str, *, download: bool = False) -> list[str]:
    """Returns the paths of the files of a hub location, sorted.

    Args:
        key: Config key or option, for messages.
        text: Hub location.
        side: "train" or "val": which files, where the location has no pattern.
        download: Download what the cache lacks; False: refuse it.

    Raises:
        UserError: The cache lacks files, and `download` is False or the download failed; or there are no such files.
    """
    where = parse_location(key, text)
    known = None if where.pattern else hub_files(where.repo, side)
    if known is None:
        return _files(key, text, where, side, download=download)
    for one in all_sets().values():
        if one.refusal and where.repo.lower() in {file.repo.lower() for file in (*one.train, *one.val)}:
            raise UserError(f"{key}: '{text}' cannot be used: {one.refusal}.")
    if not known:
        other = "val" if side == "train" else "train"
        raise UserError(
            f"{key}: '{text}' has no {'training' if side == 'train' else 'held-out'} rows, only rows for "
            f"data.{other}_files. Use another data set here; `mrl data` lists some."
        )
    return [path for file in known for path in set_files(key, file, side, where.revision, download=download)]


def set_files(key: str, file: HubFiles, side: str, revision: str | None = None, *, download: bool = False) -> list[str]:
    """Returns the paths of files that a public data set names; the arguments are those of `local_files`."""
    where = replace(parse_location(key, file.location), revision=revision)
    return _files(key, file.location, where, side, download=download)


def folder_files(
    folder: str, files: Sequence[HubFiles], side: str, split: str | None = None
) -> list[tuple[str, str | None]]:
    """Returns the files of one side in a local copy of a public data set.

    Args:
        folder: Folder with the files under their paths on the hub, or with the same names, or named after their
            splits. Files of several repositories may also be in subfolders NAME or OWNER/NAME.
        files: Files of the side on the hub.
        side: "train" or "val".
        split: Split to read instead, such as "test"; None: the files above, else the first split that exists.

    Returns:
        Path, and value of the column `data_source` (None: as converted), of each file.

    Raises:
        UserError: The folder does not exist, lacks files, or has several versions of the data.
    """
    option, root = "mrl data: --from", Path(folder)
    if not root.is_dir():
        raise UserError(f"{option}: '{folder}' is not a folder.{did_you_mean_path(folder)}")
    own = [] if split else [(file, _own_files(root, file)) for file in files]
    missing = [file for file, found in own if not found]
    if own and len(missing) < len(own):
        if missing:
            raise UserError(
                f"{option}: '{folder}' has no complete {_pattern(missing[0])} of {missing[0].repo}. Add it, or name "
                "the files with --train and --val."
            )
        return [(str(path), file.data_source) for file, found in own for path in found]
    splits = [split] if split else SPLITS[side]
    found = next((paths for name in splits if (paths := _matches(root, _split_patterns(name)))), [])
    if not _is_complete(found):
        names = " or ".join([f"'{_pattern(file)}'" for file in files if not split] + [f"'{name}*'" for name in splits])
        raise UserError(
            f"{option}: '{folder}' has no complete {'training' if side == 'train' else 'held-out'} files: expected "
            f"{names} ({', '.join(SUFFIXES)}). Name the files with --train and --val."
        )
    parents = sorted({str(path.parent) for path in found})
    if len(parents) > 1:
        raise UserError(f"{option}: '{folder}' has several versions. Choose one: --from {', --from '.join(parents)}.")
    return [(str(path), files[0].data_source if len(files) == 1 and not split else None) for path in found]


def _pattern(file: HubFiles) -> str:
    """Returns the shell pattern of a set's files in their repository."""
    return parse_location("", file.location).pattern or "*"


def _own_files(root: Path, file: HubFiles) -> list[Path]:
    """Returns the files of a repository in a folder or its subfolder for the repository; [] if some are missing."""
    pattern = _pattern(file)
    for folder in (root, root / file.repo, root / file.repo.partition("/")[2]):
        for paths in (pattern, pattern.rpartition("/")[2]):
            if _is_complete(found := [path for path in _matches(folder, [paths]) if path.suffix in SUFFIXES]):
                return found
    return []


def parse_location(key: str, text: str) -> HubLocation:
    """Parses a hub location.

    Raises:
        UserError: It is of another form, such as "hf://openai/gsm8k".
    """
    if not text.startswith(PREFIX):
        return HubLocation(text)
    match = _LOCATION.fullmatch(text.rstrip("/"))
    if match is None or ".." in text.split("/"):
        raise UserError(
            f"{key}: '{text}' is not a data set on the hub. Write OWNER/NAME, hf://datasets/OWNER/NAME, or "
            "hf://datasets/OWNER/NAME/PATH, where PATH may contain * (data/train-*.parquet)."
        )
    return HubLocation(match["repo"], match["revision"], match["pattern"])


def _files(key: str, text: str, where: HubLocation, side: str, *, download: bool) -> list[str]:
    choices = [[where.pattern]] if where.pattern else [_split_patterns(split) for split in SPLITS[side]]

    def best(folder: Path) -> list[Path]:
        return next((found for patterns in choices if (found := _matches(folder, patterns))), [])

    try:
        folder = find_snapshot(
            where.repo, [pattern for patterns in choices for pattern in patterns], lambda at: _is_complete(best(at)),
            kind="dataset", revision=where.revision, download=download,
        )  # fmt: skip
    except MissingSnapshotError as error:
        raise _not_found_error(key, text, where, str(error)) from error
    found = best(folder)
    if not found:
        name = where.pattern or f"{' or '.join(SPLITS[side])} ({', '.join(SUFFIXES)})"
        raise _not_found_error(key, text, where, f"it has no file {name}")
    if not _is_complete(found):
        raise _not_found_error(key, text, where, "some of its parts are missing")
    _check_one_folder(key, text, where, folder, found)
    return [str(path) for path in found]


def _split_patterns(split: str) -> list[str]:
    return [
        f"{folder}{split}{rest}{suffix}"
        for folder in ("", "*/")
        for rest in ("", "-*", "_*", "/*")
        for suffix in SUFFIXES
    ]


def _matches(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Returns the files of a snapshot whose path in the repository matches a pattern, as `snapshot_download` does."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and any(fnmatch(path.relative_to(folder).as_posix(), pattern) for pattern in patterns)
    )


def _is_complete(found: Sequence[Path]) -> bool:
    """Returns whether there are files, and all parts of those that are numbered as -00001-of-00003."""
    parts: dict[str, tuple[int, int]] = {}
    for path in found:
        if match := _PART.search(path.name):
            name = str(path.with_name(_PART.sub("-of-", path.name)))
            parts[name] = (parts.get(name, (0, 0))[0] + 1, int(match[2]))
    return bool(found) and all(count == total for count, total in parts.values())


def _check_one_folder(key: str, text: str, where: HubLocation, folder: Path, found: Sequence[Path]) -> None:
    """Raises UserError where the files of a side lie in several folders, which are different versions of the data."""
    folders = sorted({path.parent.relative_to(folder).as_posix() for path in found})
    if where.pattern is None and len(folders) > 1:
        choices = ", ".join(f"hf://datasets/{where.repo}/{name}/*" for name in folders[:20])
        raise UserError(f"{key}: '{text}' has several versions. Choose one: {choices}.")


def _not_found_error(key: str, text: str, where: HubLocation, reason: str) -> UserError:
    hint = "" if text.startswith(PREFIX) else f" there is no such file.{did_you_mean_path(text)} As"
    name = "a data set on the Hugging Face hub" if hint else "on the Hugging Face hub"
    revision = f" --revision {where.revision}" if where.revision else ""
    return UserError(
        f"{key}: '{text}':{hint or ''} {name}, {reason}. Run `hf download --repo-type dataset {where.repo}{revision}` "
        f"where the hub can be reached, with this cache ({cache_folder()}; HF_HUB_CACHE selects another one), or name "
        "local files."
    )
