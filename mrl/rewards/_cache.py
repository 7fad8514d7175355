"""Scores that were computed before: what a resumed run samples again is not scored again.

Owns the key of a score (the row, the tokens, and the functions with their sources and arguments), and the files that
hold scores: lines with a checksum, appended one by one, so that a kill loses at most the line being written. A failure
is no score and is not kept. Imports no torch.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mrl.rewards._call import Outcome
from mrl.rewards._signatures import Sample

MIB = 1 << 20

_SAMPLE = [item.name for item in fields(Sample)]

_written = json.JSONEncoder(sort_keys=True, default=repr).encode
"""What names a score, as text."""

NEW, OLD = ".jsonl", ".old.jsonl"
"""Endings of a cache's two files: at half of its size the new one takes the place of the old one."""


class ScoreCache:
    """The scores of one replica, in memory and in two files; safe to use from several threads.

    A disk that takes no more ends the writing, not the run.
    """

    def __init__(self, folder: Path, name: str, limit_mb: int) -> None:
        """Reads what is there: this replica's scores, and while there is room those of others (another layout).

        Args:
            folder: Made where it is not there.
            name: Of the replica's files.
            limit_mb: Size of its files together, MiB, and about that of the memory.
        """
        self._new, self._old = folder / f"{name}{NEW}", folder / f"{name}{OLD}"
        self._half_bytes = limit_mb * MIB // 2
        self._scores: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._lock = threading.Lock()
        self._file = -1
        room = 2 * self._half_bytes
        for path in self._files(folder):
            room -= path.stat().st_size
            if room < 0 and path not in (self._new, self._old):
                continue
            self._before |= _read(path)
        self._open(folder)

    def get(self, key: str) -> list[Outcome] | None:
        """The scores under this key; None where there are none."""
        with self._lock:
            found = self._scores.get(key)
            if found is None:
                found = self._before.get(key)
                if found is not None:
                    self._keep(key, found)  # what is used stays
        return None if found is None else [Outcome(**one) for one in json.loads(found)]

    def put(self, key: str, outcomes: Sequence[Outcome]) -> None:
        """Keeps scores, unless one of them is a failure."""
        if not any(outcome.error for outcome in outcomes):
            with self._lock:
                self._keep(key, json.dumps([outcome.fields() for outcome in outcomes]))

    def close(self) -> None:
        """The files stay."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _files(self, folder: Path) -> list[Path]:
        """Its own first, in the order in which they were written, then those of others, the latest first."""
        try:
            others = [path for path in folder.glob(f"*{NEW}") if path not in (self._new, self._old)]
            others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return []
        return [path for path in (self._old, self._new) if path.is_file()] + others

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._written = os.fstat(self._file).st_size
            if self._written:
                os.write(self._file, b"\n")  # ends a line that a kill cut
        except OSError:
            self._file = -1

    def _keep(self, key: str, value: str) -> None:
        self._scores[key] = value
        if self._file < 0:
            return
        body = f"{key} {value}".encode()
        line = b"%08x %s\n" % (zlib.crc32(body), body)
        try:
            if self._written + len(line) > self._half_bytes:
                self._turn()
            self._written += os.write(self._file, line)
        except OSError:
            os.close(self._file)
            self._file = -1

    def _turn(self) -> None:
        """What was new is old, and what was old is gone."""
        os.close(self._file)
        self._file = -1
        os.replace(self._new, self._old)
        self._before, self._scores = self._scores, {}
        self._open(self._new.parent)


def _read(path: Path) -> dict[str, str]:
    """Key -> scores of every whole line."""
    found: dict[str, str] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        mark, _, body = line.partition(b" ")
        if mark == b"%08x" % zlib.crc32(body):
            key, _, value = body.decode().partition(" ")
            found[key] = value
    return found


def keys_of(identity: str, samples: Sequence[Sample]) -> list[str | None]:
    """The names of the scores of samples that were scored in one call; None where a row cannot be told from another."""
    try:
        told = [identity, *(getattr(sample, name) for sample in samples for name in _SAMPLE)]
        key = blake2b(_written(told).encode(), digest_size=16).hexdigest()
        return [f"{key}-{place}" if place else key for place in range(len(samples))]
    except (TypeError, ValueError, RecursionError):
        return [None] * len(samples)


def identity_of(functions: Sequence[tuple[str, Mapping[str, Any], str]]) -> str:
    """Of functions: the name, the arguments and the digest of the source of each."""
    return _written([[name, dict(kwargs), source] for name, kwargs, source in functions])


@dataclass
class Spared:
    """Samples of a batch by what is known of them.

    Attributes:
        cache: Where they are looked up and kept.
        found: Row -> outcomes that were there.
        asked: Rows to compute, those of one call together.
        keys: Row to compute -> its key.
        same: Row -> the row in `asked` that it equals.
    """

    cache: ScoreCache | None
    found: dict[int, list[Outcome]] = field(default_factory=dict)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    keys: dict[int, str | None] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        cache: ScoreCache | None, identity: str, samples: Sequence[Sample], units: Iterable[tuple[int, ...]]
    ) -> Spared:
        """Looks up every sample; without a cache all are asked.

        Args:
            cache: Of the replica.
            identity: Of the functions.
            samples: By row.
            units: Rows that are scored in one call: known only where all of them are.
        """
        spared, first = Spared(cache), dict[str, tuple[int, ...]]()
        for unit in units:
            keys = [None] * len(unit) if cache is None else keys_of(identity, [samples[row] for row in unit])
            if cache is not None and keys[0] is not None:
                if keys[0] in first:
                    spared.same.update(zip(unit, first[keys[0]], strict=True))
                    continue
                known = {row: cache.get(key) for row, key in zip(unit, keys, strict=True) if key is not None}
                told = {row: outcomes for row, outcomes in known.items() if outcomes is not None}
                if len(told) == len(unit):
                    spared.found.update(told)
                    continue
                first[keys[0]] = unit
            spared.asked.append(unit)
            spared.keys.update(zip(unit, keys, strict=True))
        return spared

    def keep(self, row: int, outcomes: Sequence[Outcome]) -> None:
        """Takes what was computed for a row in `asked`."""
        key = self.keys[row]
        if self.cache is not None and key is not None:
            self.cache.put(key, outcomes)

    def joined(self, computed: Mapping[int, list[Outcome]]) -> dict[int, list[Outcome]]:
        """Row -> outcomes, of all rows that are known now."""
        known = {**self.found, **computed}
        return known | {row: known[first] for row, first in self.same.items() if first in known}
