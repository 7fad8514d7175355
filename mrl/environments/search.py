"""Search environment over a folder of texts: the model searches for words, reads files, and answers."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config.did_you_mean import did_you_mean_path
from mrl.environments.base import Observation, Tool
from mrl.environments.toolbox import ToolEnvironment
from mrl.errors import UserError

_WORD = re.compile(r"\w+")
_MAX_FILES = 100_000
_MAX_FILE_BYTES = 1 << 20  # the rest of a larger file is ignored
_K1, _B = 1.5, 0.75  # BM25's usual constants


class _Index:
    """BM25 index (Robertson and Zaragoza 2009) of the texts in a folder."""

    def __init__(self, folder: Path, pattern: str) -> None:
        found = sorted(path for path in folder.rglob(pattern) if path.is_file() and not path.is_symlink())
        if not found or len(found) > _MAX_FILES:
            raise UserError(f"search: {len(found)} files match '{pattern}' in {folder}, expected 1 to {_MAX_FILES}.")
        self.texts = {path.relative_to(folder).as_posix(): _text(path) for path in found}
        self._counts = {name: Counter(_words(text)) for name, text in self.texts.items()}
        self._lengths = {name: counts.total() for name, counts in self._counts.items()}
        self._mean = max(1.0, sum(self._lengths.values()) / len(found))
        self._files = Counter(word for counts in self._counts.values() for word in counts)

    def best(self, query: str, count: int) -> list[str]:
        """Returns the names of the best-scoring files, best first; only files with a word of the query."""
        words = [word for word in dict.fromkeys(_words(query)) if word in self._files]
        scores = {name: self._score(name, words) for name in self._counts}
        ranked = heapq.nsmallest(count, scores.items(), key=lambda item: (-item[1], item[0]))
        return [name for name, score in ranked if score > 0]

    def _score(self, name: str, words: Sequence[str]) -> float:
        counts, total = self._counts[name], 0.0
        for word in words:
            rare = math.log(1 + (len(self.texts) - self._files[word] + 0.5) / (self._files[word] + 0.5))
            length = 1 - _B + _B * self._lengths[name] / self._mean
            total += rare * counts[word] * (_K1 + 1) / (counts[word] + _K1 * length)
        return total


@cache
def _index(folder: str, pattern: str) -> _Index:
    """Builds an index once per worker, for all of its episodes."""
    return _Index(Path(folder), pattern)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES).decode(errors="replace")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Search(ToolEnvironment):
    """Tool environment with `search` and `read`; the reward comes from the config's reward functions."""

    def __init__(self, folder: str, pattern: str = "*.txt", num_results: int = 5, page_chars: int = 2000) -> None:
        """Reads the folder.

        Args:
            folder: Folder of the texts, searched recursively.
            pattern: Shell pattern of the file names.
            num_results: Number of results of one search, at most.
            page_chars: Size of a page in `read`, characters.
        """
        if not Path(folder).is_dir() or num_results < 1 or page_chars < 1:
            raise UserError(
                f"search: folder='{folder}', num_results={num_results}, page_chars={page_chars}; expected an existing "
                f"folder, and numbers from 1.{did_you_mean_path(folder)}"
            )
        self._index = _index(str(Path(folder).resolve()), pattern)
        self._num_results = num_results
        self._page_chars = page_chars

    @property
    def tools(self) -> Sequence[Tool]:
        """The methods `search` and `read`."""
        return (self.search, self.read)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Adds nothing to the prompt."""
        return Observation()

    def search(self, query: str) -> str:
        """Finds the files that fit a few words best.

        Args:
            query: The words.
        """
        names = self._index.best(query, self._num_results)
        return "\n".join(f"{name}: {self._excerpt(name, query)}" for name in names) or "Nothing was found."

    def read(self, file: str, page: int = 1) -> str:
        """Reads a page of a file.

        Args:
            file: Its name, as a search gives it.
            page: Which page, 1 is the first.
        """
        if file not in self._index.texts:
            raise ValueError(f"there is no file '{file[:100]}'")
        text = self._index.texts[file]
        num_pages = max(1, math.ceil(len(text) / self._page_chars))
        if not 1 <= page <= num_pages:
            raise ValueError(f"'{file}' has pages 1 to {num_pages}")
        return text[(page - 1) * self._page_chars : page * self._page_chars]

    def _excerpt(self, name: str, query: str) -> str:
        """Returns the first line with a word of the query."""
        words = set(_words(query))
        lines = self._index.texts[name].splitlines()
        return next((line.strip()[:200] for line in lines if words & set(_words(line))), "")


ENVIRONMENT = Search
